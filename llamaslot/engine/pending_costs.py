"""Costs that could not be measured at start because other programs used the CPU: measured while the server
idles.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from llamaslot.base.backend import Backend

IDLE_S = 2.0
"""Time without work after which they are measured."""
_RETRY_S = 10.0
"""Time until the next try. Doubled with each try, because a try takes CPU time that other programs want."""
_MAX_RETRY_S = 600.0
"""Longest time between two tries."""

_log = structlog.get_logger(__name__)


class PendingCosts:
    """Decides when to measure pending costs of a backend. Times are seconds on the caller's clock."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._idle_since: float | None = None
        self._not_before = 0.0
        self._retry_s = _RETRY_S
        if reason := backend.info.costs_pending:
            _log.warning("costs.pending", reason=reason)

    @property
    def due_at(self) -> float | None:
        """Time to measure if the server stays idle until then; None if no costs are pending, or it is busy."""
        if not self._backend.info.costs_pending or self._idle_since is None:
            return None
        return max(self._idle_since + IDLE_S, self._not_before)

    def note(self, now: float, *, is_idle: bool) -> None:
        """Record whether the server is idle."""
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def postpone(self, now: float) -> None:
        """Try again later."""
        self._not_before = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)

    async def measure(
        self, call: Callable[[Callable[[], bool]], Awaitable[bool]], should_stop: Callable[[], bool]
    ) -> bool:
        """Measure on the model thread, through `call`; returns False if that was disturbed or stopped."""
        if not await call(lambda: self._backend.measure_costs(should_stop)):
            return False
        info = self._backend.info
        cost = info.kv_cost
        _log.info(
            "costs.measured",
            prefill_us=round(cost.prefill_us, 1) if cost is not None else None,
            load_us=round(cost.load_us, 2) if cost is not None else None,
        )
        return True
