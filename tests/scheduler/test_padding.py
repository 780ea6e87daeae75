"""Steps are padded where that makes them faster, and nothing but the time tells."""

from __future__ import annotations

import pytest

from llamaslot.base.backend import Decoded, Status
from llamaslot.base.kv_ops import Remove
from llamaslot.base.model import QUERY_BLOCK, StepCost
from llamaslot.scheduler.padding import Padding
from llamaslot.scheduler.request import RequestState
from llamaslot.scheduler.step import apply
from tests.scheduler.test_scheduler import Driver

COST = StepCost(step_us=600.0, token_us=730.0, token_cell_us=4.0, block_us=18_000.0, block_cell_us=16.0)
"""About what a model of 60M parameters takes on two cores: at 4,096 cells 16 tokens take 275 ms, 64 take 84."""
SCRATCH = 9


def padding(cost: StepCost | None = COST, n_ubatch: int = 512) -> Padding:
    return Padding(cost, n_ubatch)


ALWAYS = StepCost(step_us=1e6, token_us=0.0, token_cell_us=0.0, block_us=0.0, block_cell_us=0.0)


def padded_driver(cost: StepCost = ALWAYS, **shape: float) -> Driver:
    """Every step of fewer than `QUERY_BLOCK` tokens is padded."""
    return Driver(**{"n_slots": 2, "n_ctx": 512, "n_ubatch": 128, "n_reserved": 2} | shape, step_cost=cost)


def test_a_few_tokens_behind_a_long_prefix_are_padded_to_a_query_block() -> None:
    assert padding().gain_ms([(4096, 16)], n_used=4096) == pytest.approx(275 - 84, abs=3)
    added = padding().run(16, SCRATCH)
    assert (added.seq, added.start, len(added.tokens), added.n_outputs) == (SCRATCH, 0, QUERY_BLOCK - 16, 0)


@pytest.mark.parametrize(
    ("spans", "n_used"),
    [
        ([(0, 23)], 0),
        ([(64, 16)], 64),
        ([(4096, 1)], 4096),
        ([(1024, 1)] * 8, 8 * 1024),
        ([(4096, QUERY_BLOCK)], 4096),
        ([(4096, 16), (0, QUERY_BLOCK)], 4096),
        ([], 0),
    ],
    ids=["fresh", "short prefix", "one token", "nothing in common", "a block", "more than a block", "nothing"],
)
def test_other_steps_are_not_padded(spans: list[tuple[int, int]], n_used: int) -> None:
    assert padding().gain_ms(spans, n_used) == 0


def test_a_fixed_cost_per_step_is_no_reason_to_pad() -> None:
    """Where 8 tokens take as long as 64, as on a GPU, more of them would gain nothing."""
    flat = StepCost(step_us=20_000.0, token_us=0.0, token_cell_us=0.0, block_us=20_000.0, block_cell_us=0.0)
    assert all(padding(flat).gain_ms([(1024, n)], n_used=1024) == 0 for n in range(1, QUERY_BLOCK))


def test_streams_on_one_prefix_are_padded_and_those_on_several_are_not() -> None:
    streams = [(4096, 1)] * 8
    assert padding().gain_ms(streams, n_used=4096) > 0
    assert padding().gain_ms(streams, n_used=8 * 4096) == 0


def test_idle_cells_do_not_count_for_padding() -> None:
    assert padding().gain_ms([(4096, 16)], n_used=50_000) == padding().gain_ms([(4096, 16)], n_used=4096)


@pytest.mark.parametrize("given", [{"cost": None}, {"n_ubatch": QUERY_BLOCK - 1}])
def test_nothing_is_padded_without_a_cost_or_room_for_a_query_block(given: dict[str, None]) -> None:
    assert padding(**given).gain_ms([(4096, 32)], n_used=4096) == 0


def test_tokens_of_a_prompt_that_was_cut_take_the_place_of_padding() -> None:
    driver = padded_driver(n_ctx=1024)
    stream = driver.submit("s" * 4, max_tokens=100)
    driver.step()
    driver.submit("p" * 300)
    driver.scheduler.chunks.limit = lambda *_, **__: 16  # type: ignore[method-assign]
    plan = driver.step()
    assert {work.request.id: len(work.run.tokens) for work in plan.work} == {
        stream.id: 1,
        "request 2": QUERY_BLOCK - 1,
    }
    assert not plan.padding


def test_padding_is_removed_at_the_end_of_the_step_and_counts_for_no_request() -> None:
    driver = padded_driver()
    request = driver.submit("x" * 40, max_tokens=3)
    plan = driver.scheduler.plan(0.0)
    assert plan.padding
    result = apply(plan, driver.backend, lambda: 0.0)
    assert result.decoded == Decoded(Status.OK, {request.slot: (0, 40)})
    assert driver.backend.cells_used == 40
    driver.scheduler.commit(plan, result, 0.0)
    assert driver.cache.cells.used == 40
    assert driver.cache._sequences.clock < 2 * 40
    driver.finish(request)
    assert request.n_prompt_computed == 40


def test_padding_of_a_failed_step_is_removed_too() -> None:
    driver = padded_driver()
    driver.submit("x" * 40)
    driver.backend.failures.append((Status.FATAL, 2))
    plan = driver.step()
    [padding] = plan.padding
    assert driver.backend.seq_len(padding.seq) == 0


def test_extra_steps_are_padded_and_leave_room_for_it() -> None:
    driver = padded_driver(n_ctx=40 + 63 + 5)
    driver.submit("x" * 40, max_tokens=20)
    driver.step()
    driver.step()
    plan = driver.scheduler.plan(0.0)
    [padding] = plan.padding
    assert plan.n_extra_steps == driver.cache.cells.free - len(plan.work) - len(padding.tokens)


