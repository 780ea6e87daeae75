"""How long threads of this process waited for a CPU that other programs used: times mean little then."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

_TASKS = Path("/proc/self/task")


class Reading(NamedTuple):
    """Clocks of this process, in seconds."""

    wall_s: float
    thread_s: float
    """CPU time of the calling thread."""
    delays_s: dict[str, float] | None
    """Time that each thread was ready to run, but had no CPU; None where the kernel does not count it."""


def read() -> Reading:
    """Return the clocks now."""
    return Reading(time.perf_counter(), time.thread_time(), _delays())


def waited_s(before: Reading, after: Reading, *, on_cpu: bool) -> float:
    """Return how long threads of this process waited for a CPU between two readings of one thread.

    Where the kernel does not count that, it is the time in which the calling thread did not run; 0 unless the model
    is computed `on_cpu`, since a thread that waits for a GPU does not run either.
    """
    if before.delays_s is not None and after.delays_s is not None:
        return sum(max(0.0, s - before.delays_s.get(thread, 0.0)) for thread, s in after.delays_s.items())
    if not on_cpu:
        return 0.0
    return max(0.0, (after.wall_s - before.wall_s) - (after.thread_s - before.thread_s))


def _delays() -> dict[str, float] | None:
    found = {}
    try:
        for task in _TASKS.iterdir():
            try:
                found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
            except (FileNotFoundError, ProcessLookupError):
                # A thread that has just ended, or a kernel that does not count.
                continue
    except (OSError, ValueError, IndexError):
        return None
    return found or None
