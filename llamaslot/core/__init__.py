"""The decisions: requests, slots, cells and the step's plan, as pure Python and numpy.

No llama_cpp, no event loop, no clock (pass `now`), no logging. Whatever runs a model is reached through
`llamaslot.core.backend.Backend`.
"""
