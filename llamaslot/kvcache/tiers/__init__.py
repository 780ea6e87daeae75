"""Segments and checkpoints in RAM, on disk and in the remote store: what is kept, written, read, sent, fetched."""
