"""Stores of the remote tier, which several servers share.

Import `redis_store` only for a server that has one: its client takes much memory, and time to import.
"""
