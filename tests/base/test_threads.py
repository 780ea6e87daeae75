"""Accounts of real processes: starved, stopped, sleeping, busy, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llamaslot.base import threads as module
from llamaslot.base.threads import has_ended, is_suspended, process_times, starved_seconds

BUSY, ASLEEP = "while True: pass", "import time; time.sleep(1000)"
needs_accounts = pytest.mark.skipif(
    sys.platform != "linux", reason="the system does not tell how long threads wait"
)


@contextmanager
def running(source: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", f"print(flush=True)\n{source}"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def starved(pid: int, seconds: float = 0.4) -> float:
    """Fraction of the time for which a process did not get a CPU."""
    before = process_times(pid, time.monotonic())
    time.sleep(seconds)
    after = process_times(pid, time.monotonic())
    return starved_seconds(before, after) / (after.at - before.at)


@needs_accounts
def test_a_process_that_others_keep_from_running_is_starved() -> None:
    cpu = min(os.sched_getaffinity(0))
    with running(BUSY) as other, running(BUSY) as own:
        for each in (other, own):
            os.sched_setaffinity(each.pid, {cpu})
        os.setpriority(os.PRIO_PROCESS, own.pid, 19)
        assert starved(own.pid) > 0.7


def test_a_process_that_waits_for_something_else_is_not_starved() -> None:
    with running(ASLEEP) as process:
        assert starved(process.pid) < 0.3


def test_a_stopped_process_is_starved_until_it_goes_on() -> None:
    with running(BUSY) as process:
        os.kill(process.pid, signal.SIGSTOP)
        while not is_suspended(process.pid):
            time.sleep(0.01)
        assert starved(process.pid) > 0.9
        os.kill(process.pid, signal.SIGCONT)
        while is_suspended(process.pid):
            time.sleep(0.01)
        assert not has_ended(process.pid)


def test_a_process_that_is_not_reaped_has_ended() -> None:
    with running(ASLEEP) as process:
        assert not has_ended(process.pid)
        process.kill()
        while not has_ended(process.pid):
            time.sleep(0.01)
    assert has_ended(process.pid)
    assert process_times(process.pid, 1.0) == process_times(process.pid, 1.0)


@pytest.mark.parametrize(
    ("cpu_s", "is_suspended", "expected"),
    [(10.0, False, 0.0), (4.0, False, 6.0), (0.05, False, 0.0), (0.0, True, 10.0)],
)
def test_without_accounts_of_threads_cpu_time_tells(cpu_s: float, is_suspended: bool, expected: float) -> None:
    before = module.ProcessTimes(0.0, {}, 1.0)
    assert starved_seconds(before, module.ProcessTimes(10.0, {}, 1.0 + cpu_s, is_suspended)) == pytest.approx(
        expected
    )
