"""Implementations of `llamaslot.base.backend.Backend`: `llama` runs models, `fake` runs tests.

`llamaslot.backend.llama` is the only room that touches llama_cpp.
"""
