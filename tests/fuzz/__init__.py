"""Fuzzing of all that comes from outside: request bodies, templates, files."""
