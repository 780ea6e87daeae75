"""List of the prefixes in the radix tree, for `GET /cache`.

Prefixes are sorted by hits, then by last use, then by length. Using a node uses its ancestors too, so these have at
least as many hits and as late a last use, and no node is listed without its ancestors.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Sequence

from msgspec import UNSET
from msgspec.structs import asdict

from llamaslot.base.stats import CachePrefix, CacheState, CacheStats
from llamaslot.base.tokens import WIDTH, unpacked
from llamaslot.kvcache.nodes import Node
from llamaslot.kvcache.radix_tree import RadixTree

_MAX_TEXT_TOKENS = 256
"""Most tokens of an edge that are shown as text."""


def tree_listing(
    tree: RadixTree,
    stats: CacheStats,
    top: int,
    detokenize: Callable[[Sequence[int]], bytes] | None,
    pinned: Container[Node] = (),
) -> CacheState:
    """Return `stats` with the `top` resident prefixes of the tree, in time proportional to the tree.

    `pinned` has the nodes of pinned prefixes.
    Nodes that are separate only because one segment ends and the next begins there count as one.
    """
    first_of = {id(node): _first(node) for node in tree.nodes() if _ends_edge(node)}
    nodes = [node for node in tree.nodes() if id(node) in first_of]
    uses = sorted({first.last_used for first in first_of.values()}, reverse=True)
    ranks = {use: rank for rank, use in enumerate(uses)}

    def order(node: Node) -> tuple[int, int, int]:
        first = first_of[id(node)]
        return -first.hits, -first.last_used, node.end

    listed = heapq.nsmallest(top, nodes, key=order)
    namespaces = {name: i for i, name in enumerate(dict.fromkeys(n.namespace for n in (*listed, *nodes)))}
    places = {id(node): i for i, node in enumerate(listed)}
    prefixes = []
    for node in listed:
        first = first_of[id(node)]
        prefixes.append(
            CachePrefix(
                parent=places.get(id(first.parent)),
                namespace=namespaces[node.namespace],
                tokens=node.end,
                edge_tokens=node.end - first.start,
                hits=first.hits,
                holders=tuple(sorted(node.holders())),
                pinned=node.n_pins > 0,
                last_used=ranks[first.last_used],
                checkpoint=node.checkpoint.n_bytes if node.checkpoint is not None else None,
                text=_edge_text(node, first.start, detokenize) if detokenize is not None else UNSET,
                warm=node in pinned,
            )
        )
    return CacheState(
        **asdict(stats),
        namespaces=len(namespaces),
        nodes=len(nodes),
        leaves=sum(not node.n_resident_children for node in nodes),
        tokens=tree.n_tokens,
        tokens_pinned=tree.n_pinned_tokens,
        prefixes=tuple(prefixes),
    )


def _ends_edge(node: Node) -> bool:
    """True if a resident node is a leaf, a sequence ends in it, it has a checkpoint, or paths branch after it."""
    return bool(node.end_of) or node.n_resident_children > (1 if node.checkpoint is None else 0)


def _first(node: Node) -> Node:
    """Return the topmost node of the edge that ends with this node."""
    while node.parent is not None and node.parent.parent is not None and not _ends_edge(node.parent):
        node = node.parent
    return node


def _edge_text(node: Node, start: int, detokenize: Callable[[Sequence[int]], bytes]) -> str:
    edge = node.prefix()[start * WIDTH : (start + _MAX_TEXT_TOKENS) * WIDTH]
    return detokenize(unpacked(edge).tolist()).decode("utf-8", "replace")
