"""What the core asks of a disk on which segments outlive the server, and the plain types that go there and back.

Jobs are carried out beside the steps, each kind in order, and those of a plan only once its operations are done.
Where the core waits for an answer, it comes between two steps. A disk never fails loudly: whatever is wrong there
is a segment, an anchor or a session that is not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import SegmentSize
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.segments import Segment


@dataclass(frozen=True, slots=True)
class Record:
    """What a disk knows of a segment: where it lies on which path."""

    number: int
    front: int | None
    """The segment that has the token in front of it, and is on the disk too; None where it starts at 0."""
    space: str
    """The namespace."""
    start: int
    tokens: bytes
    """Its own, packed."""
    n_bytes: int
    path_digest: bytes
    """`path_digest` of all tokens up to its end: that the index and the file speak of the same."""
    cell_order: bytes = b""
    """See `CellMap.cell_order`."""


def path_digest(space: str, tokens: bytes) -> bytes:
    """16 bytes that tell these tokens of a namespace from all others."""
    digest = hashlib.blake2b(space.encode(), digest_size=16)
    digest.update(b"\0" + tokens)
    return digest.digest()


def path_of(record: Record, front: Segment | None, size: SegmentSize) -> bytes | None:
    """All tokens up to the end of a record that continues `front`; None where it cannot have been written so."""
    n_tokens, odd = divmod(len(record.tokens), WIDTH)
    if odd or not n_tokens or record.n_bytes != size.of(n_tokens):
        return None
    if record.cell_order and not is_permutation(record.cell_order, n_tokens):
        return None
    tokens = record.tokens
    if front is not None:
        if front.number != record.front or not front.start < record.start <= front.end:
            return None
        tokens = front.tokens[: record.start * WIDTH] + tokens
    if len(tokens) != (record.start + n_tokens) * WIDTH:
        return None
    return tokens if record.path_digest == path_digest(record.space, tokens) else None


def is_permutation(cell_order: bytes, n: int) -> bool:
    """Whether these bytes can be a `CellMap.cell_order` of so many tokens, other than that of ascending cells."""
    return len(cell_order) == 2 * n and sorted(np.frombuffer(cell_order, "<i2").tolist()) == list(range(n))


@dataclass(frozen=True, slots=True)
class Write:
    """Put a segment on the disk; answered."""

    record: Record


@dataclass(frozen=True, slots=True)
class Read:
    """Bring a segment's KV back into memory; answered."""

    number: int


@dataclass(frozen=True, slots=True)
class Erase:
    """Forget segments, of which some may never have got there."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """Note that segments were used, the least recently used first."""

    numbers: tuple[int, ...]


Job: TypeAlias = Write | Read | Erase | Use


class BadSegmentError(Exception):
    """What a disk has of a segment is not what was written."""


class SegmentDisk(Protocol):
    """Segments on a disk.

    `read` may be called on one thread while all else is on another one.
    """

    @property
    def capacity(self) -> int:
        """Bytes that segments may take, by their records."""

    def leave(self, numbers: Sequence[int]) -> None:
        """Keep these as long as nothing else needs their room."""

    @property
    def first_number(self) -> int:
        """A number from which on none was ever in use."""

    def take_records(self) -> Sequence[Record]:
        """What was there when it was opened, the least recently used first; it forgets them."""

    def write(self, record: Record, kv: Kv) -> bool:
        """Store a segment so that it survives the process; whether it does."""

    def read(self, number: int) -> Kv | None:
        """The KV of a segment exactly as it was stored; None where that cannot be had now.

        Raises `BadSegmentError` where it never can be.
        """

    def erase(self, numbers: Sequence[int]) -> None:
        """See `Erase`."""

    def use(self, numbers: Sequence[int]) -> None:
        """See `Use`."""

    def close(self) -> None:
        """Let others have it."""
