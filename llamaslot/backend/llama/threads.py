"""The number of threads that a step computes with: fewer while other programs use the CPUs.

llama.cpp's threads wait for each other after each of a step's hundreds of operations. If one of them has to wait
for a CPU, all of them do: two threads beside one busy process on two CPUs decoded 21 tokens/s, one thread 119
(alone 145 and 122; SmolLM2-135M). A single thread waits for nobody.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from llamaslot.backend.host import CpuTimes, cpu_times

_INTERVAL_S = 0.25
_MAX_READING_FRACTION = 0.005
"""Of the time, for reading the CPU times. That takes longer with many CPUs."""
_IGNORED_CPUS = 1 / 3
"""CPU time that others may use, in CPUs, such as clients of this server, before a thread is left out for them."""


class StepThreads:
    """Chooses the number of threads, at most `n`; `read` returns the CPU times so far."""

    def __init__(self, n: int, read: Callable[[], CpuTimes] = cpu_times) -> None:
        self._n = n
        self.n_now = n
        """The number chosen last."""
        self._read = read
        self._last: CpuTimes | None = None
        self._due = 0.0

    def choose(self) -> int:
        """Return the number of threads for a step that begins now."""
        if self._n > 1 and time.perf_counter() >= self._due:
            self._update()
        return self.n_now

    def _update(self) -> None:
        started = time.perf_counter()
        now, last = self._read(), self._last
        self._last = now
        self._due = started + max(_INTERVAL_S, (time.perf_counter() - started) / _MAX_READING_FRACTION)
        if last is None or now.clock <= last.clock:
            return
        others = ((now.all - last.all) - (now.own - last.own)) / (now.clock - last.clock)
        n_left_out = max(0, math.ceil(others - _IGNORED_CPUS))
        self.n_now = max(1, min(self._n, now.n_cpus - n_left_out))
