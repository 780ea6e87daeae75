"""Duplicate cells: tokens that two sequences computed side by side, for which a unified pool has two cells.

    0 and 1 both computed [c d], 1 later:      deduplicate:

        0:  a b c d                            0:  a b c d
        1:  a b c' d' e                        1:  a b c d e       Share(0, 1, 2, 4)

They are removed before the next step, so a duplicate lives only as long as the step that filled it
(`DuplicateCells`).

In a partitioned pool each sequence has cells of its own (`OwnCells`). In models with a partial state a sequence
cannot take over the cells of another one, so duplicates stay until their holders drop them, and are counted
(`KeptDuplicates`):

    1 is copied to 2:     2:  a b c' d'    1 and 2 share c' d': 2 cells beside those that the tree counts
    0 is released:                         all holders of [c d] share c' d', so these are what the tree counts
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from llamaslot.base.kv_ops import Share
from llamaslot.kvcache.nodes import Node
from llamaslot.kvcache.radix_tree import RadixTree

_Range: TypeAlias = tuple[int, int, int]
"""A sequence and the range of positions for which it has cells of its own."""
_Stretch: TypeAlias = tuple[set[int], int, int]
"""The holders of a range of positions, all with the same holders, and the range."""


class Duplicates:
    """Count of duplicate cells among the sequences of a tree; this base class counts none.

    Must be told of every change of a sequence, after the change of the tree (`copy` also before it).
    """

    @property
    def n_cells(self) -> int:
        """Cells in addition to those that the tree counts: an upper bound, exact after `resolve`.

        Valid only once all changes were reported.
        """
        return 0

    def add(self, seq: int, start: int, end: int) -> None:
        """Record that a sequence computed, or loaded into its own cells, tokens that others hold already."""

    def copy(self, src: int, dst: int, start: int, end: int) -> None:
        """Record that `dst`, which held `start` tokens, now shares the cells of `src` in `[start, end)`."""

    def truncate(self, seq: int, keep: int) -> None:
        """Record that a sequence dropped all but its first `keep` tokens."""

    def idle_holders(self) -> set[int]:
        """Return the idle sequences that have duplicate cells which no pinned sequence uses."""
        return set()

    def n_idle_cells(self) -> int:
        """Return the number of those cells."""
        return 0

    def resolve(self) -> list[Share]:
        """Return operations that make sequences share cells, where the model allows it; updates the count."""
        return []

    def check(self) -> None:
        """Verify the ranges; raises `AssertionError`."""


class DuplicateCells(Duplicates):
    """Duplicates that are removed before the next step, so none is idle."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._ranges: list[_Range] = []

    @property
    def n_cells(self) -> int:
        """Cells in addition to those that the tree counts."""
        return sum(end - start for _, start, end in self._ranges)

    def add(self, seq: int, start: int, end: int) -> None:
        """Record that a sequence computed tokens that others hold already."""
        for i, (own, first, last) in enumerate(self._ranges):
            if own == seq and last == start:
                self._ranges[i] = (seq, first, end)
                return
        self._ranges.append((seq, start, end))

    def copy(self, src: int, dst: int, start: int, end: int) -> None:
        """Record that `dst` shares the cells of `src`: duplicates among them are to be replaced in both."""
        for seq, first, last in list(self._ranges):
            if seq == src and first < end and start < last:
                self.add(dst, max(first, start), min(last, end))

    def truncate(self, seq: int, keep: int) -> None:
        """Record that a sequence dropped all but its first `keep` tokens."""
        cut = [(s, a, min(b, keep)) if s == seq else (s, a, b) for s, a, b in self._ranges]
        self._ranges = [(s, a, b) for s, a, b in cut if a < b]

    def resolve(self) -> list[Share]:
        """Return operations that replace every duplicate by the cells of another holder.

        A range that no other sequence holds any more is no duplicate: its cells are the ones that the tree counts.
        """
        ranges, self._ranges = self._ranges, []
        return [share for i, each in enumerate(ranges) for share in self._shares(each, ranges[i + 1 :])]

    def check(self) -> None:
        """Verify the ranges; raises `AssertionError`."""
        for seq, start, end in self._ranges:
            assert 0 <= start < end <= self._tree.length(seq), f"a duplicate of sequence {seq}"

    def _shares(self, duplicate: _Range, later: Sequence[_Range]) -> list[Share]:
        """Return operations that replace a duplicate by cells which are not in `later` duplicates themselves."""
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


