"""Offload of KV to RAM and disk: segments, their states, budgets, write-back, and when to offload."""
