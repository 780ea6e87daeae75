"""Settings of a remote store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of a store."""

    max_bytes: int
    """KV that all servers may keep there; 0 for no limit of ours."""
    ttl_s: int
    """Seconds after which what was not used expires."""
    timeout_s: float
    """Time that the store has to answer whatever is no transfer of an object."""
    address: str = ""
    """The store's URL in messages, without user and password."""
