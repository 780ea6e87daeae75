"""The radix tree over every token whose KV is shared: which sequence holds which prefix, and what may go first.

A sequence holds a path: all tokens from its root down to the end of one node, its *tip*. So the holders of a node
are the sequences whose tips are in its subtree, and nothing else has to be kept up to date: a split moves no
holder, and an edge ends wherever a path does. A leaf without a tip has no KV any more and is taken out at once.

Tokens travel as bytes, four for each (little-endian int32): that compares faster than numpy on short edges. Nothing
here knows of llama.cpp, of time or of requests; `now` is a logical clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from llamaslot.core.backend import Tokens

_WIDTH = 4


def packed(tokens: Tokens) -> bytes:
    """Token ids as the tree takes them."""
    return tokens.astype("<i4", copy=False).tobytes()


def unpacked(run: bytes | bytearray) -> Tokens:
    """Token ids from the tree, int32."""
    return np.frombuffer(bytes(run), dtype="<i4").astype(np.int32, copy=False)


class Node:
    """A run of tokens that all its holders share, and what branches off behind it."""

    __slots__ = ("children", "hits", "last_used", "parent", "run", "running", "start", "tips")

    def __init__(self, run: bytearray, parent: Node | None, start: int) -> None:
        self.run = run
        self.parent = parent
        self.start = start
        """Tokens in front of this run."""
        self.children: dict[bytes, Node] = {}
        """By the first token."""
        self.tips: set[int] = set()
        """Sequences whose path ends here."""
        self.running = 0
        """Pinned sequences whose path goes through here or ends here: the reference count."""
        self.last_used = 0
        self.hits = 0

    def __len__(self) -> int:
        """Tokens of the run."""
        return len(self.run) // _WIDTH

    @property
    def end(self) -> int:
        """Tokens from the root to the end of this run."""
        return self.start + len(self)

    @property
    def tokens(self) -> Tokens:
        """The run, int32."""
        return unpacked(self.run)

    @property
    def is_root(self) -> bool:
        """Whether this is the start of a namespace."""
        return self.parent is None

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of some tokens that the tree has: `n` tokens, the last of them in `node`."""

    node: Node
    n: int


@dataclass(slots=True)
class Eviction:
    """For each sequence that has to give up something the tokens that it keeps, and what that frees."""

    keeps: dict[int, int] = field(default_factory=dict)
    n_cells: int = 0
    n_ids: int = 0


