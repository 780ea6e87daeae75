"""How many threads a step gets, by what other programs use of the CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.backend.host import CpuTimes, cpu_times
from llamaslot.backend.llama import library
from llamaslot.backend.llama import threads as module
from llamaslot.backend.llama.llama_backend import LlamaBackend
from llamaslot.backend.llama.loading import LlamaSettings
from llamaslot.backend.llama.threads import StepThreads
from llamaslot.base.backend import Run, Status
from llamaslot.base.kv_ops import Remove

_WAIT_S = 30
LARGE = 17
"""Tokens of a step that is not small."""


class Machine:
    """CPU times of a machine on which other programs and this process use so many CPUs."""

    def __init__(self, n_cpus: int) -> None:
        self.now = CpuTimes(clock=100.0, n_cpus=n_cpus, all=1000.0, own=10.0)

    def read(self) -> CpuTimes:
        return self.now

    def run(self, seconds: float, *, others: float, own: float) -> None:
        now = self.now
        self.now = CpuTimes(
            now.clock + seconds, now.n_cpus, now.all + seconds * (others + own), now.own + seconds * own
        )


def until(is_true: Callable[[], bool], pause_s: float = 0.02) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(pause_s)


@pytest.fixture
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are read at each step, and no step comes after a pause."""
    monkeypatch.setattr(module, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "_MAX_READING_FRACTION", float("inf"))
    init = StepThreads.__init__

    def made(self: StepThreads, *args: Any) -> None:
        init(self, *args)
        self.ended_at = float("inf")

    monkeypatch.setattr(StepThreads, "__init__", made)


@pytest.mark.usefixtures("always_due")
@pytest.mark.parametrize(
    ("n", "n_cpus", "others", "own", "expected"),
    [
        (2, 2, 0.0, 2.0, 2),
        (2, 2, 0.3, 1.7, 2),  # its own clients
        (2, 2, 0.5, 1.5, 1),
        (2, 2, 1.0, 1.0, 1),
        (2, 2, 1.9, 0.1, 1),  # many busy processes
        (8, 8, 0.2, 7.8, 8),
        (8, 8, 1.0, 7.0, 7),
        (8, 8, 2.1, 5.9, 6),
        (8, 16, 7.0, 8.0, 8),  # others have CPUs of their own
        (8, 16, 9.0, 7.0, 7),
        (1, 1, 0.9, 0.1, 1),
        (4, 2, 0.0, 2.0, 2),  # a CPU set that has become smaller
    ],
)
def test_a_step_leaves_out_a_thread_for_each_cpu_that_others_use(
    n: int, n_cpus: int, others: float, own: float, expected: int
) -> None:
    machine = Machine(n_cpus)
    threads = StepThreads(n, machine.read)
    assert threads.choose(1) == n
    machine.run(0.5, others=others, own=own)
    assert threads.choose(1) == expected
    machine.run(0.5, others=0.0, own=own)
    assert threads.choose(1) == min(n, n_cpus)


@pytest.mark.usefixtures("always_due")
def test_a_large_step_keeps_a_thread_that_has_most_of_a_cpu() -> None:
    machine = Machine(2)
    threads = StepThreads(2, machine.read)
    threads.choose(1)
    machine.run(0.5, others=0.6, own=1.4)
    assert (threads.choose(1), threads.choose(LARGE)) == (1, 2)
    machine.run(0.5, others=1.0, own=1.0)
    assert (threads.choose(1), threads.choose(LARGE)) == (1, 1)


@pytest.mark.usefixtures("always_due")
def test_what_others_did_in_a_pause_does_not_count() -> None:
    machine = Machine(2)
    threads = StepThreads(2, machine.read)
    threads.choose(1)
    threads.ended_at = time.perf_counter()
    machine.run(20.0, others=2.0, own=0.0)
    assert (threads.choose(1), threads.choose(LARGE)) == (2, 2)
    threads.ended_at = float("inf")
    machine.run(0.5, others=1.9, own=0.1)
    assert (threads.choose(1), threads.choose(LARGE)) == (1, 1)
    threads.ended_at = time.perf_counter()
    machine.run(20.0, others=0.0, own=0.0)
    assert (threads.choose(1), threads.choose(LARGE)) == (1, 1), "the other program may go on"
    threads.ended_at = float("inf")
    machine.run(0.5, others=0.0, own=1.0)
    assert (threads.choose(1), threads.choose(LARGE)) == (2, 2)


@pytest.mark.usefixtures("always_due")
def test_a_measurement_begins_with_all_threads_and_knows_if_one_was_left_out_since() -> None:
    machine = Machine(2)
    threads = StepThreads(2, machine.read)
    threads.choose(1)
    machine.run(0.5, others=1.0, own=1.0)
    assert (threads.choose(1), threads.were_left_out) == (1, True)
    threads.use_all()
    machine.run(0.5, others=1.0, own=1.0)
    assert (threads.choose(1), threads.were_left_out) == (2, False)
    machine.run(0.5, others=1.0, own=1.0)
    assert (threads.choose(1), threads.were_left_out) == (1, True)
    machine.run(0.5, others=0.0, own=1.0)
    assert (threads.choose(1), threads.were_left_out) == (2, True), "it was for a while"