class OwnCells(Duplicates):
    """Duplicates in a partitioned pool, where each sequence has its own cell for each of its tokens.

    They follow from the lengths of the sequences: nothing is recorded, and nothing can be removed. Clearing others
    does not help a request, which has the cells of its own part, so there are no `idle_holders`.
    """

    def __init__(self, tree: RadixTree, n_seqs: int) -> None:
        self._tree = tree
        self._seqs = range(n_seqs)

    @property
    def n_cells(self) -> int:
        """Cells in addition to those that the tree counts."""
        return sum(map(self._tree.length, self._seqs)) - self._tree.n_tokens

    def n_idle_cells(self) -> int:
        """Return the cells of idle sequences in addition to those that the tree counts as idle."""
        idle = [seq for seq in self._seqs if not self._tree.is_pinned(seq)]
        return sum(map(self._tree.length, idle)) - self._tree.n_idle_tokens


class _Group(NamedTuple):
    """Sequences that share cells for positions `[start, end)` other than those that the tree counts."""

    members: frozenset[int]
    start: int
    end: int


class KeptDuplicates(Duplicates):
    """Duplicates that stay until their holders drop them.

    At each position a sequence is in at most one group. Holders in no group share the cells that the tree counts.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._groups: list[_Group] = []
        """In the order of `_merged`."""
        self._is_exact = True
        """False if a group may have become the one that the tree counts."""

    @property
    def n_cells(self) -> int:
        """Cells in addition to those that the tree counts."""
        self.resolve()
        return sum(group.end - group.start for group in self._groups)

    def add(self, seq: int, start: int, end: int) -> None:
        """Record that a sequence computed, or loaded into its own cells, tokens that others hold already."""
        self._groups = _merged([*self._groups, _Group(frozenset({seq}), start, end)])

    def copy(self, src: int, dst: int, start: int, end: int) -> None:
        """Record that `dst`, which held `start` tokens, joins the groups of `src` in `[start, end)`."""
        self._change(src, start, end, lambda members: members | {dst})

    def truncate(self, seq: int, keep: int) -> None:
        """Remove a sequence from the groups after its first `keep` tokens, and groups that are empty then."""
        self._change(seq, keep, sys.maxsize, lambda members: members - {seq})
        # If it was the last holder outside of all groups, the tree now counts the cells of a group.
        self._is_exact = False

    def idle_holders(self) -> set[int]:
        """Return the idle sequences that have duplicate cells which no pinned sequence uses."""
        return set().union(*(seqs for seqs, _ in self._idle_parts()))

    def n_idle_cells(self) -> int:
        """Return the number of those cells."""
        return sum(n for _, n in self._idle_parts())

    def resolve(self) -> list[Share]:
        """Update the count; returns no operation.

        Where all holders of a token are in groups, the tree counts the cells of one group, which is then removed.
        """
        if not self._is_exact:
            for members, start, end in self._counted():
                self._change(min(members), start, end, lambda _members: frozenset())
            self._is_exact = True
        return []

    def check(self) -> None:
        """Verify the groups; raises `AssertionError`."""
        for i, (members, start, end) in enumerate(self._groups):
            assert members, "a group without members"
            shortest = min(map(self._tree.length, members))
            assert 0 <= start < end <= shortest, f"a duplicate of sequences {sorted(members)}"
            nodes = {next(node for node in self._path(seq) if node.start < end) for seq in members}
            assert len(nodes) == 1, f"sequences {sorted(members)} hold different tokens"
            for others, first, last in self._groups[:i]:
                is_apart = last <= start or end <= first
                assert is_apart or members.isdisjoint(others), "a sequence in two groups at one position"
        assert self._groups == _merged(self._groups)
        assert not (self._is_exact and self._counted()), "a group whose cells the tree counts"

    def _change(self, seq: int, start: int, end: int, change: Callable[[frozenset[int]], frozenset[int]]) -> None:
        """Apply `change` to the members of a sequence's groups in `[start, end)`."""
        groups = []
        for group in self._groups:
            low, high = max(start, group.start), min(end, group.end)
            if seq in group.members and low < high:
                groups.append(group._replace(end=low))
                groups.append(_Group(change(group.members), low, high))
                groups.append(group._replace(start=high))
            else:
                groups.append(group)
        if len(groups) > len(self._groups):
            self._groups = _merged(groups)

    def _counted(self) -> list[_Group]:
        """Parts of groups whose cells the tree counts, because all holders are in groups: one group per token."""
        counted = []
        for holders, first, last in self._stretches():
            here = [g for g in self._groups if g.start < last and first < g.end and g.members <= holders]
            if sum(len(group.members) for group in here) < len(holders):
                continue
            # All tokens between two bounds have the same holders in the same groups.
            bounds = {min(max(at, first), last) for group in here for at in group[1:]}
            for start, end in pairwise(sorted(bounds)):
                covering = [group.members for group in here if group.start <= start and end <= group.end]
                if sum(map(len, covering)) == len(holders):
                    counted.append(_Group(covering[0], start, end))
        return _merged(counted)

    def _idle_parts(self) -> Iterator[tuple[Set[int], int]]:
        """Yield idle sequences that share duplicate cells which no pinned sequence uses, and the number of cells.

        Either they form a group, or they hold the cells that the tree counts, and the pinned holders are in groups.
        """
        for holders, first, last in self._stretches():
            here = [g for g in self._groups if g.start < last and first < g.end and g.members <= holders]
            bounds = {min(max(at, first), last) for group in here for at in group[1:]}
            has_pinned = any(map(self._tree.is_pinned, holders))
            for start, end in pairwise(sorted(bounds)):
                covering: list[Set[int]] = [g.members for g in here if g.start <= start and end <= g.end]
                if covering and has_pinned:
                    covering.append(holders.difference(*covering))
                for sharing in covering:
                    if sharing and not any(map(self._tree.is_pinned, sharing)):
                        yield sharing, end - start

    def _stretches(self) -> list[_Stretch]:
        """Ranges of positions with the same holders on the paths that have groups.

        Nodes are combined, because a path can have hundreds of them, most with the same holders.
        """
        nodes: set[Node] = set()
        for members, start, end in self._groups:
            for node in self._path(min(members)):
                if node.end <= start:
                    break
                if node.start < end:
                    nodes.add(node)
        stretches: dict[Node, _Stretch] = {}
        for node in sorted(nodes, key=lambda node: node.start, reverse=True):
            below = [child for child in node.children.values() if child.is_resident]
            if len(below) == 1 and not node.end_of and below[0] in stretches:
                holders, _, end = stretches.pop(below[0])
                stretches[node] = holders, node.start, end
            else:
                held = (stretches[child][0] if child in stretches else child.holders() for child in below)
                stretches[node] = node.end_of.union(*held), node.start, node.end
        return list(stretches.values())

    def _path(self, seq: int) -> Iterator[Node]:
        end_node = self._tree.end_node(seq)
        assert end_node is not None, f"sequence {seq} is not in use"
        return end_node.path_to_root()


def _merged(groups: Iterable[_Group]) -> list[_Group]:
    """Sort groups, remove empty ones, and merge adjacent ones that have the same members."""
    merged: list[_Group] = []
    some = [group for group in groups if group.members and group.start < group.end]
    # Groups with the same first member are at different positions.
    for group in sorted(some, key=lambda group: (min(group.members), group.start)):
        if merged and merged[-1].members == group.members and merged[-1].end == group.start:
            merged[-1] = merged[-1]._replace(end=group.end)
        else:
            merged.append(group)
    return merged
