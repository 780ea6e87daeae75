"""What to give up when cells are short: idle leaves, the least recently used first, never an interior node.

An eviction is planned whole before anything is touched. Leaves are kept in order as they come and go, on a logical
clock, so that a plan costs what it takes and no walk over the tree.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TypeAlias

from llamaslot.kvcache.node import Node

_Entry: TypeAlias = tuple[int, int, Node]
"""When the node was used last, a number that breaks ties by age, and the node."""


@dataclass(slots=True)
class Eviction:
    """What leaves the pool."""

    keeps: dict[int, int] = field(default_factory=dict)
    """For each sequence that has to give up something the tokens that it keeps."""
    cuts: list[tuple[Node, int]] = field(default_factory=list)
    """The nodes that nobody will hold any more from some position on, leaves first."""
    n_cells: int = 0
    """The cells that this frees."""


class Candidates:
    """The idle leaves of a tree by last use; entries of nodes that changed since are skipped when met."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._n_offered = 0
        self._n_sifted = 0

    def __contains__(self, node: Node) -> bool:
        """Whether a node would be found; takes time in proportion to the heap."""
        return any(entry[2] is node for entry in self._heap if _is_current(entry))

    def offer(self, node: Node) -> None:
        """Enter a node whose last use, children or reference count have changed, if it is an idle leaf."""
        if not node.is_idle_leaf:
            return
        self._n_offered += 1
        heapq.heappush(self._heap, (node.last_used, self._n_offered, node))
        if len(self._heap) > 64 + 2 * self._n_sifted:
            self._heap = list({id(entry[2]): entry for entry in self._heap if _is_current(entry)}.values())
            heapq.heapify(self._heap)
            self._n_sifted = len(self._heap)

    def plan(self, n_cells: int, before: int | None = None) -> Eviction:
        r"""What to cut to free so many cells, or all there is, last used before a given time; changes nothing.

        The last leaf may lose just its tail. Once all that branches off a node is given up, the node is the next
        leaf, and the last sequence that went through it goes on holding it, as its heir:

              [a b]                  plan(3):  0 keeps 0, of [c], used least recently
              /   \                            1 keeps 2, of [d e]: now the heir of [a b]
          [c] tip 0  [d e] tip 1     plan(4):  1 keeps 1 instead, since [a b] is a leaf then
        """
        plan = Eviction()
        cut: set[int] = set()
        heirs: dict[int, int] = {}
        n_left: dict[int, int] = {}
        taken: list[_Entry] = []
        exposed: list[_Entry] = []
        while plan.n_cells < n_cells:
            source = exposed if exposed and (not self._heap or exposed[0] < self._heap[0]) else self._heap
            if not source:
                break
            entry = heapq.heappop(source)
            last_used, age, node = entry
            if source is self._heap:
                if not _is_current(entry) or id(node) in cut:
                    continue
                taken.append(entry)
            if before is not None and last_used >= before:
                break
            holders = node.tips or {heirs[id(node)]}
            wanted = n_cells - plan.n_cells
            if wanted < node.n_tokens:
                plan.keeps.update(dict.fromkeys(holders, node.end - wanted))
                plan.cuts.append((node, node.end - wanted))
                plan.n_cells += wanted
                break
            cut.add(id(node))
            plan.keeps.update(dict.fromkeys(holders, 0))
            plan.cuts.append((node, node.start))
            plan.n_cells += node.n_tokens
            parent = node.parent
            assert parent is not None
            if parent.is_root:
                continue
            left = n_left[id(parent)] = n_left.get(id(parent), len(parent.children)) - 1
            if left == 0:
                if not parent.tips:
                    heirs[id(parent)] = heir = min(holders)
                    plan.keeps[heir] = parent.end
                if not parent.n_pins:
                    heapq.heappush(exposed, (parent.last_used, age, parent))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return plan


def _is_current(entry: _Entry) -> bool:
    last_used, _, node = entry
    return last_used == node.last_used and node.is_idle_leaf
