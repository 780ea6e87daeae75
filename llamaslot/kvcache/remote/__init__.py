"""Remote tier: KV that several servers share through one store. See `remote_tier.py`."""
