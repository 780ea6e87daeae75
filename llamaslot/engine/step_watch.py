"""Step watch: notices a step that takes far longer than expected, such as one in which a GPU driver hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FACTOR = 20
"""Times its expected duration that a step may take."""
_INTERVAL_S = 0.5


class StepWatch:
    """Limits steps to `seconds`, or to `_FACTOR` times what they are expected to take if that is longer.

    With 0 there is no limit. `begin` is called on the event loop (planning) and on the model thread (each step),
    `end` when nothing is left to do.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
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

    def allow_for_pause(self, slept: float) -> None:
        """Move the limit if the whole process was stopped while the thread slept, such as by `docker pause`."""
        deadline = self._deadline
        if slept > 2 * _INTERVAL_S and deadline is not None:
            self._deadline = deadline + slept

    def run(self, on_overdue: Callable[[], None]) -> None:
        """Watch on a thread of its own for as long as the process lives; it sleeps while no step runs."""
        threading.Thread(target=self._run, args=(on_overdue,), name="llamaslot-watch", daemon=True).start()

    def _run(self, on_overdue: Callable[[], None]) -> None:
        while True:
            self._is_active.wait()
            slept = self._clock()
            time.sleep(_INTERVAL_S)
            self.allow_for_pause(self._clock() - slept)
            if self.is_overdue:
                on_overdue()
                return
            self._is_active.clear()
            if self._deadline is not None:
                self._is_active.set()
