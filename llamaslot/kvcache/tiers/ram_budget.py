"""Budget of the RAM tier at run time: it follows free memory, up to `--cache-ram`.

The tier never takes the last free memory, and gives memory back when other programs need it. It grows again once
memory has been ample for a while.

    normal   --short, critical-->  reduced  --calm-->  growing  --grown-->  normal
                                      ^                   |
                                      +--short, critical--+

Memory is short if less than a reserve is free, if tasks wait for memory (Linux), or if macOS warns. Segments that
are also on disk are given back first. If memory is critical, the whole tier is given back. Sizes are bytes, times
are seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CALM_S = 30.0
"""How long memory has to be ample before the tier grows again."""
GROWTH_FRACTION = 1 / 16
"""Fraction of the largest budget by which the budget grows with each reading."""
_MAX_RESERVE_BYTES = 2**30
_RESERVE_FRACTION = 0.1
"""Reserve: memory that should stay free, as a fraction of all memory, at most `_MAX_RESERVE_BYTES`."""
_CRITICAL_RESERVES, _MARGIN_RESERVES, _AMPLE_RESERVES = 0.4, 1.5, 2.0
"""Multiples of the reserve: with less free memory than the first it is critical, the tier leaves at least the
second free when it grows, and from the third on memory is ample.
"""
_PLAUSIBLE_FREE_FRACTION = 0.25
"""Tasks waiting for memory count only if less than this fraction is free: otherwise they wait because of the limit
of their own control group.
"""
_SHORT_WAITING, _CRITICAL_WAITING, _AMPLE_WAITING = 0.1, 0.25, 0.01
"""Fractions of the time since the last reading: memory is short if some task waited so long, critical if all tasks
did, and ample if none waited longer.
"""
_CUT_FRACTION = 0.25
"""Fraction of its bytes that the tier gives back at a time if it is unknown how much is missing."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of the host, or of the control groups that limit this process, at one moment."""

    free: int
    """Bytes that can be allocated without taking any that are in use. Weights in use do not count as free."""
    total: int
    some_waiting: float = 0.0
    """Fraction of the time since the last reading in which some task waited for memory."""
    all_waiting: float = 0.0
    """The same, but all tasks that had work to do waited."""
    is_warned: bool = False
    """True if macOS warns that memory is short."""
    is_critical: bool = False
    """True if macOS says that memory is critical."""


class RamState(Enum):
    """States of the budget."""

    NORMAL = "normal"
    REDUCED = "reduced"
    GROWING = "growing"


class MemoryEvent(Enum):
    """Judgements of a reading; `CALM` and `GROWN` also depend on earlier readings."""

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
    """Budget of at most `max_bytes`. A fixed budget does not change, and only reports when memory is short."""

    def __init__(self, max_bytes: int, *, is_fixed: bool = True) -> None:
        self.max_bytes = max_bytes
        self.is_fixed = is_fixed
        self.state = S.NORMAL
        self.reason = ""
        """Reason why the budget is less than `max_bytes`, or would be if it were not fixed."""
        self._bytes = max_bytes
        self._ample_since: float | None = None

    @property
    def n_bytes(self) -> int:
        """The current budget in bytes."""
        return self.max_bytes if self.is_fixed else self._bytes

    def observe(self, reading: MemoryReading, n_used: int, now: float) -> bool:
        """Adapt to a reading while the tier uses `n_used` bytes; returns True if the state has changed."""
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
        # What the tier may have at most so that the margin stays free.
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
    """Judge a single reading; returns the judgement, and the reason if memory is short."""
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
