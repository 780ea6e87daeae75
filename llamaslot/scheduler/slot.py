"""Slot: runs one request at a time. Its id is also its llama.cpp sequence id."""

from __future__ import annotations

from dataclasses import dataclass

from llamaslot.scheduler.request import Request


@dataclass(slots=True)
class Slot:
    """One slot, and the request that runs in it, if any."""

    id: int
    request: Request | None = None
