"""Measurements while the engine runs: the self-test of reuse and costs, if they are pending, and free memory.

The self-test is pending if it would have taken too long at load. It runs later, when no request runs. Until it has
passed, nothing is reused. If the model is reused by checkpoints, KV and checkpoints of requests are kept already
(`CacheSettings.is_on_trial`), to be reused once the test has passed, and dropped if it fails. If it fails, nothing
is ever reused, and the log has the reason.

The test runs in the context of the requests, whose sequences are set aside meanwhile. It never runs beside a
request, because that request's state would be lost: llama.cpp may be unable to save it. So:

    idle                        it runs; the first time, an incoming command stops it and need not wait
    after `_OVERDUE_S`          it runs as soon as no request runs, even if others wait
    after `_OVERDUE_S` more     if some request is always running, none is admitted for at most `_MAX_HOLD_S`
    after `_HOLD_EVERY_S`       the same again, if a request ran longer than that

Costs are pending if no earlier start has kept them, or if other programs used the CPU. They are measured while the
server idles.

Free memory is read regularly, on a thread, and the budget of the RAM tier adapted to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import structlog

from llamaslot.base.backend import Backend
from llamaslot.base.events import ModelInfoChanged
from llamaslot.base.stats import Miss
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.tiers.budget import MemoryReading, RamState

_log = structlog.get_logger(__name__)

_MAX_STARTS = 2
"""Most starts of the test. The last one is not stopped: commands wait for it."""
_OVERDUE_S = 10.0
_MAX_HOLD_S = 20.0
_HOLD_EVERY_S = 300.0
IDLE_S = 2.0
"""Time without work after which pending costs are measured."""
_RETRY_S = 10.0
"""Time until the next try. Doubled with each try, because a try takes CPU time that other programs want."""
_MAX_RETRY_S = 600.0
"""Longest time between two tries."""
_STOP_PAUSE_S = 1.0
"""Pause after a measurement was stopped for a command. Doubled each time, because commands may keep coming."""
_MAX_STOP_PAUSE_S = 60.0
_MEMORY_INTERVAL_S = 2.0
"""Time between two readings of free memory."""
_MIB = 2**20

ReadMemory: TypeAlias = Callable[[], MemoryReading]


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
    ) -> ModelInfoChanged | None:
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
        return ModelInfoChanged(info)

    @property
    def _overdue_s(self) -> float:
        return self._clock() - self._since - _OVERDUE_S


class PendingCosts:
    """Decides when to measure pending costs of a backend. Times are seconds on the caller's clock."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._idle_since: float | None = None
        self._not_before = 0.0
        self._retry_s = _RETRY_S
        self._stop_pause_s = _STOP_PAUSE_S
        self._reason = backend.info.costs_pending
        if self._reason:
            _log.info("costs.pending", reason=self._reason)

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

    def stopped(self, now: float) -> None:
        """Try again once the server idles: a command came meanwhile."""
        self._idle_since = None
        self._not_before = now + self._stop_pause_s
        self._stop_pause_s = min(2 * self._stop_pause_s, _MAX_STOP_PAUSE_S)

    async def measure(
        self, call: Callable[[Callable[[], bool]], Awaitable[bool]], should_stop: Callable[[], bool]
    ) -> bool:
        """Measure on the model thread, through `call`; returns False if that was disturbed or stopped."""
        is_measured, info = await call(lambda: self._backend.measure_costs(should_stop)), self._backend.info
        if not is_measured:
            if info.costs_pending != self._reason:
                self._reason = info.costs_pending
                _log.warning("costs.pending", reason=self._reason)
            return False
        cost = info.kv_cost
        _log.info(
            "costs.measured",
            prefill_us=round(cost.prefill_us, 1) if cost is not None else None,
            load_us=round(cost.load_us, 2) if cost is not None else None,
        )
        return True


async def watch_memory(
    read: ReadMemory, cache: KVCache, wake: Callable[[], None], clock: Callable[[], float]
) -> None:
    """Adapt the budget of the RAM tier to the free memory until cancelled; returns at once without a RAM tier.

    `wake` makes the engine plan, which evicts what exceeds the budget.
    """
    is_readable, budget = True, cache.ram_budget
    while budget.max_bytes:
        try:
            reading = await asyncio.to_thread(read)
        except Exception as error:
            # The next reading may succeed: files in /proc and /sys can be missing or incomplete for a moment.
            if is_readable:
                _log.error("memory.unreadable", error=str(error))
            is_readable = False
        else:
            is_readable = True
            before = budget.n_bytes
            _adapt_budget(cache, reading, clock())
            if budget.n_bytes != before:
                wake()
        await asyncio.sleep(_MEMORY_INTERVAL_S)


def _adapt_budget(cache: KVCache, reading: MemoryReading, now: float) -> None:
    """Adapt the budget to a reading. Each change of its state is logged once."""
    budget, n_used = cache.ram_budget, cache.stats().ram.used_bytes
    if not budget.observe(reading, n_used, now):
        return
    facts = {
        "reason": budget.reason,
        "free_mib": reading.free // _MIB,
        "used_mib": n_used // _MIB,
        "limit_mib": budget.n_bytes // _MIB,
    }
    if budget.state is not RamState.REDUCED:
        _log.info(f"ram.{budget.state.value}", **facts)
    elif budget.is_fixed:
        _log.warning("ram.memory_short", **facts, advice="--cache-ram auto would give memory back")
    else:
        _log.warning("ram.reduced", **facts)
