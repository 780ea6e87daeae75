"""Step watch: detects a step that takes far longer than expected, for example because a GPU driver hangs.

Time during which the process was stopped, or waited for a CPU that others used, does not count.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from llamaslot.base.threads import ProcessTimes, process_times, starved_seconds

_FACTOR = 20
"""Longest duration of a step, as a multiple of its expected duration."""
_INTERVAL_S = 0.5
"""Time between two checks of the running step."""


class StepWatch:
    """Limits steps to `seconds` (0 for no limit), or to `_FACTOR` times their expected duration if that is longer.

    `begin` is called on the event loop (for planning) and on the model thread (for each step), `end` when nothing
    is left to do. `read_times` returns the CPU times of this process, given the current time.
    """

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        read_times: Callable[[float], ProcessTimes] = lambda at: process_times(os.getpid(), at),
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._read_times = read_times
        self._watched: float | None = None
        """The deadline of the step that was in progress at the last `look`."""
        self._times: ProcessTimes | None = None
        """The CPU times read at the last `look`."""
        self._token_s = 0.0
        self._deadline: float | None = None
        self._is_active = threading.Event()

    def expect(self, prefill_us: float) -> None:
        """Set the measured microseconds to compute a token; 0 if unknown."""
        self._token_s = prefill_us / 1e6

    def begin(self, n_tokens: int = 0) -> None:
        """Record that a step of `n_tokens` begins, or (with 0) its planning."""
        if self._seconds:
            limit = max(self._seconds, _FACTOR * n_tokens * self._token_s)
            self._deadline = self._clock() + limit
            self._is_active.set()

    def end(self) -> None:
        """Record that no step is in progress."""
        self._deadline = None

    @property
    def is_overdue(self) -> bool:
        """True if the step in progress has exceeded its deadline."""
        deadline = self._deadline
        return deadline is not None and self._clock() > deadline

    def look(self, slept: float) -> bool:
        """Return True if the step in progress has exceeded its deadline.

        Must be called again and again, `slept` seconds after the last call.

        The deadline moves by the time that this process did not get a CPU. For a step that began since the last
        call, CPU times are not read: that would take longer than a short step.
        """
        deadline, times = self._deadline, None
        if deadline is not None and deadline == self._watched:
            times = self._read_times(self._clock())
            starved = starved_seconds(self._times, times) if self._times is not None else 0.0
            paused = slept if slept > 2 * _INTERVAL_S else 0.0
            # Meanwhile another step may have begun on the model thread, with its own deadline.
            if self._deadline == deadline:
                self._deadline = deadline + max(starved, paused)
        self._times = times
        self._watched = self._deadline
        return self.is_overdue

    def run(self, on_overdue: Callable[[], None]) -> None:
        """Start a thread that watches steps until the process ends, and sleeps while none is in progress."""
        threading.Thread(target=self._run, args=(on_overdue,), name="llamaslot-watch", daemon=True).start()

    def _run(self, on_overdue: Callable[[], None]) -> None:
        while True:
            self._is_active.wait()
            slept = self._clock()
            time.sleep(_INTERVAL_S)
            if self.look(self._clock() - slept):
                on_overdue()
                return
            self._is_active.clear()
            if self._deadline is not None:
                self._is_active.set()
