"""Movement of KV between the pool and the tiers: when to offload, what to load, restore, drop and publish."""
