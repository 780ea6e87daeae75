"""Replay of recorded agent sessions: what the cache gives in the order and at the distances of real use."""
