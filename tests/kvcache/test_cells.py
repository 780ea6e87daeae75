"""The cell map against the fake backend, whose pool is one object per cell, and the cases that the fake has not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from llamaslot.kvcache.cells import CellMap

from llamaslot.backend.fake import FakeBackend
from llamaslot.base.backend import Run, Status
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
)
from tests.conftest import LONG

N_SEQS = 4
N_CTX = 64
SCRATCH = N_SEQS + 1

seqs = st.integers(0, N_SEQS - 1)


class CellsMachine(RuleBasedStateMachine):
    """Both are told the same; after every rule each cell of the fake is where the map has it."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeBackend(n_slots=N_SEQS, n_ctx=N_CTX, n_ubatch=N_CTX)
        self.map = CellMap(N_CTX, N_SEQS)

    @rule(runs=st.dictionaries(seqs, st.integers(1, 12), min_size=1))
    def decode(self, runs: dict[int, int]) -> None:
        batch = [Run(s, self.fake.seq_len(s), np.full(n, 97, dtype=np.int32), False) for s, n in runs.items()]
        if self.fake.decode(batch).status is Status.OK:
            self.map.decode(runs.items())
        else:
            with pytest.raises(IllegalCallError):
                self.map.decode(runs.items())

    @rule(seq=seqs, share=st.floats(0, 1))
    def remove(self, seq: int, share: float) -> None:
        keep = int(share * self.fake.seq_len(seq))
        self.fake.change(Remove(seq, keep))
        self.map.remove(seq, keep)

    @rule(src=seqs, dst=seqs, share=st.floats(0, 1))
    def copy(self, src: int, dst: int, share: float) -> None:
        start, end = self.fake.seq_len(dst), int(share * self.fake.seq_len(src))
        if src != dst and start < end:
            self.fake.change(Copy(src, dst, start, end))
            self.map.copy(src, dst, start, end)

    @rule(src=seqs, dst=seqs, first=st.floats(0, 1), last=st.floats(0, 1))
    def share(self, src: int, dst: int, first: float, last: float) -> None:
        n = min(self.fake.seq_len(src), self.fake.seq_len(dst))
        start, end = int(first * n), int(last * n)
        if src != dst and start < end:
            self.fake.change(Share(src, dst, start, end))
            self.map.share(src, dst, start, end)

    @rule(places=st.lists(st.tuples(seqs, st.floats(0, 1), st.integers(1, 20)), min_size=1, max_size=3))
    def move(self, places: list[tuple[int, float, int]]) -> None:
        """Parts of sequences with all who see the same cells there."""
        pieces: list[Piece] = []
        seen: set[int] = set()
        for seq, share, n in places:
            start = int(share * self.fake.seq_len(seq))
            cells = self.fake.cells_of(seq)[start : start + n]
            holders = {each for each in range(N_SEQS) if self.fake.cells_of(each)[start : start + n] == cells}
            others = set(range(N_SEQS)) - holders
            if (
                cells
                and seen.isdisjoint(cells)
                and not any(set(cells) & set(self.fake.cells_of(o)) for o in others)
            ):
                pieces.append(Piece(tuple(holders), start, start + len(cells)))
                seen.update(cells)
        self.change(Move(tuple(pieces), SCRATCH))

    @rule(segment=st.integers(0, 3), src=seqs, first=st.floats(0, 1), n=st.integers(1, 30))
    def save(self, segment: int, src: int, first: float, n: int) -> None:
        held = self.fake.seq_len(src)
        start = int(first * held)
        if segment in self.fake.segments:
            self.change(Discard(segment))
        if start < held:
            self.change(Save(segment, src, start, min(start + n, held), SCRATCH))

    @rule(data=st.data(), dst=seqs)
    def load(self, data: st.DataObject, dst: int) -> None:
        n = self.fake.seq_len(dst)
        fitting = [number for number, stored in self.fake.segments.items() if n in stored]
        if fitting:
            segment = data.draw(st.sampled_from(fitting))
            end = data.draw(st.integers(n + 1, self.fake.segments[segment].stop))
            load = Load(segment, dst, n, end, SCRATCH)
            if len(self.fake.segments[segment]) > N_CTX - self.fake.cells_used:
                self.refuses(load)
            else:
                self.change(load)

    def change(self, operation: Operation) -> None:
        self.fake.change(operation)
        self.map.follow(operation)

    def refuses(self, operation: Operation) -> None:
        with pytest.raises(IllegalCallError):
            self.fake.change(operation)
        with pytest.raises(IllegalCallError):
            self.map.follow(operation)

    @invariant()
    def every_cell_is_where_the_fake_has_it(self) -> None:
        pool = self.fake._pools[0]
        used = [i for i, cell in enumerate(pool) if cell.seqs]
        assert self.map.n_used == len(used)
        assert self.map.high_water == max(used, default=-1) + 1
        for seq in range(N_SEQS):
            cells = [i for _, i in sorted((cell.position, i) for i, cell in enumerate(pool) if seq in cell.seqs)]
            assert self.map.cells(seq).tolist() == cells
            assert self.map.held(seq) == range(len(cells))


