"""State that a model keeps besides KV that can be trimmed: what it is, and which models cannot be served."""
