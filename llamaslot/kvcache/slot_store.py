"""What a single slot held, as plain data, and what the engine asks of files for that.

Such a file is its user's own: unlike a disk tier's it is asked for by name, and it fails loudly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llamaslot.base.kv_ops import Kv


@dataclass(frozen=True, slots=True)
class SavedSegment:
    """The KV of positions `[start, end)`."""

    start: int
    end: int
    cell_order: bytes
    """See `CellMap.cell_order`."""
    kv: Kv


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """All that a slot held."""

    space: str
    """The namespace."""
    tokens: bytes
    """All of them, packed."""
    segments: tuple[SavedSegment, ...]
    """From the first token to the last, without a gap."""


class BadSlotError(Exception):
    """What a file has is not what was written, or not for this model; says why."""


class SlotStore(Protocol):
    """Files by name; used by one thread. Raises `OSError` where one cannot be written or read."""

    def write(self, name: str, saved: SavedSlot) -> int:
        """Write a file, in place of another one of that name; its bytes."""

    def read(self, name: str) -> tuple[SavedSlot, int]:
        """What was written, and the file's bytes. Raises `BadSlotError`."""
