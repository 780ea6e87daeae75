"""Verification of the radix tree's invariants, for tests and `--debug-invariants`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from itertools import pairwise
from typing import TYPE_CHECKING

from llamaslot.kvcache.node import Node
from llamaslot.kvcache.segment import Segment

if TYPE_CHECKING:
    from llamaslot.kvcache.radix_tree import RadixTree


def check_tree(
    tree: RadixTree, *, roots: Collection[Node], ends: Mapping[int, Node], pinned: Set[int]
) -> set[Segment]:
    """Verify all invariants, in time proportional to the tree; raises `AssertionError`.

    `roots` are the roots of all namespaces, `ends` has the end node of each sequence in use, and `pinned` the
    sequences in which requests run. Returns all segments and checkpoints.
    """
    n_tokens, n_pinned = Counter[str](), 0
    covered: dict[Segment, list[Node]] = {}
    for node in tree.nodes():
        node.check(pinned)
        assert not node.is_idle_leaf or node in tree.eviction, "a leaf that cannot be evicted"
        n_tokens[node.tenant] += node.n_tokens * node.is_resident
        n_pinned += node.n_tokens * bool(node.n_pins)
        if node.segment is not None:
            covered.setdefault(node.segment, []).append(node)
    assert (n_tokens, n_pinned) == (tree.n_tokens_of, tree.n_pinned_tokens)
    assert n_tokens.total() == tree.n_tokens
    assert pinned <= ends.keys()
    assert all(seq in node.end_of for seq, node in ends.items())
    assert sum(len(node.end_of) for node in (*tree.nodes(), *roots)) == len(ends)
    assert all(root.children or root.end_of for root in roots), "a namespace without KV"
    for segment, nodes in covered.items():
        assert nodes == segment.nodes
        assert (nodes[0].start, nodes[-1].end) == (segment.start, segment.end)
        assert all(b.parent is a for a, b in pairwise(nodes)), "a segment that branches"
    return {*covered, *(node.checkpoint for node in tree.nodes() if node.checkpoint is not None)}
