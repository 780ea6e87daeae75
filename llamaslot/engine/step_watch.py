"""Step watch: notices a step that takes far longer than expected, such as one in which a GPU driver hangs.

Time in which the process was stopped, or had to wait for a CPU because others use them, does not count.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from llamaslot.base.process_times import ProcessTimes, process_times, starved_seconds

_FACTOR = 20
"""Times its expected duration that a step may take."""
_INTERVAL_S = 0.5


class StepWatch:
    """Limits steps to `seconds`, or to `_FACTOR` times what they are expected to take if that is longer.

    With 0 there is no limit. `begin` is called on the event loop (planning) and on the model thread (each step),
    `end` when nothing is left to do. `read_times` returns the accounts of this process at a time.
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
        """The limit of the step that was in progress at the last look."""
        self._times: ProcessTimes | None = None
        """The accounts at that time."""
        self._token_s = 0.0
        self._deadline: float | None = None
        self._is_active = threading.Event()

    def expect(self, prefill_us: float) -> None:
        """Set the microseconds that computing a token takes; 0 if that was not measured."""
        self._token_s = prefill_us / 1e6

    def begin(self, n_tokens: int = 0) -> None:
        """Note that a step of so many tokens begins, or its planning."""
        if self._seconds:
            limit = max(self._seconds, _FACTOR * n_tokens * self._token_s)
            self._deadline = self._clock() + limit
            self._is_active.set()

    def end(self) -> None:
        """Note that no step runs."""
        self._deadline = None

    @property
    def is_overdue(self) -> bool:
        """True if the step in progress has exceeded its limit."""
        deadline = self._deadline
        return deadline is not None and self._clock() > deadline

    def look(self, slept: float) -> bool:
        """Return true if the step in progress has exceeded its limit; to be called `slept` s after the last call.

        The limit moves by the time in which this process did not get a CPU. A step that began since the last call
        is not looked at: to read the accounts takes longer than a short step.
        """
        deadline, times = self._deadline, None
        if deadline is not None and deadline == self._watched:
            times = self._read_times(self._clock())
            starved = starved_seconds(self._times, times) if self._times is not None else 0.0
            paused = slept if slept > 2 * _INTERVAL_S else 0.0
            self._move(deadline, max(starved, paused))
        self._times = times
        self._watched = self._deadline
        return self.is_overdue

    def _move(self, deadline: float, seconds: float) -> None:
        # Another step may have begun on the model's thread.
        if self._deadline == deadline:
            self._deadline = deadline + seconds

    def run(self, on_overdue: Callable[[], None]) -> None:
        """Watch on a thread of its own for as long as the process lives; it sleeps while no step runs."""
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
