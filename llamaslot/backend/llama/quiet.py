"""The rule for every measurement whose result is kept: it counts only if nothing else disturbed it.

Other programs that use the CPUs make times many times as long, and what was measured then would be used for a week.
So each measurement checks between its parts how long threads waited for a CPU, and whether equal work took equal
time, which also shows a GPU that others use. The first part that was disturbed ends it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from llamaslot.backend import host_load

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


class Quiet:
    """Watches one measurement after the other on one thread. `should_stop` is asked at each check."""

    def __init__(self, *, on_cpu: bool, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._on_cpu = on_cpu
        self._should_stop = should_stop
        self._before = host_load.read()

    def begin(self) -> None:
        """Begin the next measurement."""
        self._before = host_load.read()

    def check(self) -> None:
        """Raise `DisturbedError` if threads waited for CPUs since `begin`, `StoppedError` if it is to stop."""
        if self._should_stop():
            raise StoppedError
        after = host_load.read()
        seconds = after.wall_s - self._before.wall_s
        waited = host_load.waited_s(self._before, after, on_cpu=self._on_cpu)
        if waited > max(MIN_WAITING_S, MAX_WAITING_SHARE * seconds):
            raise DisturbedError(f"threads waited {waited:.2f} s for CPUs within {seconds:.2f} s")

    @staticmethod
    def compare(seconds: Sequence[float]) -> None:
        """Raise `DisturbedError` if equal work took unequal times."""
        if statistics.median(seconds) > MAX_SPREAD * min(seconds) + MIN_WAITING_S:
            raise DisturbedError(f"the same work took {min(seconds):.3f} to {max(seconds):.3f} s")
