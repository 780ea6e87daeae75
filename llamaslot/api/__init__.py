"""HTTP: routes, wire types, server-sent events and error bodies. The only room that knows HTTP; it never decides
anything about a model.
"""
