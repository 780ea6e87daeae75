"""Rows beside streams of a partitioned pool are computed where passes then take less, and change nothing else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from llamaslot.base.backend import Decoded, Draws, Run
from llamaslot.base.kv_ops import Remove
from llamaslot.base.model import StepCost
from llamaslot.scheduler.padding import MIN_DUMMY_SPEEDUP, DummyRows, adjacent
from tests.scheduler.test_scheduler import DECODE_SECONDS, Driver, TimedBackend, generated

COST = StepCost(step_us=3200.0, token_us=110.0, token_cell_us=0.45, block_us=1e4, block_cell_us=10.0)
"""The shape of 60M parameters on two cores."""
MEASURED_MS = {1: 4.9, 2: 6.1, 3: 8.6, 4: 9.9, 5: 13.5, 6: 15.1, 7: 16.9, 8: 15.1}
"""A pass of so many rows there, with 1,800 cells each."""


def rows(seqs: list[int], held: int = 1800) -> list[Run]:
    return [Run(seq, held, np.zeros(1, dtype=np.int32), n_outputs=1) for seq in seqs]


def milliseconds(seqs: list[int]) -> float:
    return sum(MEASURED_MS[len(each)] for each in adjacent(seqs))


def fastest(streams: list[int]) -> float:
    """The least time of any set of slots that has these."""
    others = [seq for seq in range(8) if seq not in streams]
    sets = itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(len(others) + 1))
    return min(milliseconds(sorted([*streams, *more])) for more in sets)


@pytest.mark.parametrize(
    "streams",
    [
        [0, 1, 3, 6, 7],
        [0, 2, 4, 6],
        [1, 3, 5],
        [0, 7],
        [0, 2],
        [*range(7)],
        [*range(1, 8)],
        [2, 3, 4, 5, 6],
        [0, 1, 5, 6],
        [*range(8)],
        [3],
    ],
    ids=str,
)
def test_after_some_steps_the_rows_are_those_that_take_least(streams: list[int]) -> None:
    chance = random.Random(1)
    dummies = DummyRows(COST, 8)
    taken = []
    for _ in range(400):
        chosen = dummies.fill(streams, dict.fromkeys(range(8), 1800))
        seqs = sorted([*streams, *(run.seq for run in chosen)])
        taken.append(milliseconds(seqs))
        dummies.observe(rows(seqs), taken[-1] / 1e3 * chance.uniform(0.95, 1.1))
    least = fastest(streams)
    assert np.mean(taken[100:]) <= 1.02 * max(least, milliseconds(streams) / MIN_DUMMY_SPEEDUP)


def test_a_slow_period_does_not_rule_out_the_best_rows_for_ever() -> None:
    dummies = DummyRows(COST, 8)
    held = dict.fromkeys(range(8), 1800)
    for factor, n in ((1, 50), (20, 5), (1, 3000)):
        for _ in range(n):
            seqs = sorted([0, 2, 4, 6, *(run.seq for run in dummies.fill([0, 2, 4, 6], held))])
            dummies.observe(rows(seqs), factor * milliseconds(seqs) / 1e3)
    assert seqs == [*range(8)]


def test_full_slots_are_left_out_and_slots_are_never_computed_twice() -> None:
    chance = random.Random(2)
    dummies = DummyRows(StepCost(1e5, 0.0, 0.0, 0.0, 0.0), 8)
    for _ in range(500):
        free = {seq: 5 for seq in range(8) if chance.random() < 0.7}
        streams = sorted(chance.sample(sorted(free), chance.randint(0, len(free))))
        seqs = [*streams, *(run.seq for run in dummies.fill(streams, free))]
        assert len(set(seqs)) == len(seqs)
        assert {*seqs} <= {*free}


def test_nothing_is_filled_in_without_a_cost() -> None:
    assert not DummyRows(None, 8).fill([0, 2], {0: 5, 1: 5, 2: 5})


def driver_of_gaps() -> Driver:
    """Slots 0 and 2 have streams; a pass costs much."""
    cost = StepCost(step_us=1e6, token_us=0.0, token_cell_us=0.0, block_us=1e9, block_cell_us=0.0)
    driver = Driver(n_slots=3, n_ctx=3 * 512, n_ubatch=128, unified=False, step_cost=cost)
    driver.run("i" * 30, id_slot=1)
    return driver


def test_a_row_between_streams_changes_neither_the_slot_it_is_in_nor_any_text() -> None:
    driver = driver_of_gaps()
    removed = []
    change = driver.backend.change
    driver.backend.change = lambda operation: (removed.append(operation), change(operation))[1]  # type: ignore[method-assign]
    streams = [driver.submit(letter * 20, max_tokens=30, id_slot=slot) for letter, slot in (("a", 0), ("b", 2))]
    driver.finish(*streams)
    filled = [plan for plan in driver.plans if len(plan.work) == 2]
    assert all([(run.seq, run.start) for run in plan.padding] == [(1, 30)] for plan in filled)
    assert len(filled) > 10
    assert {*removed} >= {Remove(1, 30)}
    assert driver.backend.seq_len(1) == driver.cache.length(1) == 30
    alone = driver_of_gaps()
    assert [generated(each) for each in streams] == [
        generated(alone.run(letter * 20, max_tokens=30, id_slot=slot)) for letter, slot in (("a", 0), ("b", 2))
    ]
    assert driver.run("i" * 30 + "more").n_reused == 30


def test_a_prompt_that_waits_between_two_streams_is_continued_where_it_was() -> None:
    driver = driver_of_gaps()
    streams = [driver.submit(letter * 20, max_tokens=200, id_slot=slot) for letter, slot in (("a", 0), ("b", 2))]
    while not all(stream.n_generated for stream in streams):
        driver.step()
    prompt = driver.submit("p" * 400, max_tokens=5, id_slot=1)
    driver.plans.clear()
    driver.finish(prompt)
    beside = [run.start for plan in driver.plans for run in plan.padding if run.seq == 1]
    assert any(0 < start < 400 for start in beside)
    assert prompt.n_prompt_computed == 400


class PassesBackend(TimedBackend):
    """A fake model whose steps of single tokens take what their passes do."""

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        decoded = super().decode(runs, draws)
        if all(len(run.tokens) == 1 for run in runs):
            self.now += milliseconds([run.seq for run in runs]) / 1e3 - DECODE_SECONDS
        return decoded


@pytest.mark.slow
def test_the_rows_are_learned_from_the_steps_of_a_scheduler() -> None:
    driver = Driver(backend=PassesBackend(n_slots=8, n_ctx=8 * 1024, unified=False), step_cost=COST)
    for seq in range(8):
        driver.run(f"{seq}" * 400, id_slot=seq)
    streams = [driver.submit(f"{seq}" * 400, max_tokens=500, id_slot=seq) for seq in (0, 2, 4, 6)]
    driver.finish(*streams)
    rows = [len(plan.work) + len(plan.padding) for plan in driver.plans if len(plan.work) == 4]
    assert rows[0] == 7, "by the costs alone"
    assert rows[100:].count(8) > 0.9 * len(rows[100:])


@pytest.mark.parametrize("is_measured", [True, False])
def test_streams_are_joined_once_the_pool_is_partitioned_and_the_costs_are_measured(*, is_measured: bool) -> None:
    cost = StepCost(step_us=1e6, token_us=0.0, token_cell_us=0.0, block_us=1e9, block_cell_us=0.0)
    backend = TimedBackend(n_slots=3, n_ctx=3 * 512, n_ubatch=128, may_partition=True)
    driver = Driver(backend=backend, step_cost=cost if is_measured else None)
    scheduler = driver.scheduler
    backend.set_layout(unified=False)
    scheduler.set_layout(
        msgspec.structs.replace(backend.info, step_cost=cost if is_measured else None), backend.n_seqs
    )
    if not is_measured:
        scheduler.set_costs(msgspec.structs.replace(backend.info, step_cost=cost))
    streams = [driver.submit(letter * 20, max_tokens=10, id_slot=slot) for letter, slot in (("a", 0), ("b", 2))]
    driver.finish(*streams)
    assert any([run.seq for run in plan.padding] == [1] for plan in driver.plans)
