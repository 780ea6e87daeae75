"""The one composition root: configuration, models by name, and the wiring of everything below."""
