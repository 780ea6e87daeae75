"""Steps are padded where that makes them faster, and nobody can tell but by the clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llamaslot.base.model import TILE, BatchCost
from llamaslot.core.backend import Decoded, Remove, Run, Status
from llamaslot.core.padding import Padding
from llamaslot.core.request import RequestState
from llamaslot.core.scheduler import Scheduler
from llamaslot.core.step import apply
from tests.core.test_scheduler import Driver

COST = BatchCost(row_us=800.0, row_cell_us=4.0, tile_us=18_000.0, tile_cell_us=16.0)
"""About what a model of 60M parameters takes on two cores: at 4,096 cells 16 tokens take 275 ms, 64 take 84."""
SCRATCH = 9


def padding(cost: BatchCost | None = COST, n_ubatch: int = 512, scratch: int | None = SCRATCH) -> Padding:
    return Padding(cost, scratch, n_ubatch)


def run(seq: int, start: int, n: int) -> Run:
    return Run(seq, start, np.full(n, 7, dtype=np.int32), output=True)


def padded_driver(**shape: float) -> Driver:
    """Every step of fewer than `TILE` tokens is padded."""
    driver = Driver(**{"n_slots": 2, "n_ctx": 512, "n_ubatch": 128, "n_reserved": 2} | shape)
    cost = BatchCost(row_us=1.0, row_cell_us=0.0, tile_us=0.0, tile_cell_us=0.0)
    driver.scheduler = Scheduler(replace(driver.scheduler.settings, batch_cost=cost))
    return driver


def test_a_few_tokens_behind_a_long_prefix_are_filled_up_to_a_tile() -> None:
    added = padding().run([run(0, 4096, 16)], n_used=4096)
    assert added is not None
    assert (added.seq, added.start, len(added.tokens), added.output) == (SCRATCH, 0, TILE - 16, False)


@pytest.mark.parametrize(
    ("runs", "n_used"),
    [
        ([run(0, 64, 16)], 64),
        ([run(0, 4096, 1)], 4096),
        ([run(seq, 1024, 1) for seq in range(8)], 8 * 1024),
        ([run(0, 4096, TILE)], 4096),
        ([run(0, 4096, 16), run(1, 0, TILE)], 4096),
        ([], 0),
    ],
    ids=["short prefix", "one token", "streams with nothing in common", "a tile", "more than a tile", "nothing"],
)
def test_other_steps_are_not(runs: list[Run], n_used: int) -> None:
    assert padding().run(runs, n_used) is None


def test_streams_on_one_prefix_are_padded_as_one_tile_sees_it() -> None:
    streams = [run(seq, 4096, 1) for seq in range(8)]
    assert padding().run(streams, n_used=4096) is not None
    assert padding().run(streams, n_used=8 * 4096) is None


@pytest.mark.parametrize("given", [{"cost": None}, {"n_ubatch": TILE - 1}, {"scratch": None}])
def test_without_a_cost_a_scratch_sequence_or_room_for_a_tile_nothing_is_padded(given: dict[str, None]) -> None:
    assert padding(**given).run([run(0, 4096, 32)], n_used=4096) is None


def test_padding_is_gone_by_the_end_of_the_step_and_counts_for_nobody() -> None:
    driver = padded_driver()
    request = driver.submit("x" * 40, max_tokens=3)
    plan = driver.scheduler.plan(0.0)
    assert plan.padding is not None
    result = apply(plan, driver.backend, lambda: 0.0)
    assert result.decoded == Decoded(Status.OK, {request.slot_id: (0, 40)})
    assert driver.backend.cells_used == 40
    driver.scheduler.commit(plan, result, 0.0)
    assert driver.scheduler.ledger.n_used == 40
    assert driver.scheduler.ledger.clock < 2 * 40
    driver.finish(request)
    assert request.n_prompt_computed == 40


def test_padding_of_a_failed_step_is_removed_too() -> None:
    driver = padded_driver()
    driver.submit("x" * 40)
    driver.backend.failures.append((Status.FATAL, 2))
    plan = driver.step()
    assert plan.padding is not None
    assert driver.backend.seq_len(plan.padding.seq) == 0


def test_steps_ahead_are_padded_and_leave_room_for_it() -> None:
    driver = padded_driver(n_ctx=40 + 63 + 5)
    driver.submit("x" * 40, max_tokens=20)
    driver.step()
    driver.step()
    plan = driver.scheduler.plan(0.0)
    assert plan.padding is not None
    n_free = driver.scheduler.ledger.n_free
    assert plan.n_ahead == n_free - len(plan.work) - len(plan.padding.tokens)


def test_idle_cells_make_room_for_padding_but_running_ones_never_do() -> None:
    driver = padded_driver(n_ctx=120, n_slots=2)
    old = driver.submit("o" * 60)
    driver.finish(old)
    request = driver.submit("x" * 40, max_tokens=80)
    plan = driver.step()
    assert plan.padding is not None
    assert driver.scheduler.ledger.n_idle == 120 - TILE
    driver.finish(request)
    assert request.state is RequestState.DONE
    assert any(each.work and each.padding is None for each in driver.plans), "a full pool leaves no room"
    assert not driver.preempted


def test_nothing_but_scratch_is_removed_for_it() -> None:
    driver = padded_driver()
    removed = []
    change = driver.backend.change
    driver.backend.change = lambda operation: (removed.append(operation), change(operation))[1]  # type: ignore[method-assign]
    driver.finish(driver.submit("x" * 40))
    assert removed
    assert set(removed) == {Remove(driver.backend.n_seqs - 1, 0)}
