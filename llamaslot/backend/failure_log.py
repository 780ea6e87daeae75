"""Rate-limited log of failures of disk and remote store: one line per event in 30 s, since any call may fail."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

_INTERVAL_S = 30.0
"""Least time between two lines of the same event."""
_log = structlog.get_logger(__name__)


class FailureLog:
    """Logs failures. `clock` returns seconds. Threads may share it: at worst a line is logged twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._n_unlogged: dict[str, int] = {}

    def add(self, event: str, error: BaseException, **values: object) -> None:
        """Log a failure; only count it for the next line if this event was logged less than 30 s ago."""
        now = self._clock()
        if event in self._logged_at and now - self._logged_at[event] < _INTERVAL_S:
            self._n_unlogged[event] = self._n_unlogged.get(event, 0) + 1
            return
        self._logged_at[event] = now
        if n_unlogged := self._n_unlogged.pop(event, 0):
            values["not_logged_before"] = n_unlogged
        _log.warning(event, **values, error=str(error) or type(error).__name__)
