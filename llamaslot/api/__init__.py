"""HTTP: routes, request and reply bodies, server-sent events and errors. The only package that knows HTTP."""
