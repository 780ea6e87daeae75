"""Multi-step decode: how many steps may follow without a plan, and what they compute."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.base.backend import Decoded, Run, Status
from llamaslot.base.commands import GenerateParams
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import StateKind
from llamaslot.base.tokens import TokenizedPrompt, packed
from llamaslot.scheduler.request import Request, RequestState
from llamaslot.scheduler.step import RequestResult, StepPlan, StepResult, Work, next_decode_step
from tests.scheduler.test_scheduler import Driver, trims

EOG = frozenset({0})


def test_extra_steps_end_where_the_first_stream_reaches_its_limit() -> None:
    driver = Driver(n_slots=3, n_ctx=512, n_ubatch=64)
    short, endless = driver.submit("a" * 20, max_tokens=10), driver.submit("b" * 20, max_tokens=-1)
    assert driver.step().n_extra_steps == 0  # a prompt
    for n_left in range(8, -1, -1):
        assert driver.step().n_extra_steps == n_left
    assert short.state is RequestState.DONE
    assert driver.step().n_extra_steps == 512 - driver.cache.cells.used
    assert endless.state is RequestState.RUNNING
    driver.submit("c" * 20, max_tokens=-1)
    assert driver.step().n_extra_steps == 0


@pytest.mark.parametrize(("kind", "n_extra"), [(StateKind.NONE, 8), (StateKind.HYBRID, 0)])
def test_a_request_with_stop_strings_has_extra_steps_if_it_has_no_partial_state(
    kind: StateKind, n_extra: int
) -> None:
    driver = Driver(n_slots=2, n_ctx=512, kind=kind)
    driver.submit("a" * 20, max_tokens=10, stop=("x",))
    while not (step := driver.step()).work or not step.work[0].request.n_generated:
        pass
    assert driver.step().n_extra_steps == n_extra


def test_a_request_whose_text_has_ended_keeps_its_slot_until_no_step_computes_it() -> None:
    driver = Driver(n_slots=1, n_ctx=512)
    request = driver.submit("a" * 20, max_tokens=10)
    driver.step()
    driver.step()
    driver.scheduler.end_by_text(request)
    n_generated, n_held = request.n_generated, driver.cache.length(request.slot)
    driver.step()
    assert (request.n_generated, driver.outcomes) == (n_generated, [])
    assert driver.cache.length(request.slot) == n_held + 1
    assert request.state is RequestState.RUNNING
    driver.scheduler.end_ending(driver.backend.now)
    assert request.state is RequestState.DONE
    assert not driver.scheduler.ending


def test_extra_steps_fit_into_the_pool() -> None:
    driver = Driver(n_slots=2, n_ctx=161, n_ubatch=64)
    for letter in "ab":
        driver.submit(letter * 16, max_tokens=-1)
    driver.step()
    plan = driver.step()
    assert driver.cache.cells.used == 34
    assert plan.n_extra_steps == (161 - 34) // 2


def test_several_streams_are_planned_again_after_a_while() -> None:
    """The layout of the pool may be considered then. A stream alone needs no other layout."""
    driver = Driver(n_slots=2, n_ctx=1024, n_ubatch=64)
    driver.submit("a" * 16, max_tokens=-1)
    driver.step()
    assert driver.step().n_extra_steps > 64
    driver.submit("b" * 16, max_tokens=-1)
    driver.step()
    assert driver.step().n_extra_steps == 64


def test_idle_cells_for_several_extra_steps_are_evicted_at_once() -> None:
    driver = Driver(n_slots=2, n_ctx=128, n_ubatch=64)
    idle = driver.run("a" * 64)
    stream = driver.submit("b" * 62, max_tokens=-1)
    driver.step()
    driver.step()
    plan = driver.step()
    assert trims(plan) == {idle.slot: 64 - 32}
    assert plan.n_extra_steps == 32
    assert stream.state is RequestState.RUNNING


def test_a_step_that_creates_a_sampler_has_no_extra_steps() -> None:
    driver = Driver(n_slots=2, n_ctx=512)
    driver.submit("a", max_tokens=10)
    assert driver.step().n_extra_steps == 0
    assert driver.step().n_extra_steps > 0


def test_extra_steps_of_partitioned_slots_are_bounded_by_their_context_alone() -> None:
    driver = Driver(n_slots=2, n_ctx=64, n_ubatch=64, unified=False)
    for letter in "ab":
        driver.submit(letter * 8, max_tokens=-1)
    for _ in range(2):
        driver.step()  # each for a prompt
    assert driver.step().n_extra_steps == 32 - 9 - 1


def test_requests_of_a_failed_step_have_no_extra_steps() -> None:
    driver = Driver(n_slots=2, n_ctx=512, n_ubatch=64)
    for letter in "ab":
        driver.submit(letter * 8, max_tokens=50)
    driver.step()
    driver.backend.failures.append((Status.FATAL, 0))
    driver.step()
    assert all(request.is_suspect for request in driver.scheduler.running)
    assert driver.step().n_extra_steps == 0
    assert driver.step().n_extra_steps == 0
    assert driver.step().n_extra_steps > 0


def test_all_requests_of_a_failed_step_are_computed_alone_although_the_first_fails_again() -> None:
    driver = Driver(n_slots=3, n_ctx=512, n_ubatch=64)
    requests = [driver.submit(letter * 8, max_tokens=50) for letter in "abc"]
    driver.step()
    assert len(driver.step().work) == 3
    driver.backend.failures.append((Status.FATAL, 0))
    driver.step()
    # With its draft, the first one does not fail alone: it is tried once more without.
    requests[0].draft = np.array(requests[0].tokens.view(0, 2), dtype=np.int32)
    driver.backend.failures.append((Status.FATAL, 0))
    assert driver.step().work[0].run.n_drafted
    assert [request.is_suspect for request in requests] == [True] * 3
    alone = [driver.step().work for _ in range(3)]
    assert [[work.request for work in each] for each in alone] == [[request] for request in requests]
    assert len(driver.step().work) == 3


def test_extra_steps_do_not_evict_the_cells_of_a_request_that_was_just_preempted() -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=64)
    for letter in "ab":
        driver.submit(letter * 60, max_tokens=150)
    while not driver.preempted:
        driver.step()
    (preempted,) = driver.preempted
    assert driver.held(preempted) >= 127 - 1


def test_many_streams_evict_no_more_cells_for_extra_steps_than_one() -> None:
    driver = Driver(n_slots=5, n_ctx=512, n_ubatch=256)
    idle = driver.run("z" * 300)
    for letter in "abcd":
        driver.submit(letter * 48, max_tokens=-1)
    while trims(driver.step()).get(idle.slot, 300) == 300:
        pass
    held = driver.held(idle)
    assert 300 - held <= 32 + 4
    assert driver.plans[-1].n_extra_steps in {0, 8}


def test_there_are_no_extra_steps_while_a_resumed_request_is_computed_token_by_token() -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=64)
    requests = [driver.submit(letter * 60, max_tokens=150) for letter in "ab"]
    while not driver.preempted:
        driver.step()
    driver.scheduler.chunks.limit = lambda *_, **__: 1
    n_before = len(driver.plans)
    driver.finish(*requests)
    incomplete = [plan for plan in driver.plans[n_before:] if any(not work.run.n_outputs for work in plan.work)]
    assert incomplete
    assert all(plan.n_extra_steps == 0 for plan in incomplete)


def test_a_request_that_waits_for_a_slot_does_not_end_extra_steps() -> None:
    driver = Driver(n_slots=1, n_ctx=512)
    driver.submit("a" * 8, max_tokens=50)
    driver.step()
    driver.submit("b" * 8, max_tokens=50)
    assert driver.step().n_extra_steps == 48


def step_of(n_extra_steps: int, tokens: dict[int, int], status: Status = Status.OK) -> tuple[StepPlan, StepResult]:
    """A step in which sequences 1 and 3 were at positions 7 and 20."""
    prompt = TokenizedPrompt(packed(np.array([1], dtype=np.int32)))
    requests = [
        Request(GenerateParams(f"r{seq}", sampling=Sampling()), prompt, arrival=seq, now=0.0) for seq in (1, 3)
    ]
    runs = [Run(seq, start, np.array([5], dtype=np.int32), n_outputs=1) for seq, start in ((1, 7), (3, 20))]
    work = [Work(request, run) for request, run in zip(requests, runs, strict=True)]
    results = [(RequestResult(each.request, tokens=(tokens[each.run.seq],)),) for each in work if tokens]
    return StepPlan(work=work, n_extra_steps=n_extra_steps), StepResult(Decoded(status, {}), 0.0, results=results)


def test_the_next_decode_step_computes_what_this_one_sampled() -> None:
    plan, result = step_of(2, {1: 8, 3: 9})
    after = next_decode_step(plan, result, EOG)
    assert after is not None
    assert (after.n_extra_steps, after.operations, after.preempted) == (1, [], [])
    assert [each.request for each in after.work] == [each.request for each in plan.work]
    assert [(w.run.seq, w.run.start, w.run.tokens.tolist(), w.run.n_outputs) for w in after.work] == [
        (1, 8, [8], 1),
        (3, 21, [9], 1),
    ]


@pytest.mark.parametrize(
    ("n_extra_steps", "tokens", "status"),
    [(0, {1: 8, 3: 9}, Status.OK), (2, {1: 8, 3: 0}, Status.OK), (2, {}, Status.NO_CELLS), (2, {}, Status.FATAL)],
)
def test_no_decode_step_follows_the_last_one_an_end_or_a_failure(
    n_extra_steps: int, tokens: dict[int, int], status: Status
) -> None:
    assert next_decode_step(*step_of(n_extra_steps, tokens, status), EOG) is None
