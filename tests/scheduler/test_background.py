"""Requests in the background: they run only while there is no other, and leave a valid cache whenever they end."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from llamaslot.base.backend import Status
from llamaslot.base.model import QUERY_BLOCK, StateKind
from llamaslot.scheduler.chunk_sizer import MIN_CHUNK
from llamaslot.scheduler.request import Request, RequestState
from llamaslot.scheduler.step import StepPlan
from tests.conftest import LONG
from tests.random_workloads import run_workloads
from tests.scheduler.test_scheduler import Driver, generated

N_WORKLOADS = 300 if LONG else 30


def background(driver: Driver, prompt: str) -> Request:
    """Queue a prompt that is computed in the background, in place of an earlier one."""
    earlier = driver.scheduler.admission.background
    if earlier is not None:
        driver.scheduler.end(earlier, driver.backend.now, cancelled=True)
    return driver.submit(prompt, max_tokens=0, is_background=True)


def workers(plan: StepPlan) -> list[Request]:
    return [work.request for work in plan.work]


def test_it_makes_way_in_the_next_plan_and_goes_on_later() -> None:
    driver = Driver(n_slots=2, n_ctx=1024, n_ubatch=256)
    ahead = background(driver, "a" * 300)
    assert workers(driver.step()) == [ahead]
    other = driver.submit("b" * 20, max_tokens=3)
    plan = driver.step()
    assert workers(plan) == [other]
    assert prefill_of(plan) == 20
    assert ahead.state is RequestState.QUEUED
    # What it has computed stays, and is not computed again.
    assert driver.match("a" * 300).n_cached == QUERY_BLOCK
    driver.finish(other)
    driver.finish(ahead)
    assert ahead.n_prompt_computed == 300
    assert driver.run("a" * 300 + "c", max_tokens=2).n_cached == 300
    stats = driver.scheduler.cache_stats()
    assert (stats.prompt_tokens.ahead, stats.preemptions) == (300, 0)
    assert stats.requests.hits + stats.requests.misses == 2
    assert stats.miss_reasons == {"cold": 1}


def prefill_of(plan: StepPlan) -> int:
    return sum(len(work.run.tokens) for work in plan.work)


@pytest.mark.parametrize(("seconds", "expected"), [(1e-5, 512), (2e-4, 192), (1e-3, 50), (1.0, MIN_CHUNK)])
def test_its_steps_are_short(seconds: float, expected: int) -> None:
    driver = Driver(n_slots=1, n_ctx=4096, n_ubatch=512)
    driver.scheduler.chunks.observe(512, 0, 512 * seconds)
    background(driver, "a" * 2000)
    assert prefill_of(driver.step()) == expected


def test_it_waits_for_all_others() -> None:
    driver = Driver(n_slots=2, n_ctx=512)
    stream = driver.submit("s" * 10, max_tokens=30)
    driver.step()
    ahead = background(driver, "a" * 50)
    while stream.state is not RequestState.DONE:
        assert ahead not in workers(driver.step())
    assert ahead in workers(driver.step())


def test_it_takes_no_turn_of_a_client_and_no_slot_that_another_wants() -> None:
    driver = Driver(n_slots=1, n_ctx=512)
    ahead = background(driver, "a" * 200)
    driver.step()
    other = driver.submit("b" * 20, client="one", id_slot=0)
    assert workers(driver.step()) == [other]
    assert ahead.slot == 0
    driver.finish(ahead)
    assert not driver.scheduler.admission.background


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_it_can_be_cancelled_at_any_time(when: str) -> None:
    driver = Driver(n_slots=1, n_ctx=512, n_ubatch=64)
    ahead = background(driver, "a" * 200)
    if when != "waiting":
        driver.step()
    if when == "preempted":
        driver.submit("b" * 20)
        driver.step()
    driver.scheduler.end(ahead, driver.backend.now, cancelled=True)
    driver.step()
    assert driver.scheduler.admission.background is None
    n_computed = 0 if when == "waiting" else QUERY_BLOCK
    assert driver.match("a" * 200).n_cached in (n_computed, 0 if when == "preempted" else n_computed)
    driver.run("a" * 200 + "c")


@pytest.mark.parametrize("n_steps", [0, 1])
def test_stopping_ends_it(n_steps: int) -> None:
    driver = Driver(n_slots=1, n_ctx=512, n_ubatch=64)
    ahead = background(driver, "a" * 200)
    for _ in range(n_steps):
        driver.step()
    driver.scheduler.stop(driver.backend.now)
    assert ahead.state is RequestState.DONE
    assert driver.scheduler.admission.background is None
    assert not workers(driver.step())


def test_a_failed_step_ends_it_or_is_repeated() -> None:
    driver = Driver(n_slots=1, n_ctx=512, n_ubatch=64)
    for status in (Status.FATAL, Status.NO_CELLS, Status.ABORTED):
        ahead = background(driver, f"{status} " + "a" * 200)
        driver.backend.failures.append((status, 0))
        for _ in range(20):
            driver.step()
        assert ahead.state is RequestState.DONE
        # It may fail in the plan before it makes way.
        ahead = background(driver, f"{status}, again " + "a" * 200)
        driver.backend.failures.append((status, 0))
        driver.step()
        driver.run("b" * 20, max_tokens=3)
    driver.check()


class Workload:
    """Random requests with prompts in the background beside them, or, for comparison, without."""

    def __init__(self, seed: int, *, with_background: bool = True) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.with_background = with_background
        rng = self.rng
        self.driver = Driver(
            kind=rng.choice([StateKind.NONE, StateKind.NONE, StateKind.WINDOW, StateKind.HYBRID]),
            n_slots=rng.choice([1, 2, 3]),
            n_reserved=2,
            n_ctx=rng.choice([160, 256, 512]),
            n_ubatch=rng.choice([16, 64, 128]),
            ram_bytes=rng.choice([0, 10**6]),
            min_shared=4,
        )
        self.requests: list[Request] = []
        self.ahead: list[Request] = []

    def run(self) -> None:
        rng, driver = self.rng, self.driver
        heads = ["h" * 20, "g" * 30, "h" * 12 + "g" * 20]
        for _ in range(rng.randint(4, 12)):
            prompt = rng.choice(heads) + "".join(rng.choices("pqz", k=rng.randint(1, 60)))
            n_steps, n_more = rng.randint(0, 8), rng.randint(0, 6)
            tail = "".join(rng.choices("xy", k=rng.randint(1, 50)))
            failure = rng.choice([Status.FATAL, Status.ABORTED]) if rng.random() < 0.05 else None
            if self.with_background:
                self.ahead.append(background(driver, (prompt + tail)[:120]))
            for _ in range(n_steps):
                self.step()
            self.requests.append(driver.submit(prompt[:100], max_tokens=rng.randint(0, 6)))
            if failure is not None and self.with_background:
                driver.backend.failures.append((failure, 0))
                self.counts["failures"] += 1
            for _ in range(n_more):
                self.step()
        for _ in range(1000):
            if all(each.state is RequestState.DONE for each in (*self.requests, *self.ahead)):
                break
            self.step()
        assert all(each.state is RequestState.DONE for each in (*self.requests, *self.ahead))
        assert driver.scheduler.admission.background is None
        driver.check()

    def step(self) -> None:
        living = [each for each in self.requests if each.state is not RequestState.DONE]
        was_running = [each for each in self.ahead if each.state is RequestState.RUNNING]
        plan = self.driver.step()
        ahead = [each for each in workers(plan) if each.params.is_background]
        assert not (ahead and living), "it runs beside others"
        assert len(ahead) <= 1
        # As soon as there is another request, that has all of the step.
        is_loading = bool(plan.operations) or bool(plan.preempted)
        assert not living or workers(plan) or is_loading, "others wait"
        self.counts["made way"] += bool(was_running and was_running[0].state is RequestState.QUEUED)
        self.counts["computed ahead"] += bool(ahead)
        self.counts["ended"] += any(each.state is RequestState.DONE for each in was_running)


@pytest.mark.slow
def test_it_never_delays_another_request() -> None:
    run_workloads(Workload, N_WORKLOADS, ("made way", "computed ahead", "ended"))


@pytest.mark.parametrize("seed", range(N_WORKLOADS // 3))
def test_replies_are_the_same_with_it_and_without(seed: int) -> None:
    with_it, without = Workload(seed), Workload(seed, with_background=False)
    for each in (with_it, without):
        each.run()
    for mine, other in zip(with_it.requests, without.requests, strict=True):
        found, expected = generated(mine), generated(other)
        assert found == expected[: len(found)]
        assert found == expected or with_it.counts["failures"]
