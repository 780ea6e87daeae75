"""Sequence ids of the context: which path each holds, and the KV operations that make the backend follow.

Each method changes the tree at once and records an operation. The next step carries all operations out in order,
before it decodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from llamaslot.base.images import before_tile
from llamaslot.base.kv_ops import Copy, Load, Operation, Remove, Restore, StateRecord
from llamaslot.base.tokens import WIDTH, unpacked
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.duplicates import DuplicateCells, Duplicates, KeptDuplicates, OwnCells
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.nodes import Node
from llamaslot.kvcache.radix_tree import RadixTree


class Sequences:
    """Sequence ids: slots, then spare ids, which keep idle prefixes whose slot was reused."""

    def __init__(self, tree: RadixTree, settings: CacheSettings) -> None:
        self.slots = range(settings.n_slots)
        self.operations: list[Operation] = []
        self.states = StateRecord(settings.checkpoints.kind, settings.checkpoints.n_swa)
        """Which sequences have their partial state, for models that have one."""
        self.clock = 0
        """Logical time: each use and each computed prompt token advances it by 1."""
        self._tree = tree
        self.set_layout(settings)

    def set_layout(self, settings: CacheSettings) -> None:
        """Start with the sequences of a new context, none of which is in use."""
        self.spare = range(settings.n_slots, settings.n_path_seqs)
        self.all = range(settings.n_path_seqs)
        self.duplicates: Duplicates
        if not settings.shares_cells:
            self.duplicates = OwnCells(self._tree, settings.n_path_seqs)
        elif self.states.has_states:
            # A sequence that took over another one's cells would take over its state as well.
            self.duplicates = KeptDuplicates(self._tree)
        else:
            self.duplicates = DuplicateCells(self._tree)

    @property
    def n_cells(self) -> int:
        """Cells in use: one for each resident token, and duplicates."""
        return self._tree.n_tokens + self.duplicates.n_cells

    @property
    def n_idle_duplicates(self) -> int:
        """Duplicate cells that only idle sequences use; eviction frees them."""
        return self.duplicates.n_idle_cells()

    def in_use(self, seq: int) -> bool:
        """True if a sequence holds a path, which may be empty."""
        return self._tree.end_node(seq) is not None

    def end(self, seq: int) -> Node:
        """Return the node where the path of a sequence ends, which must be in use."""
        node = self._tree.end_node(seq)
        assert node is not None
        return node

    def advance(self) -> int:
        """Advance the logical clock by one; returns the new time."""
        self.clock += 1
        return self.clock

    def in_namespace(self, namespace: str) -> list[int]:
        """Ids in use in a namespace."""
        return [seq for seq in self.all if self.in_use(seq) and self.end(seq).namespace == namespace]

    def is_covered(self, seq: int) -> bool:
        """True if other sequences hold all that this one holds."""
        return self.end(seq).is_shared

    def rank(self, seq: int) -> float:
        """Place of a sequence's path in the order of eviction; lowest if it is not in use."""
        return self.end(seq).last_used if self.in_use(seq) else -math.inf

    def held(self, match: Match, seqs: Iterable[int]) -> dict[int, int]:
        """Return how many leading tokens of the match each sequence holds."""
        ends = {id(node): min(node.end, match.n_resident) for node in match.resident_end.path_to_root()}
        held = {}
        for seq in seqs:
            path = self.end(seq).path_to_root() if self.in_use(seq) else ()
            held[seq] = next((ends[id(n)] for n in path if id(n) in ends), 0)
        return held

    def n_own(self, seq: int) -> int:
        """Number of tokens at the end of a sequence's path that no other sequence holds."""
        if not self.in_use(seq):
            return 0
        end = self.end(seq)
        shared = next((node.end for node in end.path_to_root() if node.is_shared), 0)
        return end.end - shared

    def before_tile(self, seq: int, n: int) -> int:
        """Return how many of its first `n` tokens a sequence can keep: the pool has no parts of tiles."""
        end = self.end(seq)
        if n >= end.end:
            return n
        node = next(each for each in end.path_to_root() if each.start <= n)
        at = (n - node.start) * WIDTH
        # A tile, or a range of marked tokens, continues only with negative ids.
        is_text = int.from_bytes(node.run[at : at + WIDTH], "little", signed=True) >= 0
        return n if is_text else before_tile(unpacked(end.prefix()), n)

    def append(self, seq: int, tokens: bytes) -> None:
        """Append tokens in cells of their own; those that other sequences hold too now have duplicate cells."""
        start = self._tree.length(seq)
        n_held = self._tree.extend(seq, tokens)
        if n_held:
            self.duplicates.add(seq, start, start + n_held)

    def truncate(self, seq: int, keep: int) -> None:
        """Truncate a sequence to its first `keep` tokens, or to where a tile begins that they would cut."""
        length = self._tree.length(seq)
        if keep >= length:
            return
        keep = self.before_tile(seq, keep)
        if keep:
            self._tree.truncate(seq, keep)
            self._remove(seq, length, keep)
        else:
            self.clear(seq)

    def empty(self, seq: int) -> None:
        """Remove all tokens of a sequence that stays in use."""
        length = self._tree.length(seq)
        self._tree.truncate(seq, 0)
        self._remove(seq, length, 0)

    def clear(self, seq: int) -> None:
        """Remove everything that a sequence holds, in the tree and in the backend."""
        length = self._tree.length(seq)
        if self.in_use(seq):
            self._tree.release(seq)
            self._remove(seq, length, 0)

    def leave(self, seq: int) -> None:
        """Take a sequence out of use in the tree; the caller says what the backend does with its cells."""
        self._tree.release(seq)
        self.duplicates.truncate(seq, 0)

    def reset(self, seq: int) -> None:
        """Make the backend empty a sequence that is not in use: after a failed step it may hold anything."""
        self._remove(seq, 0, 0)

    def copy(self, src: int, dst: int, end: int, tokens: bytes) -> None:
        """Extend `dst` by cells of `src` up to position `end`; `tokens` are those of the path."""
        start = self._tree.length(dst)
        operation = Copy(src, dst, start, end)
        self.states.copy(operation, self._tree.length(src))
        self.operations.append(operation)
        self._tree.extend(dst, tokens[start * WIDTH : end * WIDTH])
        self.duplicates.copy(src, dst, start, end)

    def copy_to_unused(self, src: int, dst: int) -> None:
        """Copy all that `src` holds to `dst`, which is not in use."""
        end = self.end(src)
        operation = Copy(src, dst, 0, end.end)
        self.states.copy(operation, end.end)
        self.operations.append(operation)
        self._tree.hold(dst, end.namespace, end, end.end)
        self.duplicates.copy(src, dst, 0, end.end)

    def load(self, segment: int, seq: int, end: int, tokens: bytes) -> None:
        """Extend a sequence by a segment's KV up to position `end`; `tokens` are those of the path."""
        start = self._tree.length(seq)
        self.states.load(seq)
        last = self.operations[-1] if self.operations else None
        if isinstance(last, Load) and last.dst == seq:
            # One load for all segments: in a partitioned pool each load loads the whole sequence again (fact 3).
            self.operations[-1] = replace(last, parts=(*last.parts, (segment, end)))
        else:
            self.operations.append(Load(seq, start, ((segment, end),)))
        self.append(seq, tokens[start * WIDTH : end * WIDTH])

    def restore(self, seq: int, checkpoint: int, end: int) -> None:
        """Truncate a sequence to `end` tokens, and give it the checkpoint's state after them."""
        self._tree.truncate(seq, end)
        self.duplicates.truncate(seq, end)
        self.operations.append(Restore(checkpoint, seq))
        self.states.restore(seq)
        self._tree.version += 1

    def _remove(self, seq: int, length: int, keep: int) -> None:
        self.states.truncate(Remove(seq, keep), length)
        self.operations.append(Remove(seq, keep))
        self.duplicates.truncate(seq, keep)
