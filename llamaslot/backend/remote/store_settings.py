"""Settings of a remote store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Limits of a store, and its name in messages; `app/cache/cache_remote.py` has the URL and the secrets."""

    max_bytes: int
    """Bytes that all servers together may keep there for a model; 0 for the store's own limit only."""
    ttl_s: int
    """Seconds after which what was not used expires."""
    timeout_s: float
    """Time limit of every call that transfers no object."""
    address: str = ""
    """The store's URL in messages, without user and password."""
