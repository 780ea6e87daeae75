"""Disk I/O of the cache as plain data: jobs, their results, and the metadata of a segment on disk.

Jobs run concurrently with the steps, those of each kind in order, and those of a plan only after its KV operations.
Results come back between two steps. A disk error never fails a request: the tokens are computed instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from llamaslot.base.kv_ops import Kv


@dataclass(frozen=True, slots=True)
class SegmentMeta:
    """Metadata of a segment on disk: which tokens of which path it has."""

    number: int
    parent: int | None
    """Number of the segment that has the token before its first one, also on disk; None at position 0."""
    namespace: str
    start: int
    tokens: bytes
    """Its own tokens, packed; none for a checkpoint."""
    n_bytes: int
    path_digest: bytes
    """Digest of all tokens up to its end: shows to a read whether index and file belong to the same path."""


def path_digest(namespace: str, tokens: bytes) -> bytes:
    """Return 16 bytes that identify these tokens in a namespace."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=16)
    digest.update(b"\0" + tokens)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class WriteTotals:
    """Bytes of KV that servers have written to a disk."""

    total_bytes: int = 0
    budget_used_bytes: int = 0
    """Bytes of the daily budget in use after the last write."""
    seconds_ago: float = 0.0
    """Seconds since that write; 0 if the clock was set back."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write a segment to disk; answered by `Written`."""

    meta: SegmentMeta
    budget_used_bytes: int = 0
    """Bytes of the daily budget in use, including this write; stored for the next start."""


@dataclass(frozen=True, slots=True)
class Read:
    """Read a segment into memory; answered by `ReadDone`, `ReadFailed` or `Corrupt`."""

    number: int


@dataclass(frozen=True, slots=True)
class Erase:
    """Delete segments from disk; some of them may never have been written."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MarkUsed:
    """Record that segments were used, the least recently used first."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reparent:
    """Record a new parent of some segments."""

    numbers: tuple[int, ...]
    parent: int


@dataclass(frozen=True, slots=True)
class CancelReads:
    """Cancel the pending reads: the disk does not respond, and no request waits for them any more."""


Job: TypeAlias = Write | Read | Erase | MarkUsed | Reparent | CancelReads


@dataclass(frozen=True, slots=True)
class Written:
    """A write has ended."""

    number: int
    ok: bool


@dataclass(frozen=True, slots=True)
class ReadStarted:
    """A read was sent to the disk."""


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A read has succeeded, and took `seconds`."""

    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read has failed for a reason that may be temporary."""

    number: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A file differs from what was written, or is gone."""

    number: int


IoEvent: TypeAlias = Written | ReadStarted | ReadDone | ReadFailed | Corrupt


class CorruptSegmentError(Exception):
    """The disk's copy of a segment differs from what was written."""


class SegmentDisk(Protocol):
    """Segments on a disk. `read` may be called on one thread while all other methods are called on another."""

    @property
    def capacity(self) -> int:
        """Most bytes that segments may take, counted by their metadata."""

    @property
    def first_number(self) -> int:
        """Smallest segment number such that it and all above it were never in use."""

    @property
    def written(self) -> WriteTotals:
        """Bytes that earlier servers wrote, as of when the disk was opened."""

    def take_segments(self) -> Sequence[SegmentMeta]:
        """Return the segments found when the disk was opened, the least recently used first. Callable once."""

    def ignore(self, numbers: Sequence[int]) -> None:
        """Keep these segments only until other segments need their space."""

    def write(self, meta: SegmentMeta, kv: Kv) -> bool:
        """Write a segment durably; returns False if that failed."""

    def count_write(self, n_bytes: int, budget_used_bytes: int) -> None:
        """Store for the next start that `n_bytes` more were written, and how much of the daily budget is in use."""

    def read(self, number: int) -> Kv | None:
        """Return the KV of a segment exactly as it was written; None if it cannot be read now.

        Raises `CorruptSegmentError` if it can never be read.
        """

    def erase(self, numbers: Sequence[int]) -> None:
        """Carry out `Erase`, and retry earlier deletions that failed."""

    def mark_used(self, numbers: Sequence[int]) -> None:
        """Carry out `MarkUsed`."""

    def reparent(self, numbers: Sequence[int], parent: int) -> None:
        """Carry out `Reparent`."""
