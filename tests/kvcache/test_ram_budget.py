"""The budget of RAM follows free memory: down at once, up slowly, and never to and fro."""

from __future__ import annotations

import pytest

from llamaslot.kvcache.tiers.budget import (
    CALM_S,
    RAM_TABLE,
    MemoryEvent,
    MemoryReading,
    RamBudget,
    RamState,
)

GIB = 2**30
TOTAL = 64 * GIB
RESERVE = GIB
"""Bytes that should stay free of that many."""
MAX = 8 * GIB


def reading(free: float, **more: object) -> MemoryReading:
    """A reading of a host with `free` GiB."""
    return MemoryReading(int(free * GIB), TOTAL, **more)


def reduced(n_used: int = 4 * GIB) -> RamBudget:
    budget = RamBudget(MAX, is_fixed=False)
    assert budget.observe(reading(0.5), n_used, 0.0)
    return budget


def test_the_table_has_every_pair_and_only_shortage_reduces() -> None:
    assert set(RAM_TABLE) == {(state, event) for state in RamState for event in MemoryEvent}
    for (state, event), after in RAM_TABLE.items():
        if event in (MemoryEvent.SHORT, MemoryEvent.CRITICAL):
            assert after is RamState.REDUCED
        elif (state, event) == (RamState.REDUCED, MemoryEvent.CALM):
            assert after is RamState.GROWING
        elif (state, event) == (RamState.GROWING, MemoryEvent.GROWN):
            assert after is RamState.NORMAL
        else:
            assert after is state


def test_with_ample_memory_the_budget_is_what_was_configured() -> None:
    budget = RamBudget(MAX, is_fixed=False)
    for second in range(100):
        assert not budget.observe(reading(30), 0, second)
        assert (budget.n_bytes, budget.state, budget.reason) == (MAX, RamState.NORMAL, "")


@pytest.mark.parametrize("free", [1.2, 1.5, 2.0, 5.0])
def test_the_tier_never_grows_into_the_last_free_memory(free: float) -> None:
    budget = RamBudget(MAX, is_fixed=False)
    n_used = 3 * GIB
    assert not budget.observe(reading(free), n_used, 0.0)
    assert n_used <= budget.n_bytes <= n_used + max(0, int((free - 1.5) * GIB)), "it takes what is left"
    assert budget.reason == "little free memory"


