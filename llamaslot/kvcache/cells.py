"""Where llama.cpp's unified KV pool puts each token: a model of the pool, without the pool.

Attention scans the pool up to the highest used cell, so what idle prefixes cost depends on *where* their cells are,
and llama.cpp does not tell. It can be known all the same, since its placement follows from the calls made: the
owner of a backend repeats here every call that succeeded there, in the same order.

llama.cpp (`llama_kv_cache::find_slot`) searches from a head that it sets behind what it placed and moves back to
the lowest cell that a `seq_rm` freed; so no free cell is ever below the head, its wrap-around and its rule for
resetting the head never apply, and tokens get **the lowest free cells, ascending, in batch order**:

      0 0 0 1 1 1 0 1          remove(0, keep=2), then decode([(1, 1), (0, 2)])
      0 0 . 1 1 1 . 1          n_used 6, high_water 8
      0 0 1 1 1 1 0 1 0        n_used 9, high_water 9; cells(0) is 0 1 6 8, cells(1) is 3 4 5 7 2

This must never decide anything, never call a backend, and never be asked about a partitioned pool or a
sliding-window model, whose cells are reused differently. Tokens do not matter here, only how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from llamaslot.base.kv_ops import (
    Copy,
    CopyStream,
    Discard,
    IllegalCallError,
    Load,
    Move,
    Operation,
    Piece,
    Remove,
    Save,
    Share,
    check_seq,
)

Cells: TypeAlias = npt.NDArray[np.int32]
_Indices: TypeAlias = npt.NDArray[np.intp]

_WINDOW = 1024
"""Cells beyond those wanted that a search for free ones looks at first."""


@dataclass(slots=True)
class _Row:
    """The cells of one sequence: `buffer[p]` for each position p in [start, end)."""

    buffer: _Indices = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    start: int = 0
    end: int = 0

    def append(self, cells: _Indices) -> None:
        end = self.end + len(cells)
        if end > len(self.buffer):
            buffer = np.empty(2 * end, dtype=np.intp)
            buffer[self.start : self.end] = self.buffer[self.start : self.end]
            self.buffer = buffer
        self.buffer[self.end : end] = cells
        self.end = end


class CellMap:
    """A pool of `n_cells` for sequence ids from 0 to `n_seqs - 1`; sequences have no holes, but may start late.

    A call that could not have succeeded raises `IllegalCallError`; but for `move`, it changes nothing then.
    """

    def __init__(self, n_cells: int, n_seqs: int) -> None:
        self.n_cells = n_cells
        self.n_used = 0
        """Cells that some sequence holds."""
        self._high_water = 0
        self._computed: list[tuple[int, int]] = []
        """Runs whose cells are looked for when somebody asks: one search for many steps that only decode."""
        self._rows = [_Row() for _ in range(n_seqs)]
        self._n_holders = np.zeros(n_cells, dtype=np.int16)
        self._lowest_free = 0
        """All cells below this one are used."""
        self._segments: dict[int, tuple[int, Cells]] = {}
        """By segment its first position, and from there the order in which its tokens were saved."""

    # --- reading ---

    @property
    def high_water(self) -> int:
        """The highest used cell + 1; 0 when none is used."""
        self._place()
        return self._high_water

    def held(self, seq: int) -> range:
        """The positions that a sequence holds."""
        row = self._row(seq)
        return range(row.start, row.end)

    def cells(self, seq: int, start: int | None = None, end: int | None = None) -> Cells:
        """The cells of positions `[start, end)` of a sequence, in that order; without bounds, of all it holds."""
        return self._part(seq, start, end).astype(np.int32)

    @property
    def segments(self) -> Iterable[int]:
        """The numbers of the segments whose order of cells is known."""
        return self._segments.keys()

    def next_free(self, n: int) -> Cells:
        """The lowest free cells, at most `n` of them, ascending."""
        self._place()
        return self._find_free(min(n, self.n_cells - self.n_used)).astype(np.int32)

    def n_free_below(self, cell: int) -> int:
        """Free cells with a lower index."""
        self._place()
        return cell - int(np.count_nonzero(self._n_holders[:cell]))

    # --- what the backend does ---

    def follow(self, operation: Operation) -> None:
        """An operation was carried out."""
        match operation:
            case Remove(seq, keep):
                self.remove(seq, keep)
            case Copy(src, dst, start, end):
                self.copy(src, dst, start, end)
            case Share(src, dst, start, end):
                self.share(src, dst, start, end)
            case Move(pieces):
                self.move(pieces)
            case CopyStream():
                raise IllegalCallError("streams are copied in partitioned pools only")
            case Save(segment, src, start, end):
                self.save(segment, src, start, end)
            case Load(segment, dst, start, end):
                self.load(segment, dst, start, end)
            case Discard(segment):
                self.discard(segment)

    def decode(self, runs: Iterable[tuple[int, int]]) -> None:
        """Tokens were computed: for each run of the batch, in its order, the sequence and how many."""
        batch = list(runs)
        for seq, _ in batch:
            check_seq(seq, len(self._rows))
        self._count(sum(n_tokens for _, n_tokens in batch))
        self._computed += batch

    def remove(self, seq: int, keep: int = 0) -> None:
        """A sequence dropped its positions from `keep` on."""
        row = self._row(seq)
        if keep >= row.end:
            return
        first = max(keep, row.start)
        dropped = row.buffer[first : row.end]
        row.end = first
        if first == row.start:
            row.start = row.end = 0
        self._drop(dropped)

    def copy(self, src: int, dst: int, start: int, end: int) -> None:
        """`dst`, which ends at `start` or holds nothing, got positions `[start, end)` of `src` as well."""
        cells, row = self._part(src, start, end), self._row(dst)
        if src == dst or row.end not in (0, start):
            raise IllegalCallError(f"copy of [{start}, {end}) from {src} to {dst} leaves a hole or a double")
        if not row.end and len(cells):
            row.start = row.end = start
        row.append(cells)
        self._n_holders[cells] += 1

    def share(self, src: int, dst: int, start: int, end: int) -> None:
        """`dst`, which holds positions `[start, end)`, dropped its cells of them and got those of `src`."""
        cells, own = self._part(src, start, end), self._part(dst, start, end)
        if src == dst:
            raise IllegalCallError(f"sequence {dst} cannot take its own cells")
        self._n_holders[cells] += 1
        self._drop(own)
        own[:] = cells

    def save(self, segment: int, src: int, start: int, end: int) -> None:
        """`[start, end)` of `src` was saved, in the order of its cells."""
        if segment in self._segments:
            raise IllegalCallError(f"there is a segment {segment}")
        order = np.argsort(self._part(src, start, end), kind="stable")
        self._segments[segment] = start, order.astype(np.int32)

    def cell_order(self, segment: int) -> bytes:
        """The positions of a segment's tokens in the order of their cells, int16; empty where they ascend."""
        order = self._segments[segment][1]
        return b"" if (order[1:] > order[:-1]).all() else order.astype("<i2").tobytes()

    def put(self, segment: int, start: int, n_tokens: int, cell_order: bytes) -> None:
        """A segment was stored by another process, whose `cell_order` this is."""
        if segment in self._segments:
            raise IllegalCallError(f"there is a segment {segment}")
        positions = np.frombuffer(cell_order, "<i2") if cell_order else np.arange(n_tokens)
        self._segments[segment] = start, positions.astype(np.int32)

    def load(self, segment: int, dst: int, start: int, end: int) -> None:
        """A segment was loaded, `dst`, which ends at `start`, got its `[start, end)`, and the others came free."""
        if segment not in self._segments:
            raise IllegalCallError(f"there is no segment {segment}")
        first, order = self._segments[segment]
        row = self._row(dst)
        if row.end != start or not first <= start <= end <= first + len(order):
            raise IllegalCallError(f"load of [{start}, {end}) to {dst}, which ends at {row.end}")
        taken = self._take(len(order))
        by_position = np.empty_like(taken)
        by_position[order] = taken
        kept = slice(start - first, end - first)
        row.append(by_position[kept])
        self._drop(np.delete(by_position, kept))

    def discard(self, segment: int) -> None:
        """A segment was forgotten."""
        if self._segments.pop(segment, None) is None:
            raise IllegalCallError(f"there is no segment {segment}")

    def move(self, pieces: Sequence[Piece]) -> None:
        """Pieces were saved and let go, and then loaded one after another, each in the order of its cells."""
        orders = []
        for piece in pieces:
            cells = [self._part(holder, piece.start, piece.end) for holder in piece.holders]
            if not cells or any((own != cells[0]).any() for own in cells):
                raise IllegalCallError(f"{piece}: the holders see different cells")
            if (self._n_holders[cells[0]] != len(cells)).any():
                raise IllegalCallError(f"{piece}: somebody else sees its cells")
            orders.append(np.argsort(cells[0], kind="stable"))
            self._n_holders[cells[0]] = 1
            self._drop(cells[0])
        for piece, order in zip(pieces, orders, strict=True):
            taken = self._take(len(order))
            self._n_holders[taken] = len(piece.holders)
            for holder in piece.holders:
                self._part(holder, piece.start, piece.end)[order] = taken

    # --- inside ---

    def _place(self) -> None:
        """Find the cells of what was computed."""
        if not self._computed:
            return
        computed, self._computed = self._computed, []
        taken = self._occupy(sum(n_tokens for _, n_tokens in computed))
        at = 0
        for seq, n_tokens in computed:
            self._rows[seq].append(taken[at : at + n_tokens])
            at += n_tokens

    def _row(self, seq: int) -> _Row:
        check_seq(seq, len(self._rows))
        self._place()
        return self._rows[seq]

    def _part(self, seq: int, start: int | None, end: int | None) -> _Indices:
        row = self._row(seq)
        start = row.start if start is None else start
        end = row.end if end is None else end
        if not row.start <= start <= end <= row.end:
            raise IllegalCallError(f"sequence {seq} holds [{row.start}, {row.end}), not [{start}, {end})")
        return row.buffer[start:end]

    def _take(self, n: int) -> _Indices:
        self._count(n)
        return self._occupy(n)

    def _count(self, n: int) -> None:
        if n > self.n_cells - self.n_used:
            raise IllegalCallError(f"{n} tokens do not fit beside {self.n_used} in {self.n_cells} cells")
        self.n_used += n

    def _occupy(self, n: int) -> _Indices:
        if n == 0:
            return np.empty(0, dtype=np.intp)
        taken = self._find_free(n)
        self._n_holders[taken] = 1
        self._lowest_free = int(taken[-1]) + 1
        self._high_water = max(self._high_water, self._lowest_free)
        return taken

    def _find_free(self, n: int) -> _Indices:
        """The lowest free cells, ascending; there are as many."""
        width = n + _WINDOW
        while True:
            window = self._n_holders[self._lowest_free : self._lowest_free + width]
            free = np.flatnonzero(window == 0)
            if len(free) >= n:
                return free[:n] + self._lowest_free
            assert len(window) == width, "free cells were counted that are not there"
            width *= 4

    def _drop(self, cells: _Indices) -> None:
        n_left = self._n_holders[cells] - 1
        self._n_holders[cells] = n_left
        freed = cells[n_left == 0]
        if not len(freed):
            return
        self.n_used -= len(freed)
        self._lowest_free = min(self._lowest_free, int(freed.min()))
        if int(freed.max()) + 1 == self._high_water:
            used = self._n_holders[: self._high_water] != 0
            self._high_water = self._high_water - int(used[::-1].argmax()) if self.n_used else 0
