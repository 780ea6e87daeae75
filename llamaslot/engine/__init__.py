"""The engine and its step loop: one event loop owns all state, one thread runs the model.

It is given a backend and never imports one. It exchanges only messages with the service.
"""
