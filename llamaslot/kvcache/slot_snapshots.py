"""Snapshots of single slots, for files that users name (`POST /slots/{id}`). Independent of the disk tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from llamaslot.base.kv_ops import Free, Kv, Save, Take
from llamaslot.base.namespaces import is_private
from llamaslot.kvcache.cache_settings import MAX_SEGMENT_TOKENS
from llamaslot.kvcache.nodes import checkpoints_on
from llamaslot.kvcache.offloading import Offloader
from llamaslot.kvcache.pool import Pool
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.checkpoints import Checkpoints

MAX_SAVED_CHECKPOINTS = 64
"""Most checkpoints in a snapshot: the deepest of its path before its end. A file with more is refused."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """KV of positions `[start, end)`; if both are equal, the partial state at that position."""

    start: int
    end: int
    kv: Kv


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """Everything that a slot held."""

    namespace: str
    tokens: bytes
    """All of them, packed."""
    parts: tuple[SnapshotPart, ...]
    """From the first token to the last, without a gap."""
    state: Kv | None = None
    """The partial state after the last token; None for a model without one."""
    checkpoints: tuple[SnapshotPart, ...] = ()
    """Partial states at earlier positions, in order, so that a prompt can also continue from before the end."""


class UnsavableSlotError(Exception):
    """The slot cannot be saved; the message says why."""


class InvalidSnapshotError(Exception):
    """The file is damaged or belongs to another model; the message says why."""


class SnapshotStore(Protocol):
    """Snapshot files by name; used by one thread. Raises `OSError` if a file cannot be written or read."""

    def write(self, name: str, snapshot: SlotSnapshot) -> int:
        """Write a file, replacing one of that name; returns its size in bytes."""

    def read(self, name: str) -> tuple[SlotSnapshot, int]:
        """Return the snapshot in a file, and the file's size in bytes. Raises `InvalidSnapshotError`."""


@dataclass(frozen=True, slots=True)
class SlotSave:
    """A snapshot that is about to be taken."""

    namespace: str
    tokens: bytes
    """Everything that the slot holds, packed."""
    saves: tuple[Save, ...]
    """Operations that save its KV, from the first token to the last."""
    take: Take | None = None
    """Operation that takes its partial state; None for a model without one."""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """Number and position of the checkpoints in RAM on its path, without those evicted meanwhile."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the saved segments, with that of the state last."""
        state = () if self.take is None else (self.take.checkpoint,)
        return (*(each.segment for each in self.saves), *state)


@dataclass(eq=False)
class SlotSnapshots:
    """Takes snapshots of idle slots and loads them. The segments used for that belong to no tier."""

    _tree: RadixTree
    _sequences: Sequences
    _pool: Pool
    _offloader: Offloader
    _checkpoints: Checkpoints
    _numbers: Iterator[int] = field(default_factory=lambda: count(-1, -1))
    """Numbers of its segments: negative, as no segment of the tiers has."""

    def save(self, seq: int) -> SlotSave:
        """Record operations that save everything an idle slot holds. Raises `UnsavableSlotError`."""
        n_tokens, states = self._tree.length(seq), self._sequences.states
        if not n_tokens:
            raise UnsavableSlotError("it is empty")
        end = self._sequences.end(seq)
        if is_private(end.namespace):
            raise UnsavableSlotError("its request had cache_prompt: false")
        if not states.is_live(seq):
            raise UnsavableSlotError("it has lost the state after its last token")
        saves = tuple(
            Save(next(self._numbers), seq, start, min(start + MAX_SEGMENT_TOKENS, n_tokens))
            for start in range(0, n_tokens, MAX_SEGMENT_TOKENS)
        )
        self._sequences.operations += saves
        take = Take(next(self._numbers), seq, n_tokens) if states.has_states else None
        if take is not None:
            self._sequences.operations.append(take)
        in_ram = [each for each in checkpoints_on(end) if each.state.is_loadable and each.end < n_tokens]
        checkpoints = tuple((each.number, each.end) for each in reversed(in_ram[:MAX_SAVED_CHECKPOINTS]))
        return SlotSave(end.namespace, end.prefix(), saves, take, checkpoints)

    def load(self, seq: int, snapshot: SlotSnapshot) -> dict[int, SnapshotPart] | None:
        """Replace the content of an idle slot by a snapshot; None if there are too few cells.

        Returns KV by segment number, which the backend must get before the next operations.
        """
        tokens = snapshot.tokens
        match = self._tree.match(snapshot.namespace, tokens)
        n_wanted = sum(part.end - part.start for part in snapshot.parts if part.end > match.n_resident)
        # The slot may get what running requests hold of the snapshot in cells that are idle duplicates now, so
        # these cannot be counted as free.
        if not self._offloader.can_free(n_wanted + match.n_idle, match.n_resident - match.n_idle):
            return None
        # The slot keeps what it holds of the snapshot already: that may be nowhere else in the pool.
        own = self._sequences.held(match, [seq])[seq]
        self._pool.claim(seq, own, snapshot.namespace)
        self._pool.copy_resident(seq, self._tree.match(snapshot.namespace, tokens))
        parts: dict[int, SnapshotPart] = {}
        for part in snapshot.parts:
            n = self._tree.length(seq)
            if n >= part.end:
                continue
            if not self._offloader.free_cells(part.end - part.start):
                raise AssertionError("there was room")
            number = next(self._numbers)
            parts[number] = part
            self._sequences.load(number, seq, part.end, tokens)
        # After all loads, not between them, so that in a partitioned pool they can become one load.
        self._sequences.operations += [Free(number) for number in parts]
        if snapshot.state is not None:
            number, n = next(self._numbers), self._tree.length(seq)
            parts[number] = SnapshotPart(n, n, snapshot.state)
            self._sequences.restore(seq, number, n)
            self._sequences.operations.append(Free(number))
        sizes = {part.end: len(part.kv) for part in snapshot.checkpoints}
        numbers = self._checkpoints.add(snapshot.namespace, tokens, sizes)
        parts |= {numbers[part.end]: part for part in snapshot.checkpoints if part.end in numbers}
        self._pool.ensure_free_id()
        self._tree.unpin(seq, self._sequences.advance())
        return parts
