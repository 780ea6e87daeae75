"""Stores of the remote tier, which several servers share.

Import `redis_store` only if a store is configured: its client takes much memory, and time to import.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Limits of a store, and how to connect to it. URL, secret and password must not be logged."""

    max_bytes: int
    """Bytes that all servers together may keep in the store for a model; 0 for only the store's own limit."""
    ttl_s: int
    """Seconds after which unused objects expire."""
    timeout_s: float
    """Time limit, in seconds, of calls that transfer no object."""
    address: str = ""
    """The store's URL in messages, without user and password."""
    url: str = field(default="", repr=False)
    secret: bytes = field(default=b"", repr=False)
    """Secret that all servers of the fleet share."""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    """File of CA certificates; empty for the system's."""