@pytest.mark.usefixtures("always_due")
def test_a_cpu_set_that_has_become_smaller_is_no_other_program() -> None:
    machine = Machine(2)
    threads = StepThreads(4, machine.read)
    threads.choose(1)
    machine.run(0.5, others=0.0, own=2.0)
    assert (threads.choose(1), threads.were_left_out) == (2, False)


@pytest.mark.usefixtures("always_due")
def test_without_cpu_times_all_threads_compute() -> None:
    machine = Machine(2)
    readings = iter([machine.now, None, machine.now, None])
    threads = StepThreads(2, lambda: next(readings))
    assert [threads.choose(1) for _ in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize("error", [PermissionError(), psutil.AccessDenied()])
def test_a_sandbox_may_hide_the_cpu_times(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    assert cpu_times() is None


def test_only_cpus_that_this_process_may_use_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with CPU 1 alone does not see what others do on CPU 0."""
    made = [SimpleNamespace(user=500.0, system=50.0, idle=5.0), SimpleNamespace(user=3.0, system=1.0, idle=90.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: made)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    read = cpu_times()
    assert read is not None
    assert (read.n_cpus, read.all) == (1, 4.0)


def test_times_are_read_more_rarely_where_that_takes_long() -> None:
    n_read = 0

    def read() -> CpuTimes:
        nonlocal n_read
        n_read += 1
        time.sleep(0.01)
        return Machine(2).now

    threads = StepThreads(2, read)
    started = time.perf_counter()
    while time.perf_counter() - started < 1:
        threads.choose(1)
    assert n_read == 1


@pytest.mark.usefixtures("always_due")
@given(
    n=st.integers(1, 64),
    n_cpus=st.integers(1, 64),
    uses=st.lists(st.tuples(st.floats(0, 10), st.floats(-1, 64), st.floats(0, 64)), max_size=8),
)
def test_the_number_is_never_illegal(n: int, n_cpus: int, uses: list[tuple[float, float, float]]) -> None:
    """Whatever the system reports: times that stand still, run backwards, or are more than there can be."""
    machine = Machine(n_cpus)
    threads = StepThreads(n, machine.read)
    for seconds, others, own in uses:
        machine.run(seconds, others=others, own=own)
        assert 1 <= threads.choose(1) <= threads.choose(LARGE) <= n


def test_times_are_not_read_at_each_step() -> None:
    n_read = 0

    def read() -> CpuTimes:
        nonlocal n_read
        n_read += 1
        return cpu_times()

    threads = StepThreads(2, read)
    started = time.perf_counter()
    while time.perf_counter() - started < 0.1:
        threads.choose(1)
    assert n_read == 1


def test_busy_processes_are_seen() -> None:
    """By the system's real times: of a process that uses a CPU, and of this one, which does not count as others."""

    def others_and_own() -> tuple[float, float]:
        now = cpu_times()
        assert now is not None
        return now.all - now.own, now.own

    others, own = others_and_own()
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: others_and_own()[0] - others > 0.3)
    finally:
        process.kill()
        process.wait()
    assert others_and_own()[1] - own < 0.2
    own = others_and_own()[1]
    until(lambda: others_and_own()[1] - own > 0.2, pause_s=0.0)


def test_a_chosen_number_of_threads_stays(tiny_model: Path) -> None:
    for settings in ({"n_threads": 2}, {"n_threads_batch": 2}):
        backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=256, n_slots=2, reuse_self_test="off", **settings))
        assert backend._threads is None
        backend.close()


def test_steps_of_a_gpu_are_not_delayed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "device_used", lambda _: "GPU0")
    monkeypatch.setattr(library, "page_locked_allocator", lambda: None)
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=256, n_slots=2, reuse_self_test="off"))
    assert backend._threads is None
    backend.close()


def test_the_context_computes_with_the_number_of_the_step(tiny_model: Path) -> None:
    """And computes the same tokens, whatever the number."""
    backend = LlamaBackend(LlamaSettings(tiny_model, n_ctx=256, n_slots=2, reuse_self_test="off"))
    tops = []
    for n in (1, 2):
        threads = backend._threads = StepThreads(n)
        threads._due = float("inf")
        start = 0
        for n_tokens in (17, 1, 2):
            tokens = np.arange(start, start + n_tokens, dtype=np.int32) % 50 + 1
            assert backend.decode([Run(0, start, tokens, 1)]).status is Status.OK
            start += n_tokens
            assert llama_cpp.llama_n_threads(backend._context) == n
            assert llama_cpp.llama_n_threads_batch(backend._context) == n
            assert backend.stats.n_step_threads == n
            tops.append((n_tokens, int(np.argmax(backend._logits(n_tokens - 1)))))
        backend.change(Remove(0, 0))
    assert tops[:3] == tops[3:]
    backend.close()
