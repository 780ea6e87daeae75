"""Remote tier: blocks of KV, and the interface of the store (`RemoteStore`).

Each server cuts the same tokens into segments differently. In the store all prompts are cut at the same positions,
so that a prefix is stored once, whichever server uploads it: into blocks of `BLOCK_TOKENS`, and a last block that
ends at a multiple of `GRID_TOKENS`, or at a checkpoint. An object is the stored KV of a block.

    prompt     |0 ................................. 1930|
    objects    [0 ... 512)[512 .. 1024)[1024 .. 1536)[1536 ...... 1920)
               [1536 .... 1600) + checkpoint at 1600
    index      64 128 .. 512 576 ...          1536 1600 ... 1920

The index has an entry for each multiple of `GRID_TOKENS`. Its key is a digest of all tokens before that position;
its value names the object that has the last of them. So a prompt that diverges from this one at 1700 gets the KV of
its first 1664 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.kvcache.match import SegmentPart

BLOCK_TOKENS = 512
"""Most tokens of an object. Like `GRID_TOKENS`, it must be the same for all servers of a store."""
GRID_TOKENS = 64
"""Tokens between two index entries. Fetched prefixes end at an entry, so up to 63 more tokens are recomputed."""


def block_start(end: int) -> int:
    """Return the start of the block with the token before `end`."""
    return (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def grid_positions(start: int, end: int) -> range:
    """Return the positions in (start, end] at which the index may have entries."""
    return range((start // GRID_TOKENS + 1) * GRID_TOKENS, end + 1, GRID_TOKENS)


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """KV of `[start, end)` in the store, and with `state_bytes` the partial state after it."""

    start: int
    end: int
    digest: bytes
    """Its name: a keyed digest of the namespace and all tokens up to its end."""
    n_bytes: int
    """Bytes of its KV."""
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Portion:
    """The part `[start, end)` of a prompt whose KV is in an object."""

    object: RemoteObject
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a lookup."""

    portions: tuple[Portion, ...] = ()
    """Portions that continue the cached prefix, without a gap."""
    checkpoints: tuple[RemoteObject, ...] = ()
    """Checkpoints on the prompt's path. Each object also has the KV of its block up to the checkpoint."""
    seconds: float = 0.0
    """Duration of the lookup."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The requested parts of an object."""

    kv: Kv | None = None
    state: Kv | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of both."""
        return sum(len(each) for each in (self.kv, self.state) if each is not None)


@dataclass(frozen=True, slots=True)
class Block:
    """A block to upload: the parts of segments that have its KV, and the number of a checkpoint at its end."""

    start: int
    end: int
    parts: tuple[SegmentPart, ...]
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """Blocks to upload for segment or checkpoint `number`, which is now in RAM."""

    number: int
    namespace: str
    tokens: bytes
    """All tokens up to the end of the last block, packed."""
    blocks: tuple[Block, ...]


class CorruptObjectError(Exception):
    """An object in the store differs from what was uploaded."""


class RemoteUnavailableError(Exception):
    """The store did not answer in time, or refused the request."""


class RemoteStore(Protocol):
    """Store that several servers share. Coroutines may run concurrently on one event loop; `join` on any thread."""

    @property
    def timeout_s(self) -> float:
        """Most seconds that a lookup may take."""

    @property
    def address(self) -> str:
        """The store's URL in messages, without user and password."""

    async def ping(self) -> None:
        """Connect and wait for an answer; the caller sets a time limit. Raises `RemoteUnavailableError`."""

    async def find(self, namespace: str, tokens: bytes, start: int, *, with_checkpoints: bool) -> Found:
        """Look up what the store has of a prompt after its first `start` tokens; the caller sets a time limit.

        Raises `RemoteUnavailableError`.
        """

    async def fetch(self, wanted: RemoteObject, *, kv: bool, state: bool) -> Fetched | None:
        """Return the KV of an object, its state, or both; None if the object is gone.

        Raises `CorruptObjectError`, `RemoteUnavailableError`, `MemoryError`.
        """

    async def upload(
        self, namespace: str, tokens: bytes, start: int, parts: Sequence[KvPart], state: Kv | None
    ) -> int:
        """Store the object that begins at `start` and ends with these tokens, unless the store has it already.

        Returns the bytes sent. Raises `RemoteUnavailableError`, and `ValueError` if the parts do not fit together.
        """

    def join(self, parts: Sequence[KvPart]) -> Kv:
        """Join parts of segments, which must leave no gap, into one segment.

        Raises `ValueError` if the bytes are not those of such segments, and `MemoryError`.
        """

    async def drop(self, namespace: str, tokens: bytes, start: int) -> None:
        """Delete the objects of a prompt that have tokens after position `start`.

        Raises `RemoteUnavailableError`.
        """

    async def clear(self) -> None:
        """Delete all objects of this model. Raises `RemoteUnavailableError`."""

    async def close(self) -> None:
        """Close the connections."""


def portions_of(entries: dict[int, RemoteObject], start: int, end: int) -> Iterator[Portion]:
    """Yield portions of a prompt from `start` on without a gap, at most one per block.

    `entries` has the objects that the index names, by their position on the grid, up to `end`.
    """
    at = start
    while at < end:
        block = at // BLOCK_TOKENS * BLOCK_TOKENS
        names = [
            position
            for position, each in entries.items()
            if at < position <= block + BLOCK_TOKENS and each.start == block and position <= each.end
        ]
        if not names:
            return
        last = max(names)
        yield Portion(entries[last], at, last)
        at = last
        if last < block + BLOCK_TOKENS:
            return
