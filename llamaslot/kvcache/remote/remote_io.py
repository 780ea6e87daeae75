"""Remote tier as plain data: what a store is asked for, what it answers, and what is uploaded to it.

Servers cut the same tokens into different segments. In the store every prompt is cut in the same way, so that a
prefix is there once, whoever uploads it: into blocks of `BLOCK_TOKENS`, and a last one that ends at a multiple of
`GRID_TOKENS`, or at a checkpoint.

    prompt     |0 ................................. 1930|
    objects    [0 ... 512)[512 .. 1024)[1024 .. 1536)[1536 ...... 1920)
               [1536 .... 1600) + checkpoint at 1600
    index      64 128 .. 512 576 ...          1536 1600 ... 1920

An object is found at each multiple of `GRID_TOKENS` within it by a digest of all tokens before that, so another
prompt that departs from this one at 1700 gets its tokens up to 1664.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamaslot.base.kv_ops import Kv, KvPart

BLOCK_TOKENS = 512
"""Tokens of an object at most. All servers of a store must agree, as on the next one."""
GRID_TOKENS = 64
"""Distance of the positions at which objects are found; fewer tokens at the end of a prompt are computed again."""


def block_start(end: int) -> int:
    """Return where the block begins that has the token before `end`."""
    return (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def grid_positions(start: int, end: int) -> range:
    """Return the positions in (start, end] at which objects may be found."""
    return range((start // GRID_TOKENS + 1) * GRID_TOKENS, end + 1, GRID_TOKENS)


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """KV of `[start, end)` in the store, and with `state_bytes` the partial state after it."""

    start: int
    end: int
    digest: bytes
    """Keyed digest of namespace and all tokens up to its end: its name."""
    n_bytes: int
    """Bytes of its KV."""
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Portion:
    """Tokens `[start, end)` of a prompt, which an object has."""

    object: RemoteObject
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a lookup."""

    portions: tuple[Portion, ...] = ()
    """From the wanted position on, without a gap."""
    checkpoints: tuple[RemoteObject, ...] = ()
    """Checkpoints on the prompt's path, with the KV of their blocks before them."""
    seconds: float = 0.0
    """Time that the store took."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The parts of an object that were asked for."""

    kv: Kv | None = None
    state: Kv | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of both."""
        return sum(len(each) for each in (self.kv, self.state) if each is not None)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Positions `wanted` of a segment in RAM that has `positions`."""

    number: int
    positions: range
    wanted: range


@dataclass(frozen=True, slots=True)
class Block:
    """An object to be uploaded: the parts of segments that have its tokens, and the number of its checkpoint."""

    start: int
    end: int
    parts: tuple[BlockPart, ...]
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """Blocks to upload for a segment or checkpoint that came into RAM."""

    number: int
    namespace: str
    tokens: bytes
    """All tokens up to the end of the last block, packed."""
    blocks: tuple[Block, ...]


class CorruptObjectError(Exception):
    """An object in the store is not what was uploaded."""


class RemoteUnavailableError(Exception):
    """The store did not answer in time, or refused."""


class RemoteStore(Protocol):
    """Store that several servers share. All methods may be called from any thread, concurrently."""

    @property
    def timeout_s(self) -> float:
        """Time that a lookup may take."""

    async def find(self, namespace: str, tokens: bytes, start: int, *, with_checkpoints: bool) -> Found:
        """Look up what the store has of a prompt after its first `start` tokens.

        Raises `RemoteUnavailableError`.
        """

    async def fetch(self, wanted: RemoteObject, *, kv: bool, state: bool) -> Fetched | None:
        """Return the KV and the state of an object as far as they are wanted; None if it is gone.

        Raises `CorruptObjectError`, `RemoteUnavailableError`, `MemoryError`.
        """

    async def upload(
        self, namespace: str, tokens: bytes, start: int, parts: Sequence[KvPart], state: Kv | None
    ) -> int:
        """Store the object that begins at `start` and ends with these tokens, unless it is there.

        Returns the bytes that were sent. Raises `RemoteUnavailableError`, `ValueError` for parts that do not fit.
        """

    def join(self, parts: Sequence[KvPart]) -> Kv:
        """Put a segment together from parts of segments, without a gap.

        Raises `ValueError` for bytes that are not of such segments, `MemoryError`.
        """

    async def drop(self, namespace: str, tokens: bytes, start: int) -> None:
        """Delete the objects that have tokens of a prompt after its first `start`.

        Raises `RemoteUnavailableError`.
        """

    async def clear(self) -> None:
        """Delete all objects of this model. Raises `RemoteUnavailableError`."""

    async def close(self) -> None:
        """Close the connections."""


def portions_of(entries: dict[int, RemoteObject], start: int, end: int) -> Iterator[Portion]:
    """Yield portions of a prompt from `start` on without a gap, at most one for each block.

    `entries` has the object that the index names at positions of the grid up to `end`.
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
