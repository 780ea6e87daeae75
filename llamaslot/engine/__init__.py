"""The engine and its step loop: one event loop owns all state, one thread runs the model, one tokenizes.

It is handed a backend and never imports one; it speaks to the service in messages only.
"""
