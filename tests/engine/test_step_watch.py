"""The step watch: a limit from the expected duration, which a stopped process does not use up."""

from __future__ import annotations

import threading

import pytest

from llamaslot.base.threads import ProcessTimes, ThreadTimes
from llamaslot.engine import model_worker
from llamaslot.engine.model_worker import StepWatch


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("n_tokens", "limit"), [(1, 60), (512, 60), (100_000, 2000)])
def test_a_step_may_take_the_limit_or_twenty_times_what_is_expected(n_tokens: int, limit: float) -> None:
    clock = Clock()
    watch = StepWatch(60, clock=clock)
    watch.expect(1000.0)
    watch.begin(n_tokens)
    clock.now += limit
    assert not watch.is_overdue
    clock.now += 1
    assert watch.is_overdue
    watch.begin(n_tokens)
    assert not watch.is_overdue


def test_nothing_is_overdue_between_steps_or_without_a_limit() -> None:
    clock = Clock()
    watch, unlimited = StepWatch(60, clock=clock), StepWatch(0, clock=clock)
    watch.begin()
    unlimited.begin()
    watch.end()
    clock.now += 10**6
    assert not watch.is_overdue
    assert not unlimited.is_overdue


def test_nothing_is_overdue_during_a_pause_after_which_watching_goes_on() -> None:
    clock = Clock()
    watch = StepWatch(60, clock=clock)
    watch.begin()
    with watch.paused():
        clock.now += 10**6
        assert not watch.is_overdue
    assert not watch.is_overdue
    clock.now += 61
    assert watch.is_overdue


class Threads:
    """Accounts of a process with one thread, which runs or waits as a test says."""

    def __init__(self) -> None:
        self.ran, self.waited, self.state = 1.0, 0.0, "S"

    def times(self, _pid: int, at: float) -> ProcessTimes:
        return ProcessTimes(at, {1: ThreadTimes("S", 5.0, 0.0), 2: ThreadTimes(self.state, self.ran, self.waited)})


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    threads = Threads()
    monkeypatch.setattr(model_worker, "process_times", threads.times)
    return threads


def test_the_time_for_which_the_process_was_stopped_does_not_count(threads: Threads) -> None:
    clock = Clock()
    watch = StepWatch(60, clock=clock)
    watch.begin()
    assert not watch.look(0.5)
    clock.now += 86_400
    assert not watch.look(86_400)
    clock.now += 61
    assert watch.look(0.5)


@pytest.mark.parametrize(
    ("state", "runs", "waits", "is_overdue"),
    [
        ("R", 0.05, 0.45, False),
        ("R", 0.0, 0.0, False),
        ("T", 0.0, 0.0, False),
        ("R", 0.5, 0.0, True),
        ("R", 0.25, 0.25, True),
        ("D", 0.0, 0.0, True),
        ("S", 0.0, 0.0, True),
        ("S", 0.01, 0.001, True),
    ],
    ids=["starved", "never runs", "stopped", "runs", "runs half of the time", "disk", "lock", "GPU"],
)
def test_a_step_is_overdue_by_the_time_that_it_got(
    threads: Threads, state: str, runs: float, waits: float, is_overdue: bool
) -> None:
    clock = Clock()
    watch = StepWatch(60, clock=clock)
    watch.begin()
    watch.look(0.5)
    threads.state = state
    ends = []
    for _ in range(2 * 130):
        clock.now += 0.5
        threads.ran += runs
        threads.waited += waits
        ends.append(watch.look(0.5))
    assert any(ends) is is_overdue


def test_a_new_step_is_not_given_the_time_that_another_one_lost(threads: Threads) -> None:
    clock = Clock()
    watch = StepWatch(60, clock=clock)
    watch.begin()
    watch.look(0.5)
    clock.now += 50
    threads.waited += 50
    watch.begin()
    watch.look(0.5)
    clock.now += 61
    assert watch.look(0.5)


def test_the_thread_notices_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_worker, "_WATCH_INTERVAL_S", 0.01)
    watch = StepWatch(0.05)
    overdue = threading.Event()
    watch.run(overdue.set)
    for _ in range(3):
        watch.begin()
        watch.end()
        assert not overdue.wait(0.1)
    watch.begin()
    assert overdue.wait(5)
