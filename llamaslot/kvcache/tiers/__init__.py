"""Segments and checkpoints in RAM and on disk: their states, budgets, shares of tenants, reads and write-back."""
