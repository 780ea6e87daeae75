"""Deletion of prefixes in all tiers: those that somebody drops, and those that cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llamaslot.base.commands import CacheCleared, LocalTier
from llamaslot.base.namespaces import public_of
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.nodes import Node, Segment, SegmentEvent, checkpoints_on
from llamaslot.kvcache.offloading import Offloader
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers


@dataclass(eq=False)
class Dropper:
    """Deletes prefixes from the pool, RAM and disk, but not what running requests use."""

    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _offloader: Offloader

    def drop(self, namespace: str | None = None) -> CacheCleared:
        """Drop the prefixes of a namespace in which no request runs, or all idle prefixes."""
        before = self._counts()
        self._tiers.drop(reversed(_segments_of(self._tree.nodes(namespace))))
        if namespace is None:
            seqs = [seq for seq in self._sequences.all if not self._tree.is_pinned(seq)]
        else:
            seqs = self._sequences.in_namespace(namespace)
        for seq in seqs:
            self._sequences.clear(seq)
        return self._cleared(before)

    def drop_tier(self, tier: LocalTier) -> CacheCleared:
        """Drop the idle prefixes of one tier; other tiers keep what they have of them."""
        before = self._counts()
        if tier == "pool":
            for seq in self._sequences.all:
                if not self._tree.is_pinned(seq):
                    self._sequences.clear(seq)
        else:
            self._tiers.empty(tier)
        return self._cleared(before)

    def drop_resident(self) -> None:
        """Drop all idle sequences, and all checkpoints that are not on disk."""
        nodes = [*self._tree.nodes(None)]
        taken = [node.checkpoint for node in nodes if node.checkpoint is not None]
        self._tiers.drop([each for each in taken if not each.state.uses_disk])
        for seq in self._sequences.all:
            if not self._tree.is_pinned(seq):
                self._sequences.clear(seq)

    def drop_paths(self, paths: Iterable[tuple[str, bytes]]) -> CacheCleared:
        """Drop paths, each back to the last position at which another path branches off, ends, or is running."""
        before = self._counts()
        for namespace, tokens in paths:
            self._drop_path(self._tree.match(namespace, tokens))
        return self._cleared(before)

    def forks(self, paths: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes, int]]:
        """Return paths, each with the last position at which another path branches off, ends, or is running."""
        return [(namespace, path, self._tree.match(namespace, path).last_fork()) for namespace, path in paths]

    def invalidate_path(self, namespace: str, tokens: bytes, *, with_public: bool) -> None:
        """Drop the last node of a path whose KV may be invalid, with everything below it.

        If some of the KV was loaded from the public namespace (`with_public`), and that has all tokens of the path,
        the path is dropped there as well.
        """
        self._drop_subtree(self._tree.match(namespace, tokens).matched_end)
        if with_public:
            public = self._tree.match(public_of(namespace), tokens)
            if public.n_matched * WIDTH == len(tokens):
                self._drop_subtree(public.matched_end)
        self._offloader.free_evicted()

    def _drop_path(self, match: Match) -> None:
        fork = match.last_fork()
        if fork < match.n_resident:
            for seq in list(match.resident_end.end_of):
                self._truncate(seq, fork)
        # Truncating may have split and joined nodes.
        match = self._tree.match(match.namespace, match.tokens)
        # A segment that begins above the fork stays, since it cannot be cut; checkpoints after the fork go.
        self._tiers.drop(each for each in checkpoints_on(match.whole_end) if each.end > fork)
        self._tiers.drop(segment for segment in reversed(match.segments) if segment.start >= fork)

    def _drop_subtree(self, node: Node) -> None:
        """Drop a node and everything below it.

        If a request runs there, only the node's checkpoint is dropped: the request uses the KV, so its own logits
        would show that this is invalid, but it may never have restored the checkpoint.
        """
        if node.is_root:
            return
        if node.n_pins:
            self._tiers.drop([node.checkpoint] if node.checkpoint is not None else [])
            return
        segments = _segments_of(node.subtree())
        start = node.start
        # A segment that begins above the node can have children outside of the subtree. They cannot stay on disk
        # without it: the disk's index finds a segment through its parent.
        beside = [child for each in segments for child in each.children if child not in segments]
        for each in beside:
            beside += [child for child in each.children if child not in beside]
        for seq in list(node.holders()):
            self._truncate(seq, start)
        for each in reversed(beside):
            if each.state.uses_disk:
                self._tiers.transition(each, SegmentEvent.EVICT_DISK)
        self._tiers.drop(reversed(segments))

    def _truncate(self, seq: int, keep: int) -> None:
        """Truncate a sequence, and clear it if other sequences hold all of the rest."""
        self._sequences.truncate(seq, keep)
        if self._sequences.in_use(seq) and self._sequences.is_covered(seq):
            self._sequences.clear(seq)

    def _counts(self) -> tuple[int, int, int]:
        """Number of tokens in the pool, in RAM and on disk."""
        return self._tree.n_tokens, self._tiers.ram.n_tokens, self._tiers.disk.n_tokens

    def _cleared(self, before: tuple[int, int, int]) -> CacheCleared:
        self._offloader.free_evicted()
        return CacheCleared(*(earlier - now for earlier, now in zip(before, self._counts(), strict=True)))


def _segments_of(nodes: Iterable[Node]) -> dict[Segment, None]:
    """Segments and checkpoints of some nodes, in the order of the nodes."""
    return dict.fromkeys(each for node in nodes for each in (node.segment, node.checkpoint) if each is not None)
