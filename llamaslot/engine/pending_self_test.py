"""The self-test of reuse, where it took too long at load: run while nothing else is to be done.

Until then nothing of the model is reused. A model that fails is never reused; the log has the reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from llamaslot.base.backend import Backend
from llamaslot.base.events import SelfTestEnded

_MAX_STARTS = 2
"""Times that the test is started. An incoming command stops it, so as not to wait; the last time the command waits,
since a server that is never idle for long enough would else never reuse anything.
"""

_log = structlog.get_logger(__name__)


class PendingSelfTest:
    """The self-test of one backend: if it is pending, and whether its result allows reuse."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._n_started = 0

    @property
    def is_pending(self) -> bool:
        """True if the self-test is still to be run."""
        return self._backend.info.self_test == "pending"

    @property
    def allows_reuse(self) -> bool:
        """True unless the self-test is pending or has failed."""
        return self._backend.info.self_test in ("", "passed")

    async def run(
        self,
        call: Callable[[Callable[[], bool]], Awaitable[bool]],
        *,
        is_busy: Callable[[], bool],
        is_stopping: Callable[[], bool],
    ) -> SelfTestEnded | None:
        """Run the self-test by `call`, on the thread that computes; None if it was stopped for other work."""
        self._n_started += 1
        may_stop = self._n_started < _MAX_STARTS

        def should_stop() -> bool:
            return is_stopping() or (may_stop and is_busy())

        if not await call(lambda: self._backend.run_self_test(should_stop)):
            return None
        info = self._backend.info
        if info.self_test == "passed":
            _log.info("reuse.on")
        else:
            _log.warning("reuse.off", reason=info.self_test_reason)
        return SelfTestEnded(info)
