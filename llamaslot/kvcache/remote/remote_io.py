"""Remote tier: blocks of KV, and the interface of the store (`RemoteStore`).

Servers cut the same tokens into different segments in RAM. In the store all prompts are cut at the same positions,
so that a prefix is stored once, whoever uploads it: into blocks of `BLOCK_TOKENS`, and a last one that ends at a
multiple of `GRID_TOKENS`, or at a checkpoint. An object is the stored KV of a block.

    prompt     |0 ................................. 1930|
    objects    [0 ... 512)[512 .. 1024)[1024 .. 1536)[1536 ...... 1920)
               [1536 .... 1600) + checkpoint at 1600
    index      64 128 .. 512 576 ...          1536 1600 ... 1920

The index has an entry at each multiple of `GRID_TOKENS`, by a digest of all tokens before it, that names the object
with these tokens. So another prompt that departs from this one at 1700 gets its tokens up to 1664.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from llamaslot.base.kv_ops import Kv, KvPart

BLOCK_TOKENS = 512
"""Most tokens of an object. All servers of a store must have the same value, as of `GRID_TOKENS`."""
GRID_TOKENS = 64
"""Distance of the entries of the index; fewer tokens than this at the end of a prompt are computed again."""


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
    """Keyed digest of namespace and all tokens up to its end, by which it is named."""
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
    """Checkpoints on the prompt's path; each object also has the KV of its block up to there."""
    seconds: float = 0.0
    """Duration of the lookup."""


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
    """The positions `wanted` of segment `number` in RAM, which has `positions`."""

    number: int
    positions: range
    wanted: range


@dataclass(frozen=True, slots=True)
class Block:
    """A block to upload: the parts of segments with its tokens, and the number of the checkpoint at its end."""

    start: int
    end: int
    parts: tuple[BlockPart, ...]
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """Blocks to upload for segment or checkpoint `number`, which came into RAM."""

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
    """Store that several servers share. Methods may run concurrently, on one event loop; `join` on any thread."""

    @property
    def timeout_s(self) -> float:
        """Time that a lookup may take."""

    @property
    def address(self) -> str:
        """The store's URL in messages, without user and password."""

    async def ping(self) -> None:
        """Connect, and wait for an answer; the caller limits the time. Raises `RemoteUnavailableError`."""

    async def find(self, namespace: str, tokens: bytes, start: int, *, with_checkpoints: bool) -> Found:
        """Look up what the store has of a prompt after its first `start` tokens; the caller limits the time.

        Raises `RemoteUnavailableError`.
        """

    async def fetch(self, wanted: RemoteObject, *, kv: bool, state: bool) -> Fetched | None:
        """Return KV, state, or both of an object; None if it is gone.

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
