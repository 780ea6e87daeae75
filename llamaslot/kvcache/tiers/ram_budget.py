"""Budget of the RAM tier while the server runs: it follows the memory that is free, within `--cache-ram`.

The tier never grows into the last free memory, and gives memory back when other programs need it. It grows again
once memory has been ample for a while.

    normal   --short, critical-->  reduced  --calm-->  growing  --grown-->  normal
                                      ^                   |
                                      +--short, critical--+

Memory is short if less than a reserve is free, or if tasks wait for memory (Linux), or macOS warns of it. Of a part
that is to be given back, what is on disk too goes first. If memory is critical, all is given back. Sizes are bytes,
times are seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CALM_S = 30.0
"""Time for which memory has to be ample until the tier grows again."""
GROWTH_FRACTION = 1 / 16
"""Fraction of the largest budget by which it grows with each reading."""
_MAX_RESERVE_BYTES = 2**30
_RESERVE_FRACTION = 0.1
"""Memory that should stay free: this fraction of all, at most `_MAX_RESERVE_BYTES`."""
_CRITICAL_RESERVES, _MARGIN_RESERVES, _AMPLE_RESERVES = 0.4, 1.5, 2.0
"""Free memory in reserves: critical below the first; the tier may grow down to the second; ample from the third on.
"""
_PLAUSIBLE_FREE_FRACTION = 0.25
"""Waiting counts only if less than this is free: else it is that of others, at the limit of their control group."""
_SHORT_WAITING, _CRITICAL_WAITING, _AMPLE_WAITING = 0.1, 0.25, 0.01
"""Fractions of the time since the last reading: some task waiting, all waiting, and hardly any."""
_CUT_FRACTION = 0.25
"""Fraction of what the tier uses that it gives back at a time if it is not known how much is needed."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of the host, or of the control groups that limit this process, at one time."""

    free: int
    """Bytes to be had without taking any that are in use; weights in use do not count as free."""
    total: int
    some_waiting: float = 0.0
    """Fraction of the time since the last reading in which some task waited for memory."""
    all_waiting: float = 0.0
    """The same for all tasks that had something to do."""
    is_warned: bool = False
    """True if the system (macOS) warns that memory is short."""
    is_critical: bool = False
    """True if it says that memory is critical."""


class RamState(Enum):
    """States of the budget."""

    NORMAL = "normal"
    REDUCED = "reduced"
    GROWING = "growing"


class MemoryEvent(Enum):
    """Judgements of a reading; `CALM` and `GROWN` take the budget's history into account."""

    AMPLE = "ample"
    TIGHT = "neither ample nor short"
    SHORT = "short"
    CRITICAL = "critical"
    CALM = "ample for a while"
    GROWN = "nothing but free memory limits the budget"


S, E = RamState, MemoryEvent
RAM_TABLE: dict[tuple[RamState, MemoryEvent], RamState] = {
    **{(state, event): state for state in S for event in E},
    **{(state, event): S.REDUCED for state in S for event in (E.SHORT, E.CRITICAL)},
    (S.REDUCED, E.CALM): S.GROWING,
    (S.GROWING, E.GROWN): S.NORMAL,
}
"""Next state for every pair."""


class RamBudget:
    """Budget of at most `max_bytes`; a fixed one only says when memory is short."""

    def __init__(self, max_bytes: int, *, is_fixed: bool = True) -> None:
        self.max_bytes = max_bytes
        self.is_fixed = is_fixed
        self.state = S.NORMAL
        self.reason = ""
        """Why the budget is less than `max_bytes`, or would be if it were not fixed."""
        self._bytes = max_bytes
        self._ample_since: float | None = None

    @property
    def n_bytes(self) -> int:
        """The budget now."""
        return self.max_bytes if self.is_fixed else self._bytes

    def observe(self, reading: MemoryReading, n_used: int, now: float) -> bool:
        """Follow a reading while the tier uses `n_used` bytes; True if the state has changed."""
        before = self.state
        reserve = min(int(reading.total * _RESERVE_FRACTION), _MAX_RESERVE_BYTES)
        event, reason = _judge(reading, reserve)
        if event is not E.AMPLE:
            self._ample_since = None
        elif self._ample_since is None:
            self._ample_since = now
        elif now - self._ample_since >= CALM_S:
            event = E.CALM
        self.state = RAM_TABLE[self.state, event]
        # The most that the tier may have without growing into the last free memory.
        cap = min(self.max_bytes, n_used + max(0, reading.free - int(_MARGIN_RESERVES * reserve)))
        match event:
            case E.CRITICAL:
                self._bytes = 0
            case E.SHORT:
                n_missing = max(0, reserve - reading.free)
                self._bytes = min(self._bytes, max(0, n_used - (n_missing or int(n_used * _CUT_FRACTION))))
            case _ if self.state is S.NORMAL:
                self._bytes = cap
            case _ if self.state is S.REDUCED or event is E.TIGHT:
                self._bytes = min(self._bytes, cap)
            case _:
                self._bytes = min(cap, self._bytes + max(1, int(self.max_bytes * GROWTH_FRACTION)))
                if self._bytes == cap:
                    self.state = RAM_TABLE[self.state, E.GROWN]
        if self._bytes == self.max_bytes:
            self.reason = ""
        elif event in (E.SHORT, E.CRITICAL):
            self.reason = reason
        elif self.state is S.NORMAL:
            self.reason = "little free memory"
        return self.state is not before


def _judge(reading: MemoryReading, reserve: int) -> tuple[MemoryEvent, str]:
    """Judge a single reading; returns the reason if memory is short."""
    waits = reading.free < reading.total * _PLAUSIBLE_FREE_FRACTION
    some, everything = (reading.some_waiting, reading.all_waiting) if waits else (0.0, 0.0)
    for event, n_reserves, is_waiting, is_told in (
        (E.CRITICAL, _CRITICAL_RESERVES, everything >= _CRITICAL_WAITING, reading.is_critical),
        (E.SHORT, 1.0, some >= _SHORT_WAITING, reading.is_warned),
    ):
        if reading.free < n_reserves * reserve:
            return event, "little free memory"
        if is_waiting:
            return event, "programs wait for memory"
        if is_told:
            return event, "the system's warning"
    is_ample = reading.free >= _AMPLE_RESERVES * reserve and some < _AMPLE_WAITING
    return (E.AMPLE if is_ample else E.TIGHT), ""
