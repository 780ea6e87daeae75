"""Tokens that two sequences computed side by side, for which a unified pool has two cells and the tree one.

    0 and 1 both computed [c d], 1 later:      settle:

        0:  a b c d                            0:  a b c d
        1:  a b c' d' e                        1:  a b c d e       Share(0, 1, 2, 4)

A double is a range of positions of one sequence. It is settled before the next step, so that a second cell lives as
long as the step that filled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from llamaslot.base.kv_ops import Share
from llamaslot.kvcache.tree import Tree

_Double: TypeAlias = tuple[int, int, int]
"""A sequence and the range of its positions that it has cells of its own for."""


class Doubles:
    """The doubles among what the sequences of a tree hold."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._doubles: list[_Double] = []

    @property
    def n_cells(self) -> int:
        """Cells that they occupy beside those that the tree counts."""
        return sum(end - start for _, start, end in self._doubles)

    def note(self, seq: int, start: int, end: int) -> None:
        """A sequence computed what the tree had already."""
        for i, double in enumerate(self._doubles):
            if double[0] == seq and double[2] == start:
                self._doubles[i] = (seq, double[1], end)
                return
        self._doubles.append((seq, start, end))

    def cut(self, seq: int, keep: int) -> None:
        """A sequence dropped all but its first `keep` tokens."""
        cut = [(s, a, min(b, keep)) if s == seq else (s, a, b) for s, a, b in self._doubles]
        self._doubles = [double for double in cut if double[1] < double[2]]

    def settle(self) -> list[Share]:
        """What lets each sequence take the cells of another one; there are no doubles then.

        A range whose other holders are gone was no double any more: its cells are now the ones that count.
        """
        doubles, self._doubles = self._doubles, []
        return [share for i, double in enumerate(doubles) for share in self._shares(double, doubles[i + 1 :])]

    def check(self) -> None:
        """Prove what must always hold; raises `AssertionError`."""
        for seq, start, end in self._doubles:
            assert 0 <= start < end <= self._tree.length(seq), f"a double of sequence {seq}"

    def _shares(self, double: _Double, later: Sequence[_Double]) -> list[Share]:
        """Take over, piece by piece, what some other sequence has that is no double there itself."""
        seq, start, end = double
        tip = self._tree.tip(seq)
        assert tip is not None
        shares = []
        for node in tip.path():
            low, high = max(start, node.start), min(end, node.end)
            bounds = {low, high, *(n for each in later for n in each[1:] if low < n < high)}
            for piece in pairwise(sorted(bounds)) if low < high else ():
                own = {seq, *(s for s, a, b in later if a < piece[1] and piece[0] < b)}
                source = next((holder for holder in self._tree.holders(node) if holder not in own), None)
                if source is not None:
                    shares.append(Share(source, seq, *piece))
        return shares
