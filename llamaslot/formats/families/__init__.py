"""Formats, one module for each model family."""
