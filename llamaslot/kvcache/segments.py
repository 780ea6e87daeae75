"""A radix tree of segments: which prefixes are stored off the pool, wherever their bytes are.

A segment is the KV of some tokens behind a known prefix. What conversations share is stored once:

    [0 .............. 8000) in 16 segments of 500 ---+--- [8000 .. 8100)   conversation 1
                                                     +--- [8000 .. 8250)   conversation 2

A node whose KV is not stored (its cells are still in the pool) has no segment. Splitting a node leaves its segment
whole: both halves lie in it.

It is a tree of its own, beside the one of what is in the pool: a node there lives as long as a sequence holds it
and is cut to the token, one here as long as its bytes, which cannot be cut. Where those are, and which of them go
when room is short, `kvcache/tiers.py` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llamaslot.base.tokens import WIDTH

LARGEST = 512
"""Tokens of a segment at most, unless told otherwise: loading one for a part of it costs little."""


class Rank(NamedTuple):
    """The place of a segment in the order of use: the lowest goes first."""

    last_used: int
    height: int
    """Less than 0, and the less the further from the root: of what was used together, the end goes first."""
    number: int


class Segment:
    """The stored KV of positions `[start, end)` of some path."""

    __slots__ = (
        "cell_order",
        "end",
        "is_fresh",
        "last_used",
        "n_bytes",
        "nodes",
        "number",
        "replaces",
        "start",
        "stored_at",
        "unreadable_until",
    )

    def __init__(self, number: int, start: int, end: int, n_bytes: int, now: float = 0.0) -> None:
        self.number = number
        self.start = start
        self.end = end
        self.n_bytes = n_bytes
        self.nodes: list[_Node] = []
        """The nodes that lie in it, the first one first; none once it is gone."""
        self.last_used = 0
        """A count of uses."""
        self.stored_at = now
        self.cell_order = b""
        """See `Record.cell_order`; known once it is written."""
        self.is_fresh = False
        """Whether it was read and not loaded since."""
        self.unreadable_until = 0.0
        self.replaces: list[int] = []
        """Segments on disk that it stands for once it is there itself."""

    @property
    def n_tokens(self) -> int:
        """Tokens whose KV it has."""
        return self.end - self.start

    @property
    def rank(self) -> Rank:
        """Its place in the order of use."""
        return Rank(self.last_used, -self.start, self.number)

    @property
    def front(self) -> Segment | None:
        """The segment that has the token in front of its first one, if that is stored."""
        return self.nodes[0].parent.segment if self.nodes[0].parent is not None else None

    @property
    def is_last(self) -> bool:
        """Whether nothing goes on from it."""
        return sum(len(node.children) for node in self.nodes) == len(self.nodes) - 1

    @property
    def space(self) -> str:
        """The namespace."""
        return self.nodes[0].space

    @property
    def tokens(self) -> bytes:
        """All tokens from the root to its end."""
        return self.nodes[-1].prefix()

    def behind(self) -> Iterator[Segment]:
        """The segments that have a token behind one of its own."""
        for node in self.nodes:
            for child in node.children.values():
                if child.segment is not None and child.segment is not self:
                    yield child.segment


class _Node:
    __slots__ = ("children", "parent", "run", "segment", "space", "start")

    def __init__(self, run: bytes, parent: _Node | None, start: int, segment: Segment | None, space: str) -> None:
        self.run = run
        self.parent = parent
        self.start = start
        self.segment = segment
        self.space = space
        self.children: dict[bytes, _Node] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.run) // WIDTH

    def prefix(self) -> bytes:
        """All tokens from the root to its end."""
        runs = [self.run]
        node = self
        while node.parent is not None:
            node = node.parent
            runs.append(node.run)
        return b"".join(reversed(runs))


@dataclass(slots=True)
class Stored:
    """The part `[start, end)` of a segment that agrees with some tokens."""

    segment: Segment
    start: int
    end: int


class SegmentTree:
    """All segments of all namespaces, each of at most `largest` tokens."""

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest = largest
        """Tokens of a segment at most."""
        self._roots: dict[str, _Node] = {}

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

    def path(self, space: str, tokens: bytes) -> list[Segment]:
        """The segments that have something of `tokens`, from the root on."""
        return list(
            dict.fromkeys(node.segment for node, _ in self._walk(space, tokens) if node.segment is not None)
        )

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
                is_open = last is not None and self.is_open(last)
                first = last.start if last is not None and is_open else at
                ranges += [(a, min(a + self.largest, until)) for a in range(first, until, self.largest)]
            at = max(at, end)
            last = node.segment if node is not None and node.segment and node.segment.end == end == at else None
        return ranges

    def branches(self, space: str, tokens: bytes, n: int) -> bool:
        """Whether something goes on behind the first `n` of these tokens in another way than they do."""
        at = n * WIDTH
        node, end = self._last(space, tokens[:at])
        if node is None or end < n:
            return False
        own = tokens[at : at + WIDTH]
        if end < node.end:
            return node.run[(end - node.start) * WIDTH :][:WIDTH] != own
        return any(first != own for first in node.children)

    def last_fork(self, space: str, tokens: bytes) -> int:
        """The last position on the path of some tokens where something else goes on; 0 without any."""
        node, end = self._last(space, tokens)
        if node is None:
            return 0
        if end < node.end or node.children:
            return end
        while node.parent is not None:
            node = node.parent
            if len(node.children) > 1:
                return node.end
        return 0

    def is_open(self, segment: Segment) -> bool:
        """Whether a longer one takes its place when its path goes on."""
        return segment.n_tokens < self.largest and segment.is_last

    def of_space(self, space: str) -> list[Segment]:
        """The segments of a namespace."""
        found: dict[Segment, None] = {}
        rest = [self._roots[space]] if space in self._roots else []
        while rest:
            node = rest.pop()
            if node.segment is not None:
                found[node.segment] = None
            rest += node.children.values()
        return list(found)

    @property
    def spaces(self) -> list[str]:
        """The namespaces that have something."""
        return list(self._roots)

    # --- changing ---

    def attach(self, segment: Segment, space: str, tokens: bytes) -> list[Segment]:
        """Let a segment stand for the tokens from its start to their end; those that it takes the place of."""
        nodes = self._nodes_of(self._insert(space, tokens), segment.start)
        replaced = list(dict.fromkeys(node.segment for node in nodes if node.segment is not None))
        for each in replaced:
            if each.start < segment.start or each.end > segment.end:
                raise AssertionError(f"[{segment.start}, {segment.end}) has a part of [{each.start}, {each.end})")
            each.nodes = []
        for node in nodes:
            node.segment = segment
        segment.nodes = nodes
        return replaced

    def detach(self, segment: Segment) -> None:
        """Let a segment stand for nothing any more."""
        nodes, segment.nodes = segment.nodes, []
        for node in nodes:
            node.segment = None
        if nodes:
            self._prune(nodes[-1])

    def check(self) -> set[Segment]:
        """Prove what must always hold; raises `AssertionError`. All segments."""
        found: dict[Segment, list[_Node]] = {}
        rest = list(self._roots.values())
        while rest:
            node = rest.pop()
            assert node.children or node.segment, "a node for nothing"
            if node.segment is not None:
                found.setdefault(node.segment, []).append(node)
                assert node.segment.start <= node.start < node.end <= node.segment.end
            for first, child in node.children.items():
                assert child.parent is node
                assert child.start == node.end
                assert child.run[:WIDTH] == first
                assert child.space == node.space
                rest.append(child)
        for segment, nodes in found.items():
            assert nodes == segment.nodes
            assert (nodes[0].start, nodes[-1].end) == (segment.start, segment.end)
            assert segment.n_tokens <= self.largest
            assert all(b.parent is a for a, b in pairwise(nodes)), "a segment that branches"
        return set(found)

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

    def _last(self, space: str, tokens: bytes) -> tuple[_Node | None, int]:
        """The node on the path of some tokens where they end, or leave it, and at which position."""
        path: list[tuple[_Node | None, int]] = [(None, 0), *self._walk(space, tokens)]
        return path[-1]

    def _insert(self, space: str, tokens: bytes) -> _Node:
        """The node that ends where `tokens` do."""
        node = self._roots.setdefault(space, _Node(b"", None, 0, None, space))
        for each, end in list(self._walk(space, tokens)):
            node = self._split(each, end) if end < each.end else each
        if node.end < len(tokens) // WIDTH:
            child = _Node(tokens[node.end * WIDTH :], node, node.end, None, space)
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
        upper = _Node(node.run[:at], node.parent, node.start, node.segment, node.space)
        upper.children[node.run[at : at + WIDTH]] = node
        node.parent.children[upper.run[:WIDTH]] = upper
        node.run, node.parent, node.start = node.run[at:], upper, n
        if node.segment is not None:
            nodes = node.segment.nodes
            nodes.insert(nodes.index(node), upper)
        return upper

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
