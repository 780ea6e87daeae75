"""The composition root: configuration, models by name, and the wiring of all other packages."""
