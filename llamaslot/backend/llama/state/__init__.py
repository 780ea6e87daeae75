"""Models by the state that they keep: which are served, which allow reuse, and checkpoints of partial states."""
