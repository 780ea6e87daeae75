"""The benchmark that says where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from time import thread_time

import pytest

from bench import clocks as module
from bench import profile
from bench.clocks import WAIT, Clocks


@pytest.mark.slow
async def test_each_part_is_counted(tiny_model: Path, tmp_path: Path) -> None:
    (measured,) = await profile.measure(tiny_model, ["-np", "1", "-c", "2048"], 512, tmp_path / "log", streams=[1])
    assert set(measured.parts) == set(profile.PLACES)
    assert not [part for part, taken in measured.parts.items() if taken == 0]
    assert min(measured.parts[part] for part in ("decode", "engine's turns", "parent's turns", "client")) > 0
    assert measured.rate > 0


def spin(seconds: float) -> None:
    until = thread_time() + seconds
    while thread_time() < until:
        pass


def test_time_within_another_part_counts_for_the_inner_one() -> None:
    clocks = Clocks()
    inner = clocks.around("inner", lambda: spin(0.03))

    def work() -> None:
        spin(0.01)
        inner()
        spin(0.01)

    clocks.around("outer", work)()
    inner()
    assert 0.055e9 < clocks.spent["inner"] < 0.09e9
    assert 0.015e9 < clocks.spent["outer"] < 0.04e9


def test_wait_is_the_time_between_two_steps_in_which_the_thread_did_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks, wall, cpu = Clocks(), 0, 0
    monkeypatch.setattr(module, "perf_counter_ns", lambda: wall)
    monkeypatch.setattr(module, "thread_time_ns", lambda: cpu)

    def run(ns: int, *, waits: int = 0) -> None:
        nonlocal wall, cpu
        wall, cpu = wall + ns + waits, cpu + ns

    step, idle = clocks.between(lambda: run(100, waits=50)), clocks.idling(lambda: run(0, waits=1000))
    step()
    run(7, waits=30)
    step()
    run(7, waits=4)
    step()
    assert clocks.spent[WAIT] == 34
    idle()
    step()
    assert clocks.spent[WAIT] == 34, "nothing was to be computed"
