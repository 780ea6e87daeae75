"""Main programs of the engine's and the prompt worker's processes."""
