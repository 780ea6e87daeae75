"""Client programs of other projects against a server; each has an environment of its own (`.ci/clients.py`).

The server is a process of this project's environment, of which the tests import nothing.
"""
