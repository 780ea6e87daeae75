"""The step watch: a limit from the expected duration, which a stopped process does not use up."""

from __future__ import annotations

import threading

import pytest

from llamaslot.engine import step_watch
from llamaslot.engine.step_watch import StepWatch


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


def test_the_time_for_which_the_process_was_stopped_does_not_count() -> None:
    clock = Clock()
    watch = StepWatch(60, clock=clock)
    watch.begin()
    clock.now += 86_400
    watch.allow_for_pause(86_400)
    assert not watch.is_overdue
    clock.now += 61
    watch.allow_for_pause(0.5)
    assert watch.is_overdue


def test_the_thread_notices_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "_INTERVAL_S", 0.01)
    watch = StepWatch(0.05)
    overdue = threading.Event()
    watch.run(overdue.set)
    for _ in range(3):
        watch.begin()
        watch.end()
        assert not overdue.wait(0.1)
    watch.begin()
    assert overdue.wait(5)