def test_what_is_missing_is_given_back_at_once() -> None:
    budget = RamBudget(MAX, is_fixed=False)
    assert budget.observe(reading(0.75), 4 * GIB, 0.0)
    assert (budget.n_bytes, budget.state) == (4 * GIB - GIB // 4, RamState.REDUCED)
    assert budget.reason == "little free memory"
    assert not budget.observe(reading(1.0), budget.n_bytes, 2.0), "what was missing has come back"
    assert budget.n_bytes == 4 * GIB - GIB // 4


@pytest.mark.parametrize(
    "critical",
    [
        reading(0.3),
        reading(5, all_waiting=0.3, some_waiting=0.3),
        reading(30, is_warned=True, is_critical=True),
    ],
)
def test_all_is_given_back_when_memory_is_critical(critical: MemoryReading) -> None:
    budget = RamBudget(MAX, is_fixed=False)
    assert budget.observe(critical, 4 * GIB, 0.0)
    assert budget.n_bytes == 0
    assert budget.reason


@pytest.mark.parametrize(
    ("short", "reason"),
    [
        (reading(5, some_waiting=0.1), "programs wait for memory"),
        (reading(30, is_warned=True), "the system's warning"),
    ],
)
def test_a_part_is_given_back_while_it_is_not_known_how_much_is_needed(short: MemoryReading, reason: str) -> None:
    budget = RamBudget(MAX, is_fixed=False)
    n_used, sizes = 4 * GIB, []
    for second in range(0, 20, 2):
        budget.observe(short, n_used, second)
        n_used = min(n_used, budget.n_bytes)
        sizes.append(n_used)
    assert sizes[0] == 3 * GIB
    assert sizes == sorted(set(sizes), reverse=True), "not smaller each time"
    assert budget.reason == reason


def test_programs_that_wait_although_much_is_free_are_others_at_their_own_limit() -> None:
    budget = RamBudget(MAX, is_fixed=False)
    assert not budget.observe(reading(30, some_waiting=1.0, all_waiting=1.0), 4 * GIB, 0.0)
    assert budget.n_bytes == MAX


def test_the_tier_grows_again_only_after_calm_and_step_by_step() -> None:
    budget = reduced()
    low, now = budget.n_bytes, 0.0
    states, sizes = [], []
    while budget.state is not RamState.NORMAL:
        now += 2.0
        budget.observe(reading(30), low, now)
        states.append(budget.state)
        sizes.append(budget.n_bytes)
        assert now < 200
    n_waiting = states.count(RamState.REDUCED)
    assert 2 * n_waiting >= CALM_S - 2
    assert set(sizes[:n_waiting]) == {low}
    steps = [b - a for a, b in zip([low, *sizes[n_waiting:]], sizes[n_waiting:], strict=False)]
    assert 0 < min(steps) <= max(steps) <= MAX // 16 + 1, "grows too fast"
    assert sizes[-1] == MAX
    assert budget.reason == ""


def test_the_calm_begins_anew_with_each_reading_that_is_not_ample() -> None:
    budget = reduced()
    for second in range(2, 300, 2):
        free = 1.8 if second % 20 == 0 else 30.0
        assert not budget.observe(reading(free), 0, float(second))
    assert budget.state is RamState.REDUCED


def test_shortage_while_it_grows_reduces_it_again() -> None:
    budget = reduced(0)
    for second in range(2, 38, 2):
        budget.observe(reading(30), 0, float(second))
    assert budget.state is RamState.GROWING
    grown = budget.n_bytes
    assert grown > 0
    assert not budget.observe(reading(1.6), 0, 40.0)
    assert 0 < budget.n_bytes < grown, "the last free memory is not for it"
    assert budget.observe(reading(0.9), 0, 42.0)
    assert (budget.state, budget.n_bytes) == (RamState.REDUCED, 0)


def test_where_little_is_free_for_good_it_grows_only_to_that() -> None:
    budget = reduced(0)
    now = 0.0
    while budget.state is not RamState.NORMAL:
        now += 2.0
        budget.observe(reading(2.5), 0, now)
        assert now < 200
    assert budget.n_bytes == GIB
    assert budget.reason == "little free memory"


def test_a_fixed_budget_stays_and_tells_that_memory_is_short() -> None:
    budget = RamBudget(MAX)
    assert budget.observe(reading(0.1), 4 * GIB, 0.0)
    assert not budget.observe(reading(0.1), 4 * GIB, 2.0), "told twice"
    assert (budget.n_bytes, budget.state, budget.reason) == (MAX, RamState.REDUCED, "little free memory")


def test_small_containers_reserve_a_tenth() -> None:
    total = 512 * 2**20
    budget = RamBudget(128 * 2**20, is_fixed=False)
    assert not budget.observe(MemoryReading(total // 10, total), 2**20, 0.0)
    assert budget.observe(MemoryReading(total // 10 - 1, total), 2**20, 2.0)


@pytest.mark.parametrize("free", [0.0, 0.1, 0.5, 1.2])
def test_memory_that_evicting_would_not_free_stays_in_use(free: float) -> None:
    budget = RamBudget(MAX, is_fixed=False)
    for second in range(10):
        budget.observe(reading(free, locked=2 * GIB), min(4 * GIB, budget.n_bytes), second)
        assert budget.n_bytes >= 2 * GIB
    budget = RamBudget(MAX, is_fixed=False)
    budget.observe(reading(free, locked=20 * GIB), 4 * GIB, 0.0)
    assert budget.n_bytes == MAX