def test_every_cell_is_where_the_fake_backend_has_it() -> None:
    run_state_machine_as_test(CellsMachine, settings=settings(max_examples=2000 if LONG else 100))


def drawn() -> CellMap:
    """The pool `0 0 0 1 1 1 0 1` of the module's docstring."""
    cells = CellMap(16, 4)
    cells.decode([(0, 3), (1, 3)])
    cells.decode([(0, 1), (1, 1)])
    return cells


def test_new_tokens_get_the_lowest_free_cells_in_batch_order() -> None:
    cells = drawn()
    cells.remove(0, keep=2)
    assert (cells.n_used, cells.high_water) == (6, 8)
    cells.decode([(1, 1), (0, 2)])
    assert cells.cells(0).tolist() == [0, 1, 6, 8]
    assert cells.cells(1).tolist() == [3, 4, 5, 7, 2]
    assert (cells.n_used, cells.high_water) == (9, 9)


def test_the_cells_of_a_range_can_be_asked_for_and_are_a_copy() -> None:
    cells = drawn()
    part = cells.cells(1, 1, 4)
    assert part.dtype == np.int32
    assert part.tolist() == [4, 5, 7]
    part[:] = 0
    assert cells.cells(1, 1, 4).tolist() == [4, 5, 7]
    for start, end in ((0, 5), (3, 2), (-1, 2)):
        with pytest.raises(IllegalCallError):
            cells.cells(1, start, end)


def test_shared_cells_stay_used_until_the_last_holder_drops_them() -> None:
    cells = drawn()
    cells.copy(1, 2, 0, 3)
    cells.remove(1)
    assert (cells.n_used, cells.high_water) == (7, 7)
    cells.remove(2, keep=1)
    assert (cells.n_used, cells.high_water) == (5, 7)
    assert cells.cells(2).tolist() == [3]


def test_sharing_frees_the_own_cells_of_a_range_in_the_middle() -> None:
    cells = drawn()
    cells.share(0, 1, 1, 3)
    assert cells.cells(1).tolist() == [3, 1, 2, 7]
    assert (cells.n_used, cells.high_water) == (6, 8)
    cells.share(0, 1, 0, 3)
    assert cells.cells(1).tolist() == [0, 1, 2, 7]
    assert cells.n_used == 5
    for src, dst in ((0, 2), (2, 0), (0, 0)):
        with pytest.raises(IllegalCallError):
            cells.share(src, dst, 0, 1)


def test_a_segment_is_saved_by_cell_and_loaded_into_the_lowest_free_cells_in_that_order() -> None:
    cells = drawn()
    cells.remove(0, keep=2)
    cells.decode([(1, 1), (0, 2)])
    assert cells.cells(1).tolist() == [3, 4, 5, 7, 2]
    cells.save(0, 1, 0, 5)
    cells.remove(0, keep=1)
    cells.load(0, 3, 0, 5)
    assert cells.cells(3).tolist() == [6, 8, 9, 10, 1]
    cells.remove(1)
    cells.load(0, 1, 0, 5)
    assert cells.cells(1).tolist() == [3, 4, 5, 7, 2]
    assert (cells.n_used, cells.high_water) == (11, 11)


