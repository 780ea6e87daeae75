"""Eviction from the pool: idle leaves only, the least recently used first.

If there are several tenants, those that exceed their share of the pool lose their leaves first.

An eviction is planned completely before anything changes. A heap keeps the leaves in the order of a logical clock,
so the time of a plan grows with what it evicts, not with the tree.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from llamaslot.kvcache.nodes import Node

_Entry: TypeAlias = tuple[int, int, Node]
"""Last use of the node, a serial number that breaks ties by age, and the node."""


@dataclass(slots=True)
class EvictionPlan:
    """The sequences to truncate, and the tokens that this evicts."""

    keeps: dict[int, int] = field(default_factory=dict)
    """Tokens that each truncated sequence keeps."""
    evicted: list[tuple[int, int, int]] = field(default_factory=list)
    """Sequence and range `[start, end)` that no sequence will hold any more, leaves first."""
    n_cells: int = 0
    """Cells that the plan frees."""


class EvictionQueue:
    """Idle leaves by last use; an entry whose node has changed since is skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._n_offered = 0
        self._n_compacted = 0

    def __contains__(self, node: Node) -> bool:
        """Return True if a plan would find a node; takes time in proportion to the heap."""
        return any(entry[2] is node for entry in self._heap if _is_current(entry))

    def offer(self, node: Node) -> None:
        """Add a node whose last use, holders or pins have changed, if it is an idle leaf."""
        if not node.is_idle_leaf:
            return
        self._n_offered += 1
        heapq.heappush(self._heap, (node.last_used, self._n_offered, node))
        if len(self._heap) > 64 + 2 * self._n_compacted:
            self._heap = list({id(entry[2]): entry for entry in self._heap if _is_current(entry)}.values())
            heapq.heapify(self._heap)
            self._n_compacted = len(self._heap)

    def plan(
        self, n_cells: int, before: int | None = None, excess: Mapping[str, int] | None = None
    ) -> EvictionPlan:
        r"""Plan to free `n_cells`, or as many as there are, of nodes last used before `before`; changes nothing.

        `excess` has the cells that each tenant has beyond its share. Other tenants lose cells only after those.

        The last leaf may lose only its tail. A node whose resident children are all evicted becomes a leaf itself.
        The last sequence that went through it still holds it, as its heir:

              [a b]                  plan(3):  0 keeps 0, of [c], the least recently used
              /   \                            1 keeps 2, of [d e]: now the heir of [a b]
          [c] of 0  [d e] of 1       plan(4):  1 keeps 1 instead, since [a b] is a leaf by then
        """
        plan = EvictionPlan()
        leaves = _Leaves(self._heap, excess)
        heirs: dict[int, int] = {}
        n_left: dict[int, int] = {}
        while plan.n_cells < n_cells and (entry := leaves.next()) is not None:
            last_used, age, node = entry
            if before is not None and last_used >= before:
                break
            holders = node.end_of or {heirs[id(node)]}
            wanted = n_cells - plan.n_cells
            if wanted < node.n_tokens:
                plan.keeps.update(dict.fromkeys(holders, node.end - wanted))
                plan.evicted.append((min(holders), node.end - wanted, node.end))
                plan.n_cells += wanted
                break
            leaves.evict(node)
            plan.keeps.update(dict.fromkeys(holders, 0))
            plan.evicted.append((min(holders), node.start, node.end))
            plan.n_cells += node.n_tokens
            parent = node.parent
            assert parent is not None
            if parent.is_root:
                continue
            if id(parent) not in n_left:
                n_left[id(parent)] = parent.n_resident_children
            n_left[id(parent)] -= 1
            if n_left[id(parent)] == 0:
                if not parent.end_of:
                    heirs[id(parent)] = heir = min(holders)
                    plan.keeps[heir] = parent.end
                if not parent.n_pins:
                    leaves.expose((parent.last_used, age, parent))
        leaves.put_back()
        return plan


class _Leaves:
    """Idle leaves in the order in which a plan evicts them.

    Leaves of tenants without any `excess` left come last.
    """

    def __init__(self, heap: list[_Entry], excess: Mapping[str, int] | None) -> None:
        self._heap = heap
        self._taken: list[_Entry] = []
        self._exposed: list[_Entry] = []
        """Nodes that become leaves by this plan."""
        self._spared: list[_Entry] = []
        """Leaves of tenants within their share."""
        self._spares = excess is not None
        self._n_beyond = Counter(excess)
        """Cells that each tenant still has beyond its share."""
        self._done: set[int] = set()

    def next(self) -> _Entry | None:
        """The next leaf; None if there is none."""
        while source := self._source():
            entry = heapq.heappop(source)
            node = entry[2]
            if id(node) in self._done or (source is self._heap and not _is_current(entry)):
                continue
            if source is self._heap:
                self._taken.append(entry)
            if not self._spares or self._n_beyond[node.tenant] > 0:
                return entry
            # They come in the order of their last use, so the list is a heap.
            self._spared.append(entry)
        return None

    def evict(self, node: Node) -> None:
        """Count a leaf as evicted."""
        self._done.add(id(node))
        self._n_beyond[node.tenant] -= node.n_tokens

    def expose(self, entry: _Entry) -> None:
        """Add a node whose children are evicted."""
        heapq.heappush(self._exposed, entry)

    def put_back(self) -> None:
        """Put back what was popped from the heap: a plan changes nothing."""
        for entry in self._taken:
            heapq.heappush(self._heap, entry)

    def _source(self) -> list[_Entry]:
        if self._spared and not self._heap and not self._exposed:
            self._exposed, self._spared, self._spares = self._spared, [], False
        return (
            self._exposed if self._exposed and (not self._heap or self._exposed[0] < self._heap[0]) else self._heap
        )


def _is_current(entry: _Entry) -> bool:
    last_used, _, node = entry
    return last_used == node.last_used and node.is_idle_leaf
