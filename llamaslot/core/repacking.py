"""Moving idle prefixes to lower cells, since what prefill costs depends on the highest one in use.

llama.cpp puts tokens into the lowest free cells, so new ones fill holes by themselves; what lies above them and
idles keeps the mark up. Such a part of a node is saved and loaded again below, for all of its holders at once:
nothing is computed, and what was shared stays shared. The old cells are freed last, so that nothing is lost on the
way.
"""

from __future__ import annotations

import numpy as np

from llamaslot.core.backend import Move
from llamaslot.core.cells import CellMap, Cells
from llamaslot.core.ledger import Ledger
from llamaslot.core.node import Node

_RATIO = 1.5
"""Highest used cell, in used cells, up to which nothing is done."""
_MOST_AT_ONCE = 2048
"""Tokens moved in one step, so that no running stream waits long for it."""
_PADDING = 256
"""Attention scans whole blocks of so many cells."""


class Repacker:
    """Plans moves for a ledger; `least_gain` is the number of cells that the mark must fall by to be worth it."""

    def __init__(self, ledger: Ledger, least_gain: int) -> None:
        self._ledger = ledger
        self._least_gain = least_gain
        self._stuck_at = (-1, -1)
        """Idle cells and clock at which there was nothing to be moved."""

    def moves(self) -> list[Move]:
        """What to move in this step; nothing where it would not help. The ledger must be settled."""
        ledger, scratch = self._ledger, self._ledger.scratch
        mark = ledger.high_water
        if ledger.cells is None or scratch is None or (ledger.n_idle, ledger.clock) == self._stuck_at:
            return []
        if mark <= _RATIO * ledger.n_used:
            return []
        idle, pinned_mark = [], 0
        for node in ledger.tree.nodes():
            cells = self._cells_of(node, ledger.cells)
            if node.running:
                pinned_mark = max(pinned_mark, int(cells.max()) + 1)
            else:
                idle.append((int(cells.max()), node, cells))
        target = max(-(-ledger.n_used // _PADDING) * _PADDING, pinned_mark)
        moves: list[Move] = []
        if mark - target >= self._least_gain:
            idle.sort(key=lambda each: -each[0])
            above = [(node, cells) for highest, node, cells in idle if highest >= target]
            moves = self._down_to(target, above, scratch)
        if not moves:
            self._stuck_at = (ledger.n_idle, ledger.clock)
        return moves

    def _down_to(self, target: int, above: list[tuple[Node, Cells]], scratch: int) -> list[Move]:
        """Moves of what lies above `target`, the highest first, as far as it finds room below."""
        ledger = self._ledger
        assert ledger.cells is not None
        left = min(ledger.cells.n_free_below(target), _MOST_AT_ONCE)
        moves: list[Move] = []
        for node, cells in above:
            found = np.flatnonzero(cells >= target)
            first, end = int(found[0]), int(found[-1]) + 1
            first = max(first, end - left)
            if first == end:
                break
            holders = tuple(ledger.tree.holders(node))
            moves.append(Move(holders, scratch, node.start + first, node.start + end))
            left -= end - first
        return moves

    def _cells_of(self, node: Node, cells: CellMap) -> Cells:
        return cells.cells(next(self._ledger.tree.holders(node)), node.start, node.end)
