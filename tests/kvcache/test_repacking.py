"""Idle prefixes move to lower cells when what was below them is gone, and lose nothing by it."""

from __future__ import annotations

import numpy as np
import pytest
from llamaslot.kvcache.ledger import Ledger
from llamaslot.kvcache.repacking import Repacker

from llamaslot.base.kv_ops import Move
from llamaslot.scheduler.request import RequestState
from llamaslot.scheduler.step import StepPlan
from tests.scheduler.test_scheduler import Driver, generated

GAIN = 64


def driver(**shape: int | None) -> Driver:
    return Driver(**{"n_slots": 2, "n_reserved": 6, "n_ctx": 1024, "n_ubatch": 256, "repack_gain": GAIN} | shape)


def moves(packed: Driver) -> list[Move]:
    return [each for plan in packed.plans for each in plan.operations if isinstance(each, Move)]


def n_moved(plan: StepPlan) -> int:
    pieces = [piece for each in plan.operations if isinstance(each, Move) for piece in each.pieces]
    return sum(piece.end - piece.start for piece in pieces)


def fill(packed: Driver) -> None:
    """Two prefixes at the bottom of the pool, and above them one that branches."""
    packed.run("a" * 200)
    packed.run("b" * 200)
    packed.run("c" * 100 + "x" * 20)
    packed.run("c" * 100 + "y" * 20)


def lose_the_oldest(packed: Driver) -> None:
    packed.scheduler.ledger.evict(400)


def test_what_lies_high_moves_down_once_the_mark_is_far_above_what_is_used() -> None:
    packed = driver()
    fill(packed)
    assert packed.scheduler.ledger.cells.high_water == packed.backend.high_water == 540
    lose_the_oldest(packed)
    packed.step()
    while packed.step().operations:
        pass
    assert packed.backend.cells_used == 140
    assert packed.backend.high_water <= 256
    assert packed.scheduler.ledger.tree.n_nodes == 3, "what was shared is shared still"
    for tail in "xy":
        again = packed.run("c" * 100 + tail * 20 + "!", max_tokens=5)
        assert again.n_prompt_computed == 1
        assert generated(again) == generated(driver().run("c" * 100 + tail * 20 + "!", max_tokens=5))


def test_nothing_moves_while_the_mark_is_near() -> None:
    packed = driver()
    fill(packed)
    packed.submit("z" * 100, max_tokens=30)
    packed.step()
    packed.scheduler.ledger.evict(150)
    packed.step()
    packed.step()
    assert not moves(packed)


def fill_with_holes(packed: Driver, n_tokens: int) -> None:
    """Two prefixes of so many tokens, side by side in two of three cells; what was in the third is gone."""
    kept, also, lost = (packed.submit(letter, max_tokens=n_tokens) for letter in "kal")
    packed.finish(kept, also, lost)
    packed.scheduler.ledger.clear(lost.slot_id)


def n_blocks(ledger: Ledger) -> int:
    """Blocks over which the next prompt would be scattered."""
    assert ledger.cells is not None
    return len(np.unique(ledger.cells.next_free(512) // 64))


def test_holes_are_gathered_once_nothing_runs() -> None:
    packed = driver(n_slots=3, n_ctx=4096)
    fill_with_holes(packed, 400)
    assert packed.scheduler.ledger.cells.high_water == packed.backend.high_water == 1200
    ledger = packed.scheduler.ledger
    assert n_moved(packed.step()) == 512
    assert n_blocks(ledger) <= 12
    assert not packed.step().operations, "what is left is not in the next prompt's way"
    assert ledger.n_used == 800
    assert [len(packed.backend.seen(seq)) for seq in range(2)] == [400, 400]


def test_holes_that_one_prompt_does_not_need_stay() -> None:
    packed = driver(n_ctx=8192, n_ubatch=4096)
    packed.run("a" * 100)
    packed.run("b" * 4000)
    packed.run("c" * 3000)
    packed.scheduler.ledger.evict(700)
    packed.step()
    packed.step()
    assert packed.scheduler.ledger.cells.high_water == 7100
    assert not moves(packed)


def test_few_used_cells_among_holes_do_not_matter() -> None:
    packed = driver(n_slots=3, n_ctx=4096)
    fill_with_holes(packed, 60)
    packed.step()
    packed.step()
    assert not moves(packed)


def test_with_holes_gathered_answers_are_the_same() -> None:
    packed = driver(n_slots=3, n_ctx=4096)
    fill_with_holes(packed, 400)
    packed.step()
    packed.step()
    assert moves(packed)
    head = "k" + bytes(generated(packed.admitted[0])).decode()
    again = packed.run(head[:-1] + "!", max_tokens=5)
    assert again.n_prompt_computed == 1
    assert generated(again) == generated(driver().run(head[:-1] + "!", max_tokens=5))


def test_little_is_not_moved_for() -> None:
    packed = driver(repack_gain=600)
    fill(packed)
    lose_the_oldest(packed)
    packed.step()
    packed.step()
    assert not moves(packed)


def test_nothing_moves_where_that_is_slow() -> None:
    packed = driver(n_slots=3, n_ctx=4096, may_move=False)
    fill_with_holes(packed, 400)
    fill(packed)
    lose_the_oldest(packed)
    for _ in range(3):
        packed.step()
    assert not moves(packed)


def test_what_runs_stays_where_it_is() -> None:
    packed = driver()
    fill(packed)
    running = packed.submit("z" * 100, max_tokens=30)
    packed.step()
    lose_the_oldest(packed)
    packed.finish(running)
    assert running.state is RequestState.DONE
    held = {running.slot_id}
    assert all(held.isdisjoint(piece.holders) for move in moves(packed)[:-1] for piece in move.pieces)
    assert generated(running) == generated(driver().run("z" * 100, max_tokens=30))


def test_a_mark_that_cannot_fall_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = driver()
    fill(packed)
    running = packed.submit("z" * 100, max_tokens=-1, stop=("never",))  # which asks for a plan before each step
    packed.step()
    lose_the_oldest(packed)
    looked = 0
    cells_of = Repacker._cells_of

    def watched(repacker: Repacker, *of: object) -> object:
        nonlocal looked
        looked += 1
        return cells_of(repacker, *of)

    monkeypatch.setattr(Repacker, "_cells_of", watched)
    for _ in range(10):
        packed.step()
    assert 0 < looked <= 2 * packed.scheduler.ledger.tree.n_nodes
    assert running.state is RequestState.RUNNING


def test_much_is_moved_bit_by_bit() -> None:
    packed = driver(n_ctx=8192, n_ubatch=4096)
    packed.run("a" * 4000)
    for i in range(4):
        packed.run(chr(98 + i) * 900)
    packed.scheduler.ledger.evict(4000)
    sizes = []
    while (plan := packed.step()).operations:
        sizes.append(n_moved(plan))
    assert sum(sizes) >= 2500
    assert max(sizes) <= 512
    assert packed.backend.high_water <= 1.5 * packed.backend.cells_used
