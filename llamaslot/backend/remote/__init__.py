"""Stores of the remote tier, which several servers share.

Import `redis_store` only if a store is configured: its client takes much memory, and time to import.
"""
