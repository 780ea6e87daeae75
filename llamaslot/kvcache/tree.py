"""The radix tree over every token whose KV is shared: which sequence holds which prefix.

A sequence holds a path: all tokens from its root down to the end of one node, its *tip*. So the holders of a node
are the sequences whose tips are in its subtree, and nothing else has to be kept up to date: a split moves no
holder, and an edge ends wherever a path does. A leaf without a tip has no KV any more and is taken out at once.

    hold 7 tokens as 0, then as 1 the same first 4 and 2 others:

        root                            root
          |                               |
        [a b c d e f g]  tip 0          [a b c d]        held by 0 and 1
                                         /      \
                                  [e f g] tip 0  [x y] tip 1

Nothing here knows of llama.cpp, of time or of requests; `now` is a logical clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from llamaslot.base.tokens import WIDTH, Tokens, unpacked
from llamaslot.kvcache.eviction import Candidates, Eviction
from llamaslot.kvcache.node import Node


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of some tokens that the tree has: `n` tokens, the last of them in `node`."""

    node: Node
    n: int


class Tree:
    """All namespaces. Sequence ids are integers from 0 on."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._tips: dict[int, Node] = {}
        self._pinned: set[int] = set()
        self._candidates = Candidates()
        self.n_tokens = 0
        """Tokens in all nodes: the cells that they occupy."""
        self.n_pinned_tokens = 0
        """Tokens in nodes that running sequences go through."""
        self.n_nodes = 0

    # --- reading ---

    def match(self, space: str, tokens: bytes) -> Match:
        """The longest prefix of `tokens` in a namespace; changes nothing."""
        return self._descend(self._roots.get(space) or _root(space), tokens)

    def shared(self, match: Match, seqs: Iterable[int]) -> dict[int, int]:
        """For each of these sequences the first tokens of `match` that it holds."""
        ends = {id(node): min(node.end, match.n) for node in match.node.path()}
        held = {}
        for seq in seqs:
            tip = self._tips.get(seq)
            held[seq] = next((ends[id(n)] for n in tip.path() if id(n) in ends), 0) if tip else 0
        return held

    def last_fork(self, match: Match) -> int:
        """The last position on the path of a match where another path goes on, ends or runs; 0 without any."""
        node = match.node
        if match.n < node.end or not node.is_idle_leaf:
            return match.n
        ours = node.tips
        while node.parent is not None:
            node = node.parent
            if len(node.children) > 1 or node.n_pins or not node.tips <= ours:
                return node.end
        return 0

    def n_idle(self, match: Match) -> int:
        """Tokens of a match that no running sequence holds."""
        return sum(min(node.end, match.n) - node.start for node in match.node.path() if not node.n_pins)

    def tip(self, seq: int) -> Node | None:
        """Where the path of a sequence ends; None when it holds nothing."""
        return self._tips.get(seq)

    def length(self, seq: int) -> int:
        """Tokens that a sequence holds."""
        tip = self._tips.get(seq)
        return tip.end if tip is not None else 0

    def tokens(self, seq: int) -> Tokens:
        """All tokens that a sequence holds, int32."""
        tip = self._tips.get(seq)
        return unpacked(tip.prefix() if tip is not None else b"")

    def is_pinned(self, seq: int) -> bool:
        """Whether the sequence runs."""
        return seq in self._pinned

    def holders(self, node: Node) -> Iterator[int]:
        """The sequences that hold a node."""
        rest = [node]
        while rest:
            node = rest.pop()
            yield from sorted(node.tips)
            rest += node.children.values()

    def sequences(self, space: str) -> list[int]:
        """The sequences that hold something in a namespace."""
        return [seq for seq, tip in self._tips.items() if tip.space == space]

    def is_covered(self, seq: int) -> bool:
        """Whether everything that a sequence holds is held by another one too."""
        tip = self._tips[seq]
        return tip.is_root or bool(tip.children) or len(tip.tips) > 1

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        rest = [node for root in self._roots.values() for node in root.children.values()]
        while rest:
            node = rest.pop()
            yield node
            rest += node.children.values()

    # --- changing ---

    def hold(self, seq: int, match: Match) -> None:
        """Let a sequence that holds nothing hold the first `match.n` tokens of a path."""
        if seq in self._tips:
            raise AssertionError(f"sequence {seq} holds something already")
        node = self._end_at(match.node, match.n)
        self._set_tip(seq, self._roots.setdefault(node.space, node) if node.is_root else node)

    def extend(self, seq: int, tokens: bytes) -> int:
        """A sequence computed these tokens behind its path; how many of them the tree had already."""
        tip = self._tips[seq]
        found = self._descend(tip, tokens)
        n_known = found.n - tip.end
        if n_known:
            self._move(seq, self._end_at(found.node, found.n))
            tip = self._tips[seq]
        rest = tokens[n_known * WIDTH :]
        if not rest:
            return n_known
        if not tip.is_root and not tip.children and tip.tips == {seq}:
            self._lengthen(tip, rest)
        else:
            child = Node(bytearray(rest), tip, tip.end, tip.space)
            tip.children[rest[:WIDTH]] = child
            self.n_tokens += child.n_tokens
            self.n_nodes += 1
            self._move(seq, child)
            self._candidates.offer(child)
        return n_known

    def truncate(self, seq: int, keep: int) -> None:
        """A sequence drops all but its first `keep` tokens."""
        tip = self._tips[seq]
        if keep < tip.end:
            node = tip
            while node.parent is not None and keep <= node.start:
                node = node.parent
            self._move(seq, self._end_at(node, keep))

    def release(self, seq: int) -> None:
        """A sequence drops everything that it holds."""
        tip = self._tips.pop(seq)
        if seq in self._pinned:
            self._pinned.discard(seq)
            self._count_pins(tip, None, -1)
        tip.tips.discard(seq)
        self._tidy(tip)

    def pin(self, seq: int) -> None:
        """A request runs in this sequence: nothing on its path may be evicted."""
        if seq in self._pinned:
            raise AssertionError(f"sequence {seq} is pinned already")
        self._pinned.add(seq)
        self._count_pins(self._tips[seq], None, +1)

    def unpin(self, seq: int, now: int) -> None:
        """The request has ended; its path was used now."""
        self._pinned.remove(seq)
        tip = self._tips[seq]
        self._count_pins(tip, None, -1)
        self.touch(tip, now)

    def touch(self, node: Node, now: int, hits: int = 0) -> None:
        """Note that a path was used now, and so many times found."""
        for each in node.path():
            each.last_used = now
            each.hits += hits
        self._candidates.offer(node)

    def plan_eviction(self, n_cells: int, before: int | None = None) -> Eviction:
        """What to cut of the idle paths to free so many cells, or all there is; changes nothing.

        With `before`, only of those that were last used before that time.
        """
        return self._candidates.plan(n_cells, before)

    def evict(self, plan: Eviction) -> None:
        """Carry out a plan that was made since the last change."""
        for seq, keep in plan.keeps.items():
            if keep:
                self.truncate(seq, keep)
        for seq, keep in plan.keeps.items():
            if not keep:
                self.release(seq)

    def check(self) -> None:
        """Prove what must always hold; raises `AssertionError`. Takes time in proportion to the tree."""
        n_tokens = n_pinned = n_nodes = 0
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert parent.children[bytes(node.run[:WIDTH])] is node
            assert node.start == parent.end
            assert node.n_tokens > 0
            assert node.children or node.tips, "nobody holds a leaf"
            assert node.tips or len(node.children) != 1, "a chain of two"
            running = sum(child.n_pins for child in node.children.values())
            assert node.n_pins == running + len(node.tips & self._pinned), "a reference count is wrong"
            assert not node.is_idle_leaf or node in self._candidates, "a leaf cannot be evicted"
            assert node.space == parent.space
            assert all(node.last_used >= child.last_used for child in node.children.values())
            n_tokens += node.n_tokens
            n_pinned += node.n_tokens * bool(node.n_pins)
            n_nodes += 1
        assert (n_tokens, n_pinned, n_nodes) == (self.n_tokens, self.n_pinned_tokens, self.n_nodes)
        assert self._pinned <= self._tips.keys()
        for seq, tip in self._tips.items():
            assert seq in tip.tips
            assert tip.is_root or tip.parent is not None
        assert sum(len(node.tips) for node in (*self.nodes(), *self._roots.values())) == len(self._tips)
        assert all(root.children or root.tips for root in self._roots.values()), "a namespace without KV"

    # --- inside ---

    def _descend(self, node: Node, tokens: bytes) -> Match:
        at, end = 0, len(tokens)
        start = node.end
        while at < end:
            child = node.children.get(tokens[at : at + WIDTH])
            if child is None:
                break
            run = child.run
            if not tokens.startswith(run, at):
                same = _common(run, tokens, at)
                return Match(child, start + at // WIDTH + same)
            at += len(run)
            node = child
        return Match(node, start + at // WIDTH)

    def _end_at(self, node: Node, n: int) -> Node:
        """The node on this path that ends after `n` tokens; splits where there is none."""
        if n == node.end:
            return node
        if not node.start < n < node.end:
            raise AssertionError(f"{n} is not within [{node.start}, {node.end}]")
        assert node.parent is not None
        at = (n - node.start) * WIDTH
        upper = Node(node.run[:at], node.parent, node.start, node.space)
        upper.n_pins, upper.last_used, upper.hits = node.n_pins, node.last_used, node.hits
        node.parent.children[bytes(upper.run[:WIDTH])] = upper
        del node.run[:at]
        node.start, node.parent = n, upper
        upper.children[bytes(node.run[:WIDTH])] = node
        self.n_nodes += 1
        return upper

    def _lengthen(self, node: Node, run: bytes) -> None:
        node.run += run
        self.n_tokens += len(run) // WIDTH
        if node.n_pins:
            self.n_pinned_tokens += len(run) // WIDTH

    def _set_tip(self, seq: int, node: Node) -> None:
        self._tips[seq] = node
        node.tips.add(seq)

    def _move(self, seq: int, target: Node) -> None:
        """Let the path of a sequence end elsewhere on the same line of descent."""
        tip = self._tips[seq]
        if seq in self._pinned:
            if target.end > tip.end:
                self._count_pins(target, tip, +1)
            else:
                self._count_pins(tip, target, -1)
        tip.tips.discard(seq)
        self._set_tip(seq, target)
        self._tidy(tip)

    def _count_pins(self, node: Node, until: Node | None, by: int) -> None:
        """Change the reference counts from a node up to, and without, one of its ancestors (None: the root)."""
        for each in node.path():
            if each is until:
                return
            before, each.n_pins = each.n_pins, each.n_pins + by
            if (before == 0) != (each.n_pins == 0):
                self.n_pinned_tokens += each.n_tokens if each.n_pins else -each.n_tokens

    def _tidy(self, node: Node) -> None:
        """After a tip left: take out what nobody holds, and join what nothing separates any more."""
        while not node.is_root and not node.children and not node.tips:
            parent = node.parent
            assert parent is not None
            del parent.children[bytes(node.run[:WIDTH])]
            self.n_tokens -= node.n_tokens
            self.n_nodes -= 1
            node.parent, node.last_used = None, -1
            node = parent
        if node.is_root:
            if not node.children and not node.tips:
                del self._roots[node.space]
        elif not node.tips and len(node.children) == 1:
            self._join(node)
        else:
            self._candidates.offer(node)

    def _join(self, node: Node) -> None:
        """Let a node with one child and no tip become one with it; the child stays, so that its tips do."""
        (child,) = node.children.values()
        assert node.parent is not None
        node.parent.children[bytes(node.run[:WIDTH])] = child
        child.run[:0] = node.run
        child.start, child.parent = node.start, node.parent
        child.hits = max(child.hits, node.hits)
        child.last_used = max(child.last_used, node.last_used)
        node.parent, node.last_used = None, -1
        self.n_nodes -= 1
        self._candidates.offer(child)


def _root(space: str) -> Node:
    return Node(bytearray(), None, 0, space)


def _common(run: bytearray, tokens: bytes, at: int) -> int:
    """Tokens that `run` and `tokens[at:]` share at their start; at least the first."""
    n = min(len(run), len(tokens) - at) // WIDTH
    same = np.frombuffer(run, "<i4", n) == np.frombuffer(tokens, "<i4", n, at)
    return n if same.all() else int(same.argmin())