def test_of_a_segment_loaded_in_part_the_other_cells_come_free() -> None:
    cells = drawn()
    cells.remove(0, keep=2)
    cells.decode([(1, 1), (0, 2)])
    cells.save(7, 1, 1, 5)
    cells.remove(1, keep=2)
    cells.load(7, 1, 2, 4)
    assert cells.cells(1).tolist() == [3, 4, 7, 9]
    assert (cells.n_used, cells.high_water) == (8, 10)
    cells.decode([(2, 2)])
    assert cells.cells(2).tolist() == [2, 5]


def test_a_segment_that_does_not_fit_changes_nothing() -> None:
    cells = CellMap(8, 2)
    cells.decode([(0, 5)])
    cells.save(0, 0, 0, 5)
    with pytest.raises(IllegalCallError):
        cells.load(0, 1, 0, 1)
    assert (cells.n_used, cells.high_water) == (5, 5)
    assert cells.held(1) == range(0)


def test_only_what_is_stored_can_be_loaded_and_only_where_it_belongs() -> None:
    cells = drawn()
    cells.save(0, 0, 1, 4)
    cells.copy(0, 2, 0, 2)
    wrong: list[Operation] = [
        Save(0, 1, 0, 1, 3),
        Save(1, 1, 0, 5, 3),
        Load(1, 2, 2, 3, 3),
        Load(0, 2, 2, 5, 3),
        Load(0, 2, 1, 3, 3),
        Load(0, 3, 0, 3, 3),
        Discard(1),
        CopyStream(0, 3, 1),
    ]
    for operation in wrong:
        with pytest.raises(IllegalCallError):
            cells.follow(operation)
    assert (cells.n_used, len(cells.held(2)), len(cells.held(3))) == (8, 2, 0)
    cells.discard(0)
    with pytest.raises(IllegalCallError):
        cells.load(0, 2, 2, 3)


def test_a_piece_moves_down_in_the_order_of_its_cells_and_stays_shared() -> None:
    cells = CellMap(32, 5)
    cells.decode([(4, 6), (0, 2)])
    cells.decode([(0, 4)])
    cells.copy(0, 1, 0, 4)
    cells.decode([(0, 1), (1, 1)])
    cells.remove(4)
    cells.move([Piece((0, 1), 2, 4)])
    assert cells.cells(0).tolist() == [6, 7, 0, 1, 10, 11, 12]
    assert cells.cells(1).tolist() == [6, 7, 0, 1, 13]
    cells.decode([(0, 6)])
    assert cells.cells(0).tolist()[7:] == [2, 3, 4, 5, 8, 9]
    cells.move([Piece((0,), 5, 9)])
    assert cells.cells(0).tolist() == [6, 7, 0, 1, 10, 11, 12, 2, 3, 4, 5, 8, 9]


@pytest.mark.parametrize("piece", [Piece((0,), 0, 2), Piece((0, 2), 0, 2), Piece((), 0, 0)])
def test_cells_that_somebody_else_sees_too_do_not_move(piece: Piece) -> None:
    cells = drawn()
    cells.copy(0, 3, 0, 2)
    with pytest.raises(IllegalCallError):
        cells.move([piece])


@given(start=st.integers(-2, 8), end=st.integers(-2, 8), dst=seqs)
def test_a_copy_that_leaves_a_hole_or_a_double_is_refused(start: int, end: int, dst: int) -> None:
    cells = drawn()
    n = len(cells.held(dst))
    legal = dst != 0 and 0 <= start <= end <= 4 and start in (n, *([] if n else range(5)))
    if legal:
        cells.copy(0, dst, start, end)
        assert len(cells.held(dst)) == n + end - start
    else:
        with pytest.raises(IllegalCallError):
            cells.copy(0, dst, start, end)
        assert cells.n_used == 8


def test_a_sequence_id_that_does_not_exist_is_refused() -> None:
    cells = drawn()
    for seq in (-1, 4):
        with pytest.raises(IllegalCallError):
            cells.decode([(0, 1), (seq, 1)])
        with pytest.raises(IllegalCallError):
            cells.remove(seq)
    assert (cells.n_used, len(cells.held(0))) == (8, 4)
