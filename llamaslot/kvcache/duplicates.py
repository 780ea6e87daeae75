"""Duplicate cells: tokens that two sequences computed side by side, for which a unified pool has two cells.

    0 and 1 both computed [c d], 1 later:      deduplicate:

        0:  a b c d                            0:  a b c d
        1:  a b c' d' e                        1:  a b c d e       Share(0, 1, 2, 4)

They are removed before the next step, so a duplicate lives as long as the step that filled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from llamaslot.base.kv_ops import Share
from llamaslot.kvcache.radix_tree import RadixTree

_Range: TypeAlias = tuple[int, int, int]
"""A sequence and the range of positions for which it has cells of its own."""


class DuplicateCells:
    """Duplicates among what the sequences of a tree hold."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._ranges: list[_Range] = []

    @property
    def n_cells(self) -> int:
        """Cells in addition to those that the tree counts."""
        return sum(end - start for _, start, end in self._ranges)

    def add(self, seq: int, start: int, end: int) -> None:
        """A sequence computed what others hold already."""
        for i, (own, first, last) in enumerate(self._ranges):
            if own == seq and last == start:
                self._ranges[i] = (seq, first, end)
                return
        self._ranges.append((seq, start, end))

    def truncate(self, seq: int, keep: int) -> None:
        """A sequence dropped all but its first `keep` tokens."""
        cut = [(s, a, min(b, keep)) if s == seq else (s, a, b) for s, a, b in self._ranges]
        self._ranges = [(s, a, b) for s, a, b in cut if a < b]

    def resolve(self) -> list[Share]:
        """Operations by which each sequence takes the cells of another one; there are no duplicates then.

        A range whose other holders are gone is no duplicate any more: its cells are now those that the tree counts.
        """
        ranges, self._ranges = self._ranges, []
        return [share for i, each in enumerate(ranges) for share in self._shares(each, ranges[i + 1 :])]

    def check(self) -> None:
        """Verify the ranges; raises `AssertionError`."""
        for seq, start, end in self._ranges:
            assert 0 <= start < end <= self._tree.length(seq), f"a duplicate of sequence {seq}"

    def _shares(self, duplicate: _Range, later: Sequence[_Range]) -> list[Share]:
        """Take, range by range, the cells of some other sequence that are no duplicates themselves."""
        seq, start, end = duplicate
        end_node = self._tree.end_node(seq)
        assert end_node is not None
        shares = []
        for node in end_node.path_to_root():
            low, high = max(start, node.start), min(end, node.end)
            bounds = {low, high, *(n for each in later for n in each[1:] if low < n < high)}
            for part in pairwise(sorted(bounds)) if low < high else ():
                own = {seq, *(s for s, a, b in later if a < part[1] and part[0] < b)}
                source = next((holder for holder in node.holders() if holder not in own), None)
                if source is not None:
                    shares.append(Share(source, seq, *part))
        return shares
