"""The prefix cache: which tokens have their KV where, and what leaves the pool."""
