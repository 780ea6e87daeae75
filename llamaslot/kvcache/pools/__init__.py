"""Pools of cells: which slot a request gets, and how it gets the cells of its cached prefix or of a saved slot."""
