"""Stores of the remote tier, which several servers share."""

from llamaslot.backend.remote.redis_store import RedisStore, StoreSettings

__all__ = ["RedisStore", "StoreSettings"]
