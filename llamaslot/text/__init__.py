"""Chat templates, grammars, and decoding of generated text. Pure functions: no model, no event loop, no HTTP."""
