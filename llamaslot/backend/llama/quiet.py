"""The rule for every measurement whose result is kept: it counts only if nothing else disturbed it.

Other programs that use the CPUs make times many times as long, and what was measured then would be used for a week.
So each measurement checks between its parts how long threads waited for a CPU, and whether equal work took equal
time, which also shows a GPU that others use. The first part that was disturbed ends it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llamaslot.base.process_times import thread_times

MAX_WAITING_SHARE = 0.1
"""Fraction of the time that threads may have waited for a CPU."""
MIN_WAITING_S = 0.005
"""Waiting that is too short to matter: a few time slices."""
MAX_SPREAD = 1.5
"""Median of the times of equal work, in relation to the shortest."""


class DisturbedError(Exception):
    """Other programs disturbed a measurement; the message says how."""


class StoppedError(Exception):
    """The measurement was to be stopped."""


class Clocks(NamedTuple):
    """Clocks of this process, in seconds."""

    wall_s: float
    thread_s: float
    """CPU time of the calling thread."""
    waits_s: dict[int, float] | None
    """Time for which each thread waited for a CPU; None where the system does not tell."""


class Quiet:
    """Watches one measurement after the other on one thread. `should_stop` is asked at each check.

    With `exceeds_cpus` this process has more threads than can run at once: they wait for each other, which says
    nothing about other programs, so only equal work is compared.
    """

    def __init__(
        self, *, on_cpu: bool, exceeds_cpus: bool = False, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._on_cpu = on_cpu
        self._exceeds_cpus = exceeds_cpus
        self._should_stop = should_stop
        self._before = read_clocks()

    def begin(self) -> None:
        """Begin the next measurement."""
        self._before = read_clocks()

    def check(self) -> None:
        """Raise `DisturbedError` if threads waited for CPUs since `begin`, `StoppedError` if it is to stop."""
        if self._should_stop():
            raise StoppedError
        if self._exceeds_cpus:
            return
        after = read_clocks()
        seconds = after.wall_s - self._before.wall_s
        waited = waited_s(self._before, after, on_cpu=self._on_cpu)
        if waited > max(MIN_WAITING_S, MAX_WAITING_SHARE * seconds):
            raise DisturbedError(f"threads waited {waited:.2f} s for CPUs within {seconds:.2f} s")

    @staticmethod
    def compare(seconds: Sequence[float]) -> None:
        """Raise `DisturbedError` if equal work took unequal times."""
        if statistics.median(seconds) > MAX_SPREAD * min(seconds) + MIN_WAITING_S:
            raise DisturbedError(f"the same work took {min(seconds):.3f} to {max(seconds):.3f} s")


def read_clocks() -> Clocks:
    """Return the clocks now."""
    waits = {thread: each.waited_s for thread, each in thread_times(os.getpid()).items()}
    return Clocks(time.perf_counter(), time.thread_time(), waits or None)


def waited_s(before: Clocks, after: Clocks, *, on_cpu: bool) -> float:
    """Return how long threads of this process waited for a CPU between two readings of one thread.

    Where the system does not tell, it is the time in which the calling thread did not run; 0 unless the model is
    computed `on_cpu`, since a thread that waits for a GPU does not run either.
    """
    if before.waits_s is not None and after.waits_s is not None:
        return sum(max(0.0, s - before.waits_s.get(thread, 0.0)) for thread, s in after.waits_s.items())
    if not on_cpu:
        return 0.0
    return max(0.0, (after.wall_s - before.wall_s) - (after.thread_s - before.thread_s))
