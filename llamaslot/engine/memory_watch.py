"""Memory watch: regularly reads the free memory, on a thread, and adapts the budget of the RAM tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import structlog

from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.tiers.budget import MemoryReading, RamState

_INTERVAL_S = 2.0
"""Time between two readings."""
_MIB = 2**20

_log = structlog.get_logger(__name__)
ReadMemory: TypeAlias = Callable[[], MemoryReading]


class MemoryWatch:
    """Watches memory for `cache`. `wake` makes the engine plan, which evicts what exceeds the budget."""

    def __init__(
        self, read: ReadMemory, cache: KVCache, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._read = read
        self._cache = cache
        self._budget = cache.ram_budget
        self._wake = wake
        self._clock = clock

    async def run(self) -> None:
        """Watch until cancelled; returns at once without a RAM tier."""
        is_readable = True
        while self._budget.max_bytes:
            try:
                reading = await asyncio.to_thread(self._read)
            except Exception as error:
                # The next reading may succeed: files in /proc and /sys can be missing or incomplete for a moment.
                if is_readable:
                    _log.error("memory.unreadable", error=str(error))
                is_readable = False
            else:
                is_readable = True
                self.observe(reading)
            await asyncio.sleep(_INTERVAL_S)

    def observe(self, reading: MemoryReading) -> None:
        """Adapt the budget to a reading. Each change of its state is logged once."""
        budget = self._budget
        before = budget.n_bytes
        n_used = self._cache.stats().ram.used_bytes
        if budget.observe(reading, n_used, self._clock()):
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
        if budget.n_bytes != before:
            self._wake()
