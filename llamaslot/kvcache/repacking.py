"""Moving idle prefixes within the pool, since where they lie decides what prefill beside them costs.

Attention scans the pool up to the highest used cell and skips whole blocks in which a prompt has nothing. llama.cpp
puts new tokens into the lowest free cells, so two things cost time:

    a high mark          idle cells far above everything else

        [a a a . . . . . . . . . . . . c c c]        ->    [a a a c c c]

    scattered holes      the next prompt will lie in many blocks, and all of them are computed

        [a a . a a b . b b . c c . c c d]            ->    [a a a a b b b c c c c d . . . .]

The first is mended whenever the mark is far above what is used, from the top; the second while nothing runs, from
the bottom. Parts of nodes are saved, let go and loaded again for all of their holders at once: nothing is computed,
and what was shared stays shared. Both lower the sum of all used cells' places, so it comes to an end.
"""

from __future__ import annotations

import numpy as np

from llamaslot.base.kv_ops import Move, Piece
from llamaslot.kvcache.cells import CellMap, Cells
from llamaslot.kvcache.node import Node
from llamaslot.kvcache.shared import SharedLedger

_RATIO = 1.5
"""Highest used cell, in used cells, up to which nothing is done."""
_MOST_AT_ONCE = 512
"""Tokens moved in one step, so that no running stream waits long for it, and little memory is needed."""
_PROMPT = 512
"""Tokens of the next prompt whose place is looked at."""
_BLOCK = 64
"""Cells that attention skips together."""
_SCATTER = 4
"""Blocks more than it needs over which that prompt may be scattered."""
_PADDING = 256
"""Attention scans whole blocks of so many cells."""


class Repacker:
    """Plans moves for a ledger; `least_gain` is the number of cells that the mark must fall by to be worth it."""

    def __init__(self, ledger: SharedLedger, scratch: int, least_gain: int) -> None:
        self._ledger = ledger
        self._scratch = scratch
        self._least_gain = least_gain
        self._stuck_at = (-1, -1, False)
        """Idle cells, clock, and whether nothing ran, when there was nothing to be moved."""

    def move(self, *, is_idle: bool) -> Move | None:
        """What to move in this step, if it helps; `is_idle` says that nothing runs. The ledger must be settled."""
        ledger = self._ledger
        now = (ledger.n_idle, ledger.clock, is_idle)
        if now == self._stuck_at:
            return None
        pieces: list[Piece] = []
        if ledger.cells.high_water > _RATIO * ledger.n_used:
            pieces = self._from_the_top(ledger.cells)
        if not pieces and is_idle:
            pieces = self._from_the_bottom(ledger.cells)
        if not pieces:
            self._stuck_at = now
            return None
        return Move(tuple(pieces), self._scratch)

    def _from_the_top(self, cells: CellMap) -> list[Piece]:
        """What lies above the place where the mark could be, the highest first, as far as it finds room below."""
        idle, pinned_mark = [], 0
        for node in self._ledger.tree.nodes():
            own = self._cells_of(node, cells)
            if node.n_pins:
                pinned_mark = max(pinned_mark, int(own.max()) + 1)
            else:
                idle.append((int(own.max()), node, own))
        target = max(-(-self._ledger.n_used // _PADDING) * _PADDING, pinned_mark)
        if cells.high_water - target < self._least_gain:
            return []
        pieces: list[Piece] = []
        left = min(cells.n_free_below(target), _MOST_AT_ONCE)
        for highest, node, own in sorted(idle, key=lambda each: -each[0]):
            found = np.flatnonzero(own >= target)
            if highest < target or not left:
                break
            first, end = int(found[0]), int(found[-1]) + 1
            first = max(first, end - left)
            pieces.append(self._piece(node, first, end))
            left -= end - first
        return pieces

    def _from_the_bottom(self, cells: CellMap) -> list[Piece]:
        """What lies between the next free cells, the lowest first, if a prompt would be scattered over them."""
        free = cells.next_free(_PROMPT)
        if len(np.unique(free // _BLOCK)) <= len(free) // _BLOCK + _SCATTER:
            return []
        between = []
        for node in self._ledger.tree.nodes():
            found = np.flatnonzero((own := self._cells_of(node, cells)) > free[0])
            if len(found) and int(own[found].min()) < free[-1]:
                between.append((int(own[found].min()), node, int(found[0]), int(found[-1]) + 1))
        pieces: list[Piece] = []
        left = _MOST_AT_ONCE
        for _, node, first, end in sorted(between, key=lambda each: each[0]):
            n = min(end - first, left)
            if n:
                pieces.append(self._piece(node, first, first + n))
                left -= n
        return pieces

    def _piece(self, node: Node, first: int, end: int) -> Piece:
        return Piece(tuple(self._ledger.tree.holders(node)), node.start + first, node.start + end)

    def _cells_of(self, node: Node, cells: CellMap) -> Cells:
        return cells.cells(next(self._ledger.tree.holders(node)), node.start, node.end)