class Tree:
    """All namespaces. Sequence ids are integers from 0 on; those in `scarce` count as ids that eviction frees."""

    def __init__(self, scarce: range = range(0)) -> None:
        self._scarce = scarce
        self._roots: dict[str, Node] = {}
        self._tips: dict[int, Node] = {}
        self._pinned: set[int] = set()
        self._heap: list[_Entry] = []
        self._n_pushed = 0
        self.n_tokens = 0
        """Tokens in all nodes: the cells that they occupy."""
        self.n_pinned_tokens = 0
        """Tokens in nodes that running sequences go through."""
        self.n_nodes = 0

    # --- reading ---

    def root(self, space: str) -> Node:
        """Where the paths of a namespace start."""
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = Node(bytearray(), None, 0)
        return root

    def match(self, space: str, tokens: bytes) -> Match:
        """The longest prefix of `tokens` in a namespace; changes nothing but that a new namespace gets its root."""
        return self._descend(self.root(space), tokens)

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
        runs = [bytes(node.run) for node in tip.path()] if tip is not None else []
        return unpacked(b"".join(reversed(runs)))

    def is_pinned(self, seq: int) -> bool:
        """Whether the sequence runs."""
        return seq in self._pinned

    def holder(self, node: Node) -> int:
        """Some sequence that holds a node."""
        while not node.tips:
            node = next(iter(node.children.values()))
        return min(node.tips)

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
        self._set_tip(seq, self._end_at(match.node, match.n))

    def extend(self, seq: int, tokens: bytes) -> int:
        """A sequence computed these tokens behind its path; how many of them the tree had already."""
        tip = self._tips[seq]
        found = self._descend(tip, tokens)
        n_known = found.n - tip.end
        if n_known:
            self._move(seq, self._end_at(found.node, found.n))
            tip = self._tips[seq]
        rest = tokens[n_known * _WIDTH :]
        if not rest:
            return n_known
        if not tip.is_root and not tip.children and tip.tips == {seq}:
            self._lengthen(tip, rest)
        else:
            child = Node(bytearray(rest), tip, tip.end)
            tip.children[rest[:_WIDTH]] = child
            self.n_tokens += len(child)
            self.n_nodes += 1
            self._move(seq, child)
            self._offer(child)
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
            self._count_running(tip, None, -1)
        tip.tips.discard(seq)
        self._tidy(tip)

    def pin(self, seq: int) -> None:
        """A request runs in this sequence: nothing on its path may be evicted."""
        if seq in self._pinned:
            raise AssertionError(f"sequence {seq} is pinned already")
        self._pinned.add(seq)
        self._count_running(self._tips[seq], None, +1)

    def unpin(self, seq: int, now: int) -> None:
        """The request has ended; its path was used now."""
        self._pinned.remove(seq)
        tip = self._tips[seq]
        self._count_running(tip, None, -1)
        self.touch(tip, now)

    def touch(self, node: Node, now: int, hits: int = 0) -> None:
        """Note that a path was used now, and so many times found."""
        for each in node.path():
            each.last_used = now
            each.hits += hits
        self._offer(node)

    # --- eviction ---

    def plan_eviction(self, n_cells: int, n_ids: int = 0, spare: Iterable[Node] = ()) -> Eviction:
        """What to cut to free so many cells and ids, or all there is; changes nothing.

        Leaves go first, the least recently used of them before others; the last one may lose just its tail. Paths
        through `spare` and running ones are left alone. What an id still holds that others hold too costs nothing,
        so the id is freed with its leaf; the last one to hold a path goes on holding it.
        """
        untouched = {id(each) for node in spare for each in node.path()}
        plan = Eviction()
        cut: set[int] = set()
        tips: dict[int, set[int]] = {}
        n_left: dict[int, int] = {}
        taken: list[_Entry] = []
        exposed: list[_Entry] = []
        while plan.n_cells < n_cells or plan.n_ids < n_ids:
            source = exposed if exposed and (not self._heap or exposed[0] < self._heap[0]) else self._heap
            if not source:
                break
            entry = heapq.heappop(source)
            node = entry[2]
            if source is self._heap:
                if not _is_candidate(entry) or id(node) in cut:
                    continue
                taken.append(entry)
            if id(node) in untouched:
                continue
            holders = tips.get(id(node), node.tips)
            wanted = n_cells - plan.n_cells
            if plan.n_ids >= n_ids and wanted < len(node):
                plan.keeps.update(dict.fromkeys(holders, node.end - wanted))
                plan.n_cells += wanted
                break
            cut.add(id(node))
            plan.keeps.update(dict.fromkeys(holders, 0))
            plan.n_cells += len(node)
            freed = set(holders)
            parent = node.parent
            assert parent is not None
            if not parent.is_root:
                left = n_left[id(parent)] = n_left.get(id(parent), len(parent.children)) - 1
                if left == 0 and not parent.tips:
                    heir = min(holders)
                    freed.discard(heir)
                    plan.keeps[heir] = parent.end
                    tips[id(parent)] = {heir}
                if left == 0 and not parent.running:
                    heapq.heappush(exposed, (parent.last_used, entry[1], parent))
            plan.n_ids += sum(seq in self._scarce for seq in freed)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return plan

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
        candidates = {id(entry[2]) for entry in self._heap if _is_candidate(entry)}
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert parent.children[bytes(node.run[:_WIDTH])] is node
            assert node.start == parent.end
            assert len(node) > 0
            assert node.children or node.tips, "nobody holds a leaf"
            assert node.tips or len(node.children) != 1, "a chain of two"
            running = sum(child.running for child in node.children.values())
            assert node.running == running + len(node.tips & self._pinned), "a reference count is wrong"
            assert node.children or node.running or id(node) in candidates, "a leaf cannot be evicted"
            assert all(node.last_used >= child.last_used for child in node.children.values())
            n_tokens += len(node)
            n_pinned += len(node) * bool(node.running)
            n_nodes += 1
        assert (n_tokens, n_pinned, n_nodes) == (self.n_tokens, self.n_pinned_tokens, self.n_nodes)
        assert self._pinned <= self._tips.keys()
        for seq, tip in self._tips.items():
            assert seq in tip.tips
            assert tip.is_root or tip.parent is not None
        assert sum(len(node.tips) for node in (*self.nodes(), *self._roots.values())) == len(self._tips)

    # --- inside ---

    def _descend(self, node: Node, tokens: bytes) -> Match:
        at, end = 0, len(tokens)
        start = node.end
        while at < end:
            child = node.children.get(tokens[at : at + _WIDTH])
            if child is None:
                break
            run = child.run
            if not tokens.startswith(run, at):
                same = _common(run, tokens, at)
                return Match(child, start + at // _WIDTH + same)
            at += len(run)
            node = child
        return Match(node, start + at // _WIDTH)

    def _end_at(self, node: Node, n: int) -> Node:
        """The node on this path that ends after `n` tokens; splits where there is none."""
        if n == node.end:
            return node
        if not node.start < n < node.end:
            raise AssertionError(f"{n} is not within [{node.start}, {node.end}]")
        assert node.parent is not None
        at = (n - node.start) * _WIDTH
        upper = Node(node.run[:at], node.parent, node.start)
        upper.running, upper.last_used, upper.hits = node.running, node.last_used, node.hits
        node.parent.children[bytes(upper.run[:_WIDTH])] = upper
        del node.run[:at]
        node.start, node.parent = n, upper
        upper.children[bytes(node.run[:_WIDTH])] = node
        self.n_nodes += 1
        return upper

    def _lengthen(self, node: Node, run: bytes) -> None:
        node.run += run
        self.n_tokens += len(run) // _WIDTH
        if node.running:
            self.n_pinned_tokens += len(run) // _WIDTH

    def _set_tip(self, seq: int, node: Node) -> None:
        self._tips[seq] = node
        node.tips.add(seq)

    def _move(self, seq: int, target: Node) -> None:
        """Let the path of a sequence end elsewhere on the same line of descent."""
        tip = self._tips[seq]
        if seq in self._pinned:
            if target.end > tip.end:
                self._count_running(target, tip, +1)
            else:
                self._count_running(tip, target, -1)
        tip.tips.discard(seq)
        self._set_tip(seq, target)
        self._tidy(tip)

    def _count_running(self, node: Node, until: Node | None, by: int) -> None:
        """Change the reference counts from a node up to, and without, one of its ancestors (None: the root)."""
        for each in node.path():
            if each is until:
                return
            before, each.running = each.running, each.running + by
            if (before == 0) != (each.running == 0):
                self.n_pinned_tokens += len(each) if each.running else -len(each)

    def _tidy(self, node: Node) -> None:
        """After a tip left: take out what nobody holds, and join what nothing separates any more."""
        while not node.is_root and not node.children and not node.tips:
            parent = node.parent
            assert parent is not None
            del parent.children[bytes(node.run[:_WIDTH])]
            self.n_tokens -= len(node)
            self.n_nodes -= 1
            node.parent, node.last_used = None, -1
            node = parent
        if not node.is_root and not node.tips and len(node.children) == 1:
            self._join(node)
        else:
            self._offer(node)

    def _join(self, node: Node) -> None:
        """Let a node with one child and no tip become one with it; the child stays, so that its tips do."""
        (child,) = node.children.values()
        assert node.parent is not None
        node.parent.children[bytes(node.run[:_WIDTH])] = child
        child.run[:0] = node.run
        child.start, child.parent = node.start, node.parent
        child.hits = max(child.hits, node.hits)
        child.last_used = max(child.last_used, node.last_used)
        node.parent, node.last_used = None, -1
        self.n_nodes -= 1
        self._offer(child)

    def _offer(self, node: Node) -> None:
        """Enter a node among the candidates for eviction, if it is one."""
        if not node.is_root and not node.children and not node.running:
            self._n_pushed += 1
            heapq.heappush(self._heap, (node.last_used, self._n_pushed, node))
            if len(self._heap) > 64 + 4 * self.n_nodes:
                self._heap = [entry for entry in self._heap if _is_candidate(entry)]
                heapq.heapify(self._heap)


_Entry: TypeAlias = tuple[int, int, Node]


def _is_candidate(entry: _Entry) -> bool:
    last_used, _, node = entry
    return last_used == node.last_used and not node.is_root and not node.children and not node.running


def _common(run: bytearray, tokens: bytes, at: int) -> int:
    """Tokens that `run` and `tokens[at:]` share at their start; at least the first."""
    n = min(len(run), len(tokens) - at) // _WIDTH
    same = np.frombuffer(run, "<i4", n) == np.frombuffer(tokens, "<i4", n, at)
    return n if same.all() else int(same.argmin())
