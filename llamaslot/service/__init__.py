"""The async facade over the engine: render, submit, stream, cancel. Knows no HTTP and no model."""
