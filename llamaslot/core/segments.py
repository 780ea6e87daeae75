"""Which prefixes are stored off the pool: a radix tree of segments.

A segment is the KV of some tokens behind a known prefix; the backend has its bytes, this room what they stand for
and which of them go when there is no more room. What conversations share is stored once:

    [0 .............. 8000) in 16 segments of 500 ---+--- [8000 .. 8100)   conversation 1
                                                     +--- [8000 .. 8250)   conversation 2

A node whose KV is not stored (its cells are still in the pool) has no segment. Splitting a node leaves its segment
whole: both halves lie in it. The least recently used segment goes first, and a path is always used from its end to
its start, so no segment goes before those behind it.

It is a tree of its own, beside the one of what is in the pool: a node there lives as long as a sequence holds it
and is cut to the token, one here as long as its bytes, which cannot be cut.

Nothing here knows of cells, of sequences or of llama.cpp.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from llamaslot.base.model import SegmentSize
from llamaslot.core.node import WIDTH

LARGEST = 512
"""Tokens of a segment at most, unless told otherwise: loading one for a part of it costs little."""


class Segment:
    """The stored KV of positions `[start, end)` of some path."""

    __slots__ = ("end", "id", "n_bytes", "nodes", "start")

    def __init__(self, number: int, start: int, end: int, n_bytes: int) -> None:
        self.id = number
        self.start = start
        self.end = end
        self.n_bytes = n_bytes
        self.nodes: list[_Node] = []
        """The nodes that lie in it, the first one first; none once it is gone."""

    @property
    def n_tokens(self) -> int:
        """Tokens whose KV it has."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether nothing goes on from it."""
        return sum(len(node.children) for node in self.nodes) == len(self.nodes) - 1

    @property
    def is_gone(self) -> bool:
        """Whether it was discarded."""
        return not self.nodes


class _Node:
    __slots__ = ("children", "parent", "run", "segment", "start")

    def __init__(self, run: bytes, parent: _Node | None, start: int, segment: Segment | None = None) -> None:
        self.run = run
        self.parent = parent
        self.start = start
        self.segment = segment
        self.children: dict[bytes, _Node] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.run) // WIDTH


@dataclass(slots=True)
class Stored:
    """The part `[start, end)` of a segment that agrees with some tokens."""

    segment: Segment
    start: int
    end: int


