"""Dropping of prefixes in all tiers: of a path that is no longer wanted, or whose KV is not trusted."""

from __future__ import annotations

from llamaslot.kvcache.match import Match
from llamaslot.kvcache.node import Node
from llamaslot.kvcache.offload.segment_tiers import SegmentTiers
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.segment import SegmentEvent
from llamaslot.kvcache.sequences import Sequences


def drop_path(match: Match, tree: RadixTree, sequences: Sequences, tiers: SegmentTiers) -> None:
    """Drop a path back to the last position at which another one continues, ends or runs."""
    fork = match.last_fork()
    if fork < match.n_resident:
        for seq in list(match.resident_end.end_of):
            sequences.truncate(seq, fork)
            if sequences.in_use(seq) and sequences.is_covered(seq):
                sequences.clear(seq)
    # Truncating may have split and joined nodes.
    segments = tree.match(match.namespace, match.tokens).segments
    tiers.drop(segment for segment in reversed(segments) if segment.start >= fork)


def drop_subtree(node: Node, sequences: Sequences, tiers: SegmentTiers) -> None:
    """Drop a node and all below it, unless a request runs there: that one finds out by its own logits."""
    if node.is_root or node.n_pins:
        return
    segments = dict.fromkeys(each.segment for each in node.subtree() if each.segment is not None)
    start = node.start
    # A segment that begins above the node may have a child beside it, which cannot stay on disk without it.
    beside = [child for each in segments for child in each.children if child not in segments]
    for each in beside:
        beside += [child for child in each.children if child not in beside]
    for seq in list(node.holders()):
        sequences.truncate(seq, start)
        if sequences.in_use(seq) and sequences.is_covered(seq):
            sequences.clear(seq)
    for each in reversed(beside):
        if each.state.uses_disk:
            tiers.transition(each, SegmentEvent.EVICT_DISK)
    tiers.drop(reversed(segments))
