"""List of the prefixes in the radix tree, for `GET /cache`.

Prefixes are sorted by hits, then by last use, then by position. Using a node uses its ancestors too, so these have
at least as many hits and as late a last use: a search from the roots finds them in this order, and looks at few
others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice

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
    evicted_last: Container[Node] = (),
) -> CacheState:
    """Return `stats` with the `top` prefixes of the tree, in the pool, in RAM and on disk.

    `evicted_last` has the nodes of prefixes that users pinned. Takes time proportional to the prefixes in the pool
    and to those listed, not to all those in RAM and on disk.
    """
    roots = [*tree.roots()]
    edges = [*islice(_most_used(roots), top)]
    resident = [node for node in _resident(roots) if _ends_edge(node)]
    namespaces = {name: i for i, name in enumerate(dict.fromkeys(edge[0].namespace for edge in edges))}
    uses = sorted({edge[0].last_used for edge in edges}, reverse=True)
    ranks = {use: rank for rank, use in enumerate(uses)}
    places = {id(edge[-1]): i for i, edge in enumerate(edges)}
    prefixes = []
    for edge in edges:
        first, last = edge[0], edge[-1]
        covered = [(node.n_tokens, node.segment.state) for node in edge if node.segment is not None]
        prefixes.append(
            CachePrefix(
                parent=places.get(id(first.parent)),
                namespace=namespaces[first.namespace],
                tokens=last.end,
                edge_tokens=last.end - first.start,
                ram_tokens=sum(n for n, state in covered if state.is_loadable),
                disk_tokens=sum(n for n, state in covered if state.uses_disk),
                hits=first.hits,
                holders=tuple(sorted(last.holders())),
                pinned=last.n_pins > 0,
                last_used=ranks[first.last_used],
                checkpoint=last.checkpoint.n_bytes if last.checkpoint is not None else None,
                text=_edge_text(last, first.start, detokenize) if detokenize is not None else UNSET,
                evicted_last=last in evicted_last,
            )
        )
    return CacheState(
        **asdict(stats),
        namespaces=len(roots),
        nodes=len(resident),
        leaves=sum(not node.n_resident_children for node in resident),
        tokens=tree.n_tokens,
        tokens_pinned=tree.n_pinned_tokens,
        prefixes=tuple(prefixes),
    )


def _most_used(roots: Sequence[Node]) -> Iterator[list[Node]]:
    """Yield edges in the order of the list, each as its nodes from the top.

    Nodes that are separate only because one segment ends and the next begins there are one edge.
    """

    def entries(nodes: Sequence[Node]) -> Iterator[tuple[int, int, int, int, Node]]:
        return ((-node.hits, -node.last_used, node.start, id(node), node) for node in nodes)

    heap = [*entries([child for root in roots for child in root.children.values()])]
    heapq.heapify(heap)
    while heap:
        edge = [heapq.heappop(heap)[-1]]
        while not _ends_edge(edge[-1]):
            edge += edge[-1].children.values()
        yield edge
        for entry in entries([*edge[-1].children.values()]):
            heapq.heappush(heap, entry)


def _ends_edge(node: Node) -> bool:
    """True if a sequence ends in the node, it has a checkpoint, it is a leaf, or paths branch after it."""
    return bool(node.end_of) or node.checkpoint is not None or len(node.children) != 1


def _resident(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the nodes below `nodes` whose KV is in the pool."""
    rest = [*nodes]
    while rest:
        below = [child for child in rest.pop().children.values() if child.is_resident]
        yield from below
        rest += below


def _edge_text(node: Node, start: int, detokenize: Callable[[Sequence[int]], bytes]) -> str:
    edge = node.prefix()[start * WIDTH : (start + _MAX_TEXT_TOKENS) * WIDTH]
    return detokenize(unpacked(edge).tolist()).decode("utf-8", "replace")
