"""State that a model keeps besides KV that can be trimmed, and what can be done with it."""
