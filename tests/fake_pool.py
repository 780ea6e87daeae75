"""Cells of the fake backend's pool: a new token takes the lowest free one, and sequences share cells.

Each sequence has an index of its cells beside the set of sequences in each cell, since tests look at every sequence
after every step. `check` compares the two.
"""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Cell:
    """One cell of the pool; free if no sequence uses it."""

    number: int
    token: int = -1
    position: int = -1
    seqs: set[int] = field(default_factory=set)
    is_bad: bool = False
    """True if whatever attends to it has no valid logits."""


class CellPool:
    """Cells, and the sequences that use them."""

    def __init__(self, size: int) -> None:
        self.cells = [Cell(number) for number in range(size)]
        self._free = list(range(size))
        """Numbers of free cells, as a heap."""
        self._held: defaultdict[int, dict[int, Cell]] = defaultdict(dict)
        """Cells of each sequence, by number."""
        self._seen: dict[int, list[tuple[int, int]]] = {}
        """What `seen` returned, until the sequence changes."""

    @property
    def n_free(self) -> int:
        """Number of cells that no sequence uses."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Number of cells that any sequence uses."""
        return len(self.cells) - len(self._free)

    def seen(self, seq: int) -> list[tuple[int, int]]:
        """Return the (position, token) pairs of a sequence, in order."""
        if seq not in self._seen:
            self._seen[seq] = sorted((cell.position, cell.token) for cell in self._held[seq].values())
        return self._seen[seq]

    def of(self, seq: int, start: int, end: int) -> list[Cell]:
        """Return the cells of a sequence at these positions, in the order of the pool."""
        cells = [cell for cell in self._held[seq].values() if start <= cell.position < end]
        return sorted(cells, key=lambda cell: cell.number)

    def is_bad(self, seq: int, poison: set[int]) -> bool:
        """Return true if a sequence has a bad cell, or a token of `poison`."""
        return any(cell.is_bad or cell.token in poison for cell in self._held[seq].values())

    def place(self, seq: int, saved: Sequence[tuple[int, int]], *, is_bad: bool) -> None:
        """Place tokens with their positions in the lowest free cells; there must be enough."""
        for token, position in saved:
            self._fill(self.cells[heapq.heappop(self._free)], seq, token, position, is_bad=is_bad)

    def copy(self, src: int, dst: int, start: int, end: int) -> None:
        """Make a sequence use another one's cells at these positions."""
        for cell in self.of(src, start, end):
            cell.seqs.add(dst)
            self._held[dst][cell.number] = cell
        self._seen.pop(dst, None)

    def remove(self, seq: int, start: int, end: int) -> None:
        """Take the cells at these positions from a sequence; those that no other one uses are free."""
        for cell in self.of(seq, start, end):
            cell.seqs.remove(seq)
            del self._held[seq][cell.number]
            if not cell.seqs:
                heapq.heappush(self._free, cell.number)
        self._seen.pop(seq, None)

    def shift(self, seq: int, start: int, end: int, moved: Callable[[int], int], *, copies: bool) -> None:
        """Remove cells at these positions, and move those after them, which become `moved` tokens.

        With `copies` all that is left gets cells of its own first; raises `MemoryError` if there are too few, and
        the sequence is then empty.
        """
        self.remove(seq, start, end)
        if copies:
            left = [(cell.token, cell.position, cell.is_bad) for cell in self.of(seq, 0, sys.maxsize)]
            self.remove(seq, 0, sys.maxsize)
            if self.n_free < len(left):
                raise MemoryError
            for token, position, is_bad in left:
                self.place(seq, [(token, position)], is_bad=is_bad)
        for cell in self.of(seq, end, sys.maxsize):
            # llama.cpp would move it in all sequences.
            assert cell.seqs == {seq}, f"sequences {cell.seqs} share a cell that is moved"
            cell.token, cell.position = moved(cell.token), cell.position - (end - start)
        self._seen.pop(seq, None)

    def copy_from(self, other: CellPool, src: int, dst: int, start: int, end: int) -> None:
        """Give a sequence cells of its own with what one of another pool has at these positions."""
        for cell in other.of(src, start, end):
            free = self.cells[heapq.heappop(self._free)]
            self._fill(free, dst, cell.token, cell.position, is_bad=cell.is_bad)

    def check(self) -> None:
        """Verify that the indices are what the cells say; raises `AssertionError`."""
        assert sorted(self._free) == [cell.number for cell in self.cells if not cell.seqs]
        for seq in {*self._held, *(seq for cell in self.cells for seq in cell.seqs)}:
            cells = [cell for cell in self.cells if seq in cell.seqs]
            assert {cell.number: cell for cell in cells} == self._held[seq]
            assert self.seen(seq) == sorted((cell.position, cell.token) for cell in cells)

    def _fill(self, cell: Cell, seq: int, token: int, position: int, *, is_bad: bool) -> None:
        cell.token, cell.position, cell.seqs, cell.is_bad = token, position, {seq}, is_bad
        self._held[seq][cell.number] = cell
        self._seen.pop(seq, None)
