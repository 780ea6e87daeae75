"""State that models keep: which models are served, which allow reuse, and checkpoints of partial states."""
