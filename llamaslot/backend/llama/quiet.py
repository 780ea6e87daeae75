"""The rule for every measurement whose result is kept: it counts only if other programs did not disturb it.

Other programs that use the CPUs can make times several times as long, and the result would be used for a week. So
each measurement checks between its parts how long threads waited for a CPU, and whether equal work took equal time,
which also detects other users of a GPU. The first disturbed part ends the measurement.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llamaslot.base.process_times import thread_times

MAX_WAITING_SHARE = 0.1
"""Largest fraction of the time that threads may have waited for a CPU."""
MIN_WAITING_S = 0.005
"""Shorter waits, of a few time slices, never count."""
MAX_SPREAD = 1.5
"""Largest ratio of the median time of equal work to the shortest time."""


class DisturbedError(Exception):
    """Other programs disturbed a measurement; the message says how."""


class StoppedError(Exception):
    """The measurement was stopped on request."""


class Clocks(NamedTuple):
    """Clocks of this process, in seconds."""

    wall_s: float
    thread_s: float
    """CPU time of the calling thread."""
    waits_s: dict[int, float] | None
    """Time that each thread has waited for a CPU; None if the system does not report it."""


class Quiet:
    """Watches measurements on one thread. `should_stop` is called at each check.

    With `exceeds_cpus` this process has more threads than can run at once. They wait for each other, which says
    nothing about other programs, so only the times of equal work are compared.
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
        """Raise `DisturbedError` if threads waited for CPUs since `begin`, and `StoppedError` on request."""
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
        """Raise `DisturbedError` if equal work took very different times."""
        if statistics.median(seconds) > MAX_SPREAD * min(seconds) + MIN_WAITING_S:
            raise DisturbedError(f"the same work took {min(seconds):.3f} to {max(seconds):.3f} s")


def read_clocks() -> Clocks:
    """Read the clocks."""
    waits = {thread: each.waited_s for thread, each in thread_times(os.getpid()).items()}
    return Clocks(time.perf_counter(), time.thread_time(), waits or None)


def waited_s(before: Clocks, after: Clocks, *, on_cpu: bool) -> float:
    """Return how long threads of this process waited for a CPU between two readings on the same thread.

    If the system does not report that, it is the time in which the calling thread did not run; but 0 if the model
    is not computed `on_cpu`, because a thread that waits for a GPU does not run either.
    """
    if before.waits_s is not None and after.waits_s is not None:
        return sum(max(0.0, s - before.waits_s.get(thread, 0.0)) for thread, s in after.waits_s.items())
    if not on_cpu:
        return 0.0
    return max(0.0, (after.wall_s - before.wall_s) - (after.thread_s - before.thread_s))
