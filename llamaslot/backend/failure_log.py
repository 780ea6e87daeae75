"""Rate-limited log of failures of disk and remote store: any call may fail, so one line an event in 30 seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

_INTERVAL_S = 30.0
"""Time between two lines of a kind."""
_log = structlog.get_logger(__name__)


class FailureLog:
    """Logs failures; `clock` gives seconds. Threads may share it: at worst a line is logged twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._n_unlogged: dict[str, int] = {}

    def add(self, event: str, error: BaseException, **values: object) -> None:
        """Log a failure, unless one of this event was logged a moment ago: then count it for the next line."""
        now = self._clock()
        if event in self._logged_at and now - self._logged_at[event] < _INTERVAL_S:
            self._n_unlogged[event] = self._n_unlogged.get(event, 0) + 1
            return
        self._logged_at[event] = now
        if n_unlogged := self._n_unlogged.pop(event, 0):
            values["not_logged_before"] = n_unlogged
        _log.warning(event, **values, error=str(error) or type(error).__name__)