def test_a_request_that_fails_beside_padding_is_retried_without() -> None:
    driver = padded_driver()
    request = driver.submit("x" * 40)
    driver.backend.failures.append((Status.INVALID, 0))
    assert driver.step().padding
    assert not driver.outcomes
    plan = driver.step()
    assert not plan.padding
    assert [outcome.request for outcome in driver.outcomes] == [request]
    assert request.n_generated == 1


def test_idle_cells_are_evicted_for_padding_but_no_request_is_preempted() -> None:
    driver = padded_driver(n_ctx=120, n_slots=2)
    driver.finish(driver.submit("o" * 60))
    request = driver.submit("x" * 40, max_tokens=80)
    assert driver.step().padding
    assert driver.cache.cells.idle == 120 - QUERY_BLOCK
    driver.finish(request)
    assert request.state is RequestState.DONE
    assert any(each.work and each.padding == () for each in driver.plans), "a full pool leaves no room"
    assert not driver.preempted


def test_idle_cells_are_not_evicted_for_a_small_gain() -> None:
    cost = StepCost(step_us=1500.0, token_us=0.0, token_cell_us=0.0, block_us=1000.0, block_cell_us=0.0)
    driver = padded_driver(n_ctx=120, n_slots=2, cost=cost)
    driver.finish(driver.submit("o" * 60))
    driver.submit("x" * 40)
    assert not driver.step().padding
    assert driver.cache.cells.idle >= 60


def test_padding_removes_nothing_but_the_scratch_sequence() -> None:
    driver = padded_driver()
    removed = []
    change = driver.backend.change
    driver.backend.change = lambda operation: (removed.append(operation), change(operation))[1]  # type: ignore[method-assign]
    driver.finish(driver.submit("x" * 40))
    assert removed
    assert set(removed) == {Remove(driver.backend.n_seqs - 1, 0)}


def partitioned_driver(**shape: float) -> Driver:
    return padded_driver(**{"unified": False, "n_reserved": 0, "n_ctx": 1024} | shape)


def test_in_a_partitioned_pool_padding_follows_the_prompt_and_is_removed_at_the_end_of_the_step() -> None:
    driver = partitioned_driver()
    request = driver.submit("x" * 40, max_tokens=3)
    plan = driver.scheduler.plan(0.0)
    [added] = plan.padding
    assert (added.seq, added.start, len(added.tokens), added.n_outputs) == (request.slot, 40, QUERY_BLOCK - 40, 0)
    result = apply(plan, driver.backend, lambda: 0.0)
    assert result.decoded == Decoded(Status.OK, {request.slot: (0, 40)})
    assert driver.backend.seq_len(request.slot) == 40
    driver.scheduler.commit(plan, result, 0.0)
    driver.finish(request)
    assert request.n_prompt_computed == 40
    assert [list(plan.padding) for plan in driver.plans if plan.work] == [[], []], "single tokens are not padded"


def test_in_a_partitioned_pool_the_step_of_a_short_prompt_is_padded_while_streams_wait() -> None:
    driver = partitioned_driver()
    driver.submit("s" * 4, max_tokens=100)
    driver.step()
    prompt = driver.submit("p" * 40)
    plan = driver.step()
    assert [work.request for work in plan.work] == [prompt]
    [padding] = plan.padding
    assert (padding.seq, padding.start, len(padding.tokens)) == (prompt.slot, 40, QUERY_BLOCK - 40)


def test_padding_stays_within_its_part() -> None:
    driver = partitioned_driver(n_ctx=2 * (QUERY_BLOCK - 1))
    driver.submit("x" * 40)
    assert not driver.step().padding


@pytest.mark.parametrize(("n_applied", "n_left"), [(1, 40), (2, 40), (0, 0)])
def test_padding_of_a_failed_step_is_removed_from_a_part_too(n_applied: int, n_left: int) -> None:
    driver = partitioned_driver()
    request = driver.submit("x" * 40)
    driver.backend.failures.append((Status.FATAL, n_applied))
    plan = driver.scheduler.plan(0.0)
    assert plan.padding
    result = apply(plan, driver.backend, lambda: 0.0)
    assert result.lengths == {request.slot: n_left}
    assert driver.backend.seq_len(request.slot) == n_left


@pytest.mark.parametrize("n_ubatch", [QUERY_BLOCK, QUERY_BLOCK + 2, QUERY_BLOCK + 4])
@pytest.mark.parametrize("n_prompt", [40, 63, 64, 65, 200])
def test_padded_steps_of_parts_fit_a_micro_batch(n_ubatch: int, n_prompt: int) -> None:
    driver = partitioned_driver(n_ubatch=n_ubatch, n_slots=4)
    streams = [driver.submit(letter * 4, max_tokens=30) for letter in "stu"]
    while not all(stream.n_generated for stream in streams):
        driver.step()
    driver.scheduler.chunks.limit = lambda *_, **__: 16  # type: ignore[method-assign]
    driver.finish(driver.submit("p" * n_prompt, max_tokens=3), *streams)
    assert all(plan.n_tokens <= n_ubatch for plan in driver.plans)


def test_padding_goes_with_the_sequence_that_could_not_be_loaded() -> None:
    driver = partitioned_driver()
    prompt = driver.submit("p" * 40)
    plan = driver.scheduler.plan(0.0)
    assert plan.padding
    assert not plan.without({prompt.slot}).padding
    assert [*plan.without({prompt.slot + 1}).padding] == [*plan.padding]
