"""The self-test of reuse, if it would have taken too long at load: it runs later, when no request runs.

Until it has passed, nothing is reused. If the model is reused by checkpoints, KV and checkpoints of requests are
kept already (`KVCache.is_on_trial`), to be reused once the test has passed, and dropped if it fails. If it fails,
nothing is ever reused, and the log has the reason.

The test runs in the context of the requests, whose sequences are set aside meanwhile. It never runs beside a
request, because that request's state would be lost: llama.cpp may be unable to save it. So:

    idle                        it runs; the first time, an incoming command stops it and need not wait
    after `_OVERDUE_S`          it runs as soon as no request runs, even if others wait
    after `_OVERDUE_S` more     if some request is always running, none is admitted for at most `_MAX_HOLD_S`
    after `_HOLD_EVERY_S`       the same again, if a request ran longer than that
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from llamaslot.base.backend import Backend
from llamaslot.base.events import SelfTestEnded
from llamaslot.base.stats import Miss

_MAX_STARTS = 2
"""Most starts of the test. The last one is not stopped: commands wait for it."""
_OVERDUE_S = 10.0
_MAX_HOLD_S = 20.0
_HOLD_EVERY_S = 300.0

_log = structlog.get_logger(__name__)


class PendingSelfTest:
    """The pending self-test of a backend: when it is due, and whether its result allows reuse."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._clock = clock
        self._since = clock()
        self._n_started = 0
        if self.is_pending:
            _log.warning("reuse.pending", reason=backend.info.self_test_note)

    @property
    def is_pending(self) -> bool:
        """True if the self-test is still to be run."""
        return self._backend.info.self_test == "pending"

    @property
    def why_not_reused(self) -> Miss:
        """Reason why requests reuse nothing now; empty if the self-test allows reuse."""
        match self._backend.info.self_test:
            case "pending":
                return "self_test_pending"
            case "failed":
                return "self_test_failed"
            case _:
                return ""

    def is_due(self, *, is_waiting: bool) -> bool:
        """Return True if the test should run now that no request runs; `is_waiting` is True if any waits."""
        return self.is_pending and (not is_waiting or self._overdue_s > 0)

    @property
    def holds_requests(self) -> bool:
        """True if no further request should be admitted, so that the test can run."""
        held_s = self._overdue_s - _OVERDUE_S
        return self.is_pending and held_s > 0 and held_s % _HOLD_EVERY_S < _MAX_HOLD_S

    async def run(
        self,
        call: Callable[[Callable[[], bool]], Awaitable[bool]],
        *,
        is_busy: Callable[[], bool],
        is_stopping: Callable[[], bool],
    ) -> SelfTestEnded | None:
        """Run the self-test on the model thread, through `call`; returns None if it was stopped for other work."""
        self._n_started += 1
        may_stop = self._n_started < _MAX_STARTS and self._overdue_s <= 0

        def should_stop() -> bool:
            return is_stopping() or (may_stop and is_busy())

        if not await call(lambda: self._backend.run_self_test(should_stop)):
            return None
        info = self._backend.info
        if info.self_test == "passed":
            _log.info("reuse.on")
        else:
            _log.warning("reuse.off", reason=info.self_test_note)
        return SelfTestEnded(info)

    @property
    def _overdue_s(self) -> float:
        return self._clock() - self._since - _OVERDUE_S
