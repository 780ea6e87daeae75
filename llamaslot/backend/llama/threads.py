"""The number of threads that a step computes with: fewer while other programs use the CPUs.

llama.cpp's threads wait for each other after each of a step's hundreds of operations. If one of them has to wait
for a CPU, all of them do: beside two busy processes on two CPUs, two threads decode 33 tokens/s and one 84 (alone
134 and 126; SmolLM2-135M, docs/install.md). A single thread waits for nobody.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from llamaslot.backend.host import CpuTimes, cpu_times

_SMALL_STEP_TOKENS = 16
"""Most tokens of a step that computes little between two waits."""
_INTERVAL_S = 0.25
"""Least time between two readings of the CPU times."""
_MAX_READING_FRACTION = 0.005
"""Of the time, for reading the CPU times. That takes longer with many CPUs."""
_IGNORED_CPUS = 1 / 3, 3 / 4
"""CPU time that others may use, in CPUs, such as clients of this server, before a thread is left out for them: in
small and in large steps, which lose less by waiting and more by a missing thread.
"""


class StepThreads:
    """Chooses the number of threads, at most `n`; `read` returns the CPU times so far, None if they are unknown."""

    def __init__(self, n: int, read: Callable[[], CpuTimes | None] = cpu_times) -> None:
        self._n = n
        self.n_small = self._n_large = n
        """Threads of a step of few tokens, and of a larger one."""
        self._read = read
        self._last: CpuTimes | None = None
        self._due = 0.0
        self.ended_at = 0.0
        """The time at which the last step ended, by `perf_counter`; set by the caller."""
        self.were_left_out = False
        """True if a thread was left out for other programs since `use_all`."""

    def use_all(self) -> None:
        """Compute with all threads, until the CPU times that are read from now on say otherwise."""
        self.n_small = self._n_large = self._n
        self._last, self._due = None, 0.0
        self.were_left_out = False

    def choose(self, n_tokens: int) -> int:
        """Return the number of threads for a step of so many tokens that begins now."""
        now = time.perf_counter()
        if self._n > 1 and now >= self._due:
            if now - self.ended_at > _INTERVAL_S:
                # What others did while this process was idle says little about now. The numbers stay: a program
                # that runs before a pause usually runs after it, too.
                self._last = None
            self._update(now)
        return self.n_small if n_tokens <= _SMALL_STEP_TOKENS else self._n_large

    def _update(self, started: float) -> None:
        now, last = self._read(), self._last
        self._last = now
        self._due = started + max(_INTERVAL_S, (time.perf_counter() - started) / _MAX_READING_FRACTION)
        if now is None or last is None or now.clock <= last.clock:
            return
        others = ((now.all - last.all) - (now.own - last.own)) / (now.clock - last.clock)
        self.n_small, self._n_large = (
            max(1, min(self._n, now.n_cpus - max(0, math.ceil(others - ignored)))) for ignored in _IGNORED_CPUS
        )
        self.were_left_out |= self.n_small < min(self._n, now.n_cpus)