class SegmentTree:
    """All segments of all namespaces, at most `capacity` bytes, each of at most `largest` tokens."""

    def __init__(self, capacity: int, size: SegmentSize, largest: int = LARGEST) -> None:
        self.capacity = capacity
        self.n_bytes = 0
        self.n_tokens = 0
        """Tokens whose KV is stored."""
        self._size = size
        self._largest = largest
        self._roots: dict[str, _Node] = {}
        self._by_use: OrderedDict[Segment, None] = OrderedDict()
        """The least recently used first, each after all that lie behind it."""
        self._n_made = 0
        self._discarded: list[int] = []

    def __len__(self) -> int:
        """Segments."""
        return len(self._by_use)

    # --- reading ---

    def stored(self, space: str, tokens: bytes, start: int) -> list[Stored]:
        """What is stored of `tokens` from `start` on, without a gap."""
        found: list[Stored] = []
        at = start
        for node, end in self._walk(space, tokens):
            if end <= at:
                continue
            if node.segment is None or node.start > at:
                break
            if found and found[-1].segment is node.segment:
                found[-1].end = end
            else:
                found.append(Stored(node.segment, at, end))
            at = end
        return found

    def missing(self, space: str, tokens: bytes, start: int) -> list[tuple[int, int]]:
        """The ranges to store, each as large as may be, so that nothing from `start` on is missing.

        Where the segment in front is not full and nothing goes on from it, the range starts with it, and takes its
        place.
        """
        ranges: list[tuple[int, int]] = []
        at = start
        last: Segment | None = None
        for node, end in [*self._walk(space, tokens), (None, len(tokens) // WIDTH)]:
            if node is not None and node.segment is None:
                continue
            until = end if node is None else node.start
            if at < until:
                is_open = last is not None and last.n_tokens < self._largest and last.is_last
                first = last.start if last is not None and is_open else at
                ranges += [(a, min(a + self._largest, until)) for a in range(first, until, self._largest)]
            at = max(at, end)
            last = node.segment if node is not None and node.segment and node.segment.end == end == at else None
        return ranges

    def fits(self, space: str, tokens: bytes, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether these ranges of `tokens` would fit beside what else is stored of them, if all others went."""
        on_path = {node.segment for node, _ in self._walk(space, tokens) if node.segment is not None}
        kept = [s for s in on_path if not any(start <= s.start and s.end <= end for start, end in ranges)]
        n_bytes = sum(segment.n_bytes for segment in kept)
        return n_bytes + sum(self._size.of(end - start) for start, end in ranges) <= self.capacity

    # --- changing ---

    def add(self, space: str, tokens: bytes, start: int) -> Segment:
        """A new segment for the tokens from `start` to their end, which must fit.

        Segments within that range are discarded; others go for it, but none in front of it.
        """
        end = len(tokens) // WIDTH
        n_bytes = self._size.of(end - start)
        if not self.fits(space, tokens, [(start, end)]):
            raise AssertionError(f"there is no room for [{start}, {end})")
        self.touch(space, tokens)
        segment = Segment(self._n_made, start, end, n_bytes)
        self._n_made += 1
        segment.nodes = self._nodes_of(self._insert(space, tokens), start)
        replaced = {node.segment for node in segment.nodes if node.segment is not None}
        for node in segment.nodes:
            node.segment = segment
        for each in replaced:
            if each.start < start or each.end > end:
                raise AssertionError(f"[{start}, {end}) covers a part of [{each.start}, {each.end})")
            self._drop(each)
        while self.n_bytes + n_bytes > self.capacity:
            self._discard(next(iter(self._by_use)))
        self._by_use[segment] = None
        self.n_bytes += n_bytes
        self.n_tokens += segment.n_tokens
        self.touch(space, tokens)
        return segment

    def touch(self, space: str, tokens: bytes) -> None:
        """Note that a path is used now."""
        for node, _ in reversed(list(self._walk(space, tokens))):
            if node.segment is not None:
                self._by_use.move_to_end(node.segment)

    def forget(self, space: str) -> None:
        """Discard what is stored in a namespace."""
        rest = [*self._roots[space].children.values()] if space in self._roots else []
        found: dict[Segment, None] = {}
        while rest:
            node = rest.pop()
            if node.segment is not None:
                found[node.segment] = None
            rest += node.children.values()
        for segment in found:
            self._discard(segment)

    def clear(self) -> None:
        """Discard everything."""
        while self._by_use:
            self._discard(next(iter(self._by_use)))

    def take_discarded(self) -> list[int]:
        """The numbers of the segments discarded since the last call."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def check(self) -> None:
        """Prove what must always hold; raises `AssertionError`. Takes time in proportion to all segments."""
        seen: dict[Segment, list[_Node]] = {segment: [] for segment in self._by_use}
        places = {segment: i for i, segment in enumerate(self._by_use)}
        rest: list[tuple[_Node, int]] = [(root, len(places)) for root in self._roots.values()]
        while rest:
            node, place = rest.pop()
            assert node.children or node.segment, "a node for nothing"
            if node.segment is not None:
                seen[node.segment].append(node)
                assert node.segment.start <= node.start < node.end <= node.segment.end
                assert places[node.segment] <= place, "a segment would go before one behind it"
                place = places[node.segment]
            for first, child in node.children.items():
                assert child.parent is node
                assert child.start == node.end
                assert child.run[:WIDTH] == first
                rest.append((child, place))
        for segment, nodes in seen.items():
            assert nodes == segment.nodes
            assert (segment.nodes[0].start, segment.nodes[-1].end) == (segment.start, segment.end)
            assert all(b.parent is a for a, b in pairwise(nodes)), "a segment that branches"
        assert self.n_bytes == sum(segment.n_bytes for segment in seen) <= self.capacity
        assert self.n_tokens == sum(segment.n_tokens for segment in seen)

    # --- inside ---

    def _walk(self, space: str, tokens: bytes) -> Iterator[tuple[_Node, int]]:
        """The nodes on the path of some tokens, from the root, and how far each agrees with them."""
        node = self._roots.get(space)
        at = 0
        while node is not None and (child := node.children.get(tokens[at : at + WIDTH])) is not None:
            if not tokens.startswith(child.run, at):
                yield child, child.start + _n_common(child.run, tokens, at)
                return
            yield child, child.end
            at += len(child.run)
            node = child

    def _insert(self, space: str, tokens: bytes) -> _Node:
        """The node that ends where `tokens` do."""
        node = self._roots.setdefault(space, _Node(b"", None, 0))
        for each, end in list(self._walk(space, tokens)):
            node = self._split(each, end) if end < each.end else each
        if node.end < len(tokens) // WIDTH:
            child = _Node(tokens[node.end * WIDTH :], node, node.end)
            node.children[child.run[:WIDTH]] = child
            node = child
        return node

    def _nodes_of(self, node: _Node, start: int) -> list[_Node]:
        """The nodes from position `start` to the end of `node`, split there if need be."""
        nodes = [node]
        while nodes[-1].start > start:
            assert nodes[-1].parent is not None
            nodes.append(nodes[-1].parent)
        if nodes[-1].start < start:
            self._split(nodes[-1], start)
        return nodes[::-1]

    def _split(self, node: _Node, n: int) -> _Node:
        """Cut a node in front of position `n`: it goes on being the lower part; the upper part."""
        assert node.parent is not None
        at = (n - node.start) * WIDTH
        upper = _Node(node.run[:at], node.parent, node.start, node.segment)
        upper.children[node.run[at : at + WIDTH]] = node
        node.parent.children[upper.run[:WIDTH]] = upper
        node.run, node.parent, node.start = node.run[at:], upper, n
        if node.segment is not None:
            nodes = node.segment.nodes
            nodes.insert(nodes.index(node), upper)
        return upper

    def _discard(self, segment: Segment) -> None:
        for node in segment.nodes:
            node.segment = None
        last = segment.nodes[-1]
        self._drop(segment)
        self._prune(last)

    def _drop(self, segment: Segment) -> None:
        segment.nodes = []
        del self._by_use[segment]
        self.n_bytes -= segment.n_bytes
        self.n_tokens -= segment.n_tokens
        self._discarded.append(segment.id)

    def _prune(self, node: _Node) -> None:
        """Take out a node, and those above it, that stand for nothing any more."""
        while node.parent is not None and not node.children and node.segment is None:
            del node.parent.children[node.run[:WIDTH]]
            node = node.parent
        if node.parent is None and not node.children:
            self._roots = {space: root for space, root in self._roots.items() if root is not node}


def _n_common(run: bytes, tokens: bytes, at: int) -> int:
    """Tokens that `run` and `tokens[at:]` share at their start; at least the first."""
    n = min(len(run), len(tokens) - at) // WIDTH
    same = np.frombuffer(run, "<i4", n) == np.frombuffer(tokens, "<i4", n, at)
    return n if same.all() else int(same.argmin())
