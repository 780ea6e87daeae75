"""Kept duplicates against an oracle that numbers the cell of each token of each sequence."""

from __future__ import annotations

from itertools import count

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamaslot.base.tokens import packed
from llamaslot.kvcache.duplicates import KeptDuplicates
from llamaslot.kvcache.nodes import Node, Segment
from llamaslot.kvcache.radix_tree import RadixTree
from tests.conftest import LONG

SEQS = 6
Path = tuple[int, ...]
PATH = (0,) * 10
SEQ = st.integers(0, SEQS - 1)
N = st.integers(0, 7)
SOME = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def run_of(tokens: Path) -> bytes:
    return packed(np.array(tokens, dtype=np.int32))


def common(a: Path, b: Path) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Pool:
    """A tree, what is counted beside it, and the cells that a unified pool would use."""

    def __init__(self) -> None:
        self.tree = RadixTree()
        self.duplicates = KeptDuplicates(self.tree)
        self.tokens: dict[int, Path] = {}
        self.namespace: dict[int, str] = {}
        self.cells: dict[int, list[int]] = {}
        self.numbers = count()

    @property
    def n_cells(self) -> int:
        return len({cell for cells in self.cells.values() for cell in cells})

    @property
    def n_counted(self) -> int:
        return self.tree.n_tokens + self.duplicates.n_cells

    def end_of(self, seq: int) -> Node:
        node = self.tree.end_node(seq)
        assert node is not None
        return node

    def hold(self, seq: int, namespace: str = "") -> None:
        """Use a sequence, with an empty path."""
        self.tree.hold(seq, namespace)
        self.tokens[seq], self.namespace[seq], self.cells[seq] = (), namespace, []

    def compute(self, seq: int, tokens: Path = PATH) -> None:
        """Append tokens in new cells."""
        start = len(self.tokens[seq])
        n_held = self.tree.extend(seq, run_of(tokens))
        if n_held:
            self.duplicates.add(seq, start, start + n_held)
        self.tokens[seq] += tokens
        self.cells[seq] += [next(self.numbers) for _ in tokens]

    def copy(self, src: int, dst: int, end: int, *, is_told_first: bool = False) -> None:
        """Append tokens that another sequence holds, in the same cells."""
        start = len(self.tokens[dst])
        if is_told_first:
            self.duplicates.copy(src, dst, start, end)
        self.tree.extend(dst, run_of(self.tokens[src][start:end]))
        if not is_told_first:
            self.duplicates.copy(src, dst, start, end)
        self.tokens[dst] = self.tokens[src][:end]
        self.cells[dst] += self.cells[src][start:end]

    def move(self, src: int, dst: int) -> None:
        """Copy all to a sequence that is not in use."""
        end = len(self.tokens[src])
        self.tree.hold(dst, self.namespace[src], self.end_of(src), end)
        self.duplicates.copy(src, dst, 0, end)
        self.tokens[dst], self.namespace[dst] = self.tokens[src], self.namespace[src]
        self.cells[dst] = list(self.cells[src])

    def truncate(self, seq: int, keep: int = 0) -> None:
        """Drop all but the first tokens."""
        if keep:
            self.tree.truncate(seq, keep)
            self.tokens[seq], self.cells[seq] = self.tokens[seq][:keep], self.cells[seq][:keep]
        else:
            self.tree.release(seq)
            del self.tokens[seq], self.cells[seq], self.namespace[seq]
        self.duplicates.truncate(seq, keep)

    def resolve(self) -> int:
        """Count again; returns the cells of duplicates."""
        assert self.duplicates.resolve() == []
        self.check()
        assert self.n_counted == self.n_cells
        return self.duplicates.n_cells

    def check(self) -> None:
        self.tree.check()
        self.duplicates.check()
        assert self.n_counted == self.n_cells


