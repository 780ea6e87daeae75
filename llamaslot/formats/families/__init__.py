"""Formats of model families, one module for each kind of notation."""
