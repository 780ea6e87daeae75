"""Remote tier: KV that several servers share through one store (`remote_tier.py`)."""