class KeptDuplicatesMachine(RuleBasedStateMachine):
    """Sequences compute, copy and drop tokens, so that their paths meet, branch and meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.segments: list[Segment] = []

    def pick(self, index: int) -> int:
        """A sequence that is in use."""
        seqs = sorted(self.pool.tokens)
        return seqs[index % len(seqs)]

    def begin(self, dst: int, src: int, end: int) -> int:
        """Let one sequence hold only what it has of the first tokens of another; returns how many these are."""
        pool = self.pool
        path, namespace = pool.tokens[src][:end], pool.namespace[src]
        if dst in pool.tokens:
            n = common(path, pool.tokens[dst]) if namespace == pool.namespace[dst] else 0
            if n < len(pool.tokens[dst]):
                pool.truncate(dst, n)
        if dst not in pool.tokens:
            pool.hold(dst, namespace)
        return len(pool.tokens[dst])

    @initialize(paths=st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=8), min_size=2, max_size=4))
    def start_some(self, paths: list[list[int]]) -> None:
        for seq, path in enumerate(paths):
            self.pool.hold(seq)
            self.pool.compute(seq, tuple(path))

    @rule(seq=SEQ, namespace=st.sampled_from(["", "", "", "salt"]), tokens=SOME)
    def compute(self, seq: int, namespace: str, tokens: Path) -> None:
        if seq not in self.pool.tokens:
            self.pool.hold(seq, namespace)
        self.pool.compute(seq, tokens)

    @rule(src=SEQ, dst=SEQ, n=N)
    def compute_what_another_holds(self, src: int, dst: int, n: int) -> None:
        src = self.pick(src)
        end = 1 + n % len(self.pool.tokens[src])
        start = self.begin(dst, src, end) if src != dst else end
        if start < end:
            self.pool.compute(dst, self.pool.tokens[src][start:end])

    @rule(src=SEQ, dst=SEQ, n=N, is_told_first=st.booleans())
    def copy(self, src: int, dst: int, n: int, is_told_first: bool) -> None:
        """As a request starts: in an unused slot, or in one that holds a part of the prefix."""
        src = self.pick(src)
        end = 1 + n % len(self.pool.tokens[src])
        start = self.begin(dst, src, end) if src != dst else end
        if start < end:
            self.pool.copy(src, dst, end, is_told_first=is_told_first)

    @rule(src=SEQ, dst=SEQ)
    def move(self, src: int, dst: int) -> None:
        """As the path of a slot goes to a spare id."""
        src = self.pick(src)
        if dst not in self.pool.tokens:
            self.pool.move(src, dst)

    @rule(seq=SEQ, n=N)
    def truncate(self, seq: int, n: int) -> None:
        seq = self.pick(seq)
        self.pool.truncate(seq, max(1, len(self.pool.tokens[seq]) - n))

    @rule(seq=SEQ)
    def release(self, seq: int) -> None:
        if seq in self.pool.tokens and len(self.pool.tokens) > 1:
            self.pool.truncate(seq)

    @rule(seq=SEQ)
    def offload(self, seq: int) -> None:
        """Cover the end of a path, so that it stays in the tree once it is released."""
        end = self.pool.end_of(self.pick(seq))
        if end.segment is None:
            self.segments.append(Segment(len(self.segments), end.start, end.end, 1))
            self.pool.tree.attach(self.segments[-1], end)

    @rule(index=N)
    def drop_segment(self, index: int) -> None:
        if self.segments:
            self.pool.tree.detach(self.segments.pop(index % len(self.segments)))

    @rule()
    def resolve(self) -> None:
        self.pool.resolve()

    @invariant()
    def every_cell_is_counted_once(self) -> None:
        self.pool.check()

    def teardown(self) -> None:
        self.pool.resolve()
        for seq in list(self.pool.tokens):
            self.pool.truncate(seq)
            self.pool.resolve()
        assert self.pool.n_counted == 0


KeptDuplicatesMachine.TestCase.settings = settings(
    max_examples=2000 if LONG else 100, stateful_step_count=50, deadline=None
)
TestKeptDuplicates = KeptDuplicatesMachine.TestCase


def computed_by(*seqs: int) -> Pool:
    """Ten tokens that each of these computed."""
    pool = Pool()
    for seq in seqs:
        pool.hold(seq)
        pool.compute(seq)
    return pool


def copied(pool: Pool, src: int, dst: int, end: int = len(PATH)) -> None:
    pool.hold(dst)
    pool.copy(src, dst, end)


def test_three_sequences_that_computed_the_same_have_two_duplicates_of_each_token() -> None:
    pool = computed_by(0, 1, 2)
    assert pool.resolve() == 20
    pool.truncate(2, 4)
    assert pool.resolve() == 14
    pool.truncate(0)
    assert pool.duplicates.n_cells == 4
    assert pool.resolve() == 4
    pool.truncate(1)
    assert pool.resolve() == 0


def test_copies_of_a_duplicate_take_no_cells_and_keep_its_cells() -> None:
    pool = computed_by(0, 1)
    copied(pool, 1, 2, 6)
    copied(pool, 2, 3, 5)
    assert pool.resolve() == 10
    pool.truncate(1)
    assert pool.resolve() == 6
    pool.truncate(2)
    assert pool.resolve() == 5
    pool.truncate(0)
    assert pool.resolve() == 0
    assert pool.n_counted == 5


def test_copies_of_what_the_tree_counts_are_in_no_group() -> None:
    pool = computed_by(0, 1)
    copied(pool, 0, 2)
    pool.truncate(0)
    assert pool.resolve() == 10
    pool.truncate(2)
    assert pool.resolve() == 0


def test_a_copy_after_an_own_beginning_joins_for_the_rest() -> None:
    """2 computed [0, 4) and copied [4, 8) from 1."""
    pool = computed_by(0, 1)
    pool.hold(2)
    pool.compute(2, PATH[:4])
    pool.copy(1, 2, 8)
    assert pool.resolve() == 14
    pool.truncate(1, 2)
    assert pool.resolve() == 2 + 8
    pool.truncate(0)
    assert pool.resolve() == 2


@pytest.mark.parametrize(("long", "short"), [(1, 2), (2, 1)])
def test_of_groups_that_overlap_one_is_counted_by_the_tree_where_no_other_holder_is_left(
    long: int, short: int
) -> None:
    """0 computed all, one copied [0, 6) of it, another one [0, 3); then each computed the rest."""
    pool = computed_by(0)
    for seq, end in ((long, 6), (short, 3)):
        copied(pool, 0, seq, end)
        pool.compute(seq, PATH[end:])
    assert pool.resolve() == 4 + 7
    pool.truncate(0)
    assert pool.resolve() == 3 + 4, "in [3, 6) the copy from 0 is left beside it, in [6, 10) one of both is counted"
    pool.truncate(long, 7)
    assert pool.resolve() == 4


@pytest.mark.parametrize("wrong", [(0, 2, 11), (1, 3, 4), (7, 0, 2)])
def test_ranges_that_cannot_be_are_found(wrong: tuple[int, int, int]) -> None:
    """A range beyond the end of a path, one that was added already, and one of an unused sequence."""
    pool = computed_by(0, 1)
    pool.duplicates.add(*wrong)
    with pytest.raises(AssertionError):
        pool.duplicates.check()


def test_a_group_of_all_holders_is_found() -> None:
    """The tree counts its cells, so that it is no duplicate."""
    pool = computed_by(0)
    pool.duplicates.add(0, 2, 3)
    with pytest.raises(AssertionError, match="whose cells the tree counts"):
        pool.duplicates.check()
