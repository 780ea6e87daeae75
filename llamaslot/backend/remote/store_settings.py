"""Settings of a remote store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Limits of a store, and its name in messages. `app/cache/cache_remote.py` has the URL and the secrets."""

    max_bytes: int
    """Bytes that all servers together may keep in the store for a model; 0 for only the store's own limit."""
    ttl_s: int
    """Seconds after which unused objects expire."""
    timeout_s: float
    """Time limit, in seconds, of calls that transfer no object."""
    address: str = ""
    """The store's URL in messages, without user and password."""
