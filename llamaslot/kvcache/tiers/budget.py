"""Budgets of the tiers: which segments a tier has, which are evicted first, and how much RAM there is.

`SegmentLru` is the index of RAM, of the checkpoints in RAM, and of the disk, within a budget of bytes.
`TenantShares` decides whose segments are evicted first if several tenants use a tier.

`RamBudget` is the budget of RAM at run time: it follows free memory, up to `--cache-ram`. The tier never takes the
last free memory, and gives memory back when other programs need it. It grows again once memory has been ample for a
while.

    normal   --short, critical-->  reduced  --calm-->  growing  --grown-->  normal
                                      ^                   |
                                      +--short, critical--+

Memory is short if less than a reserve is free, if tasks wait for memory (Linux), or if macOS warns. Segments that
are also on disk are given back first. If memory is critical, the whole tier is given back. Sizes are bytes, times
are seconds on the caller's clock.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from llamaslot.base.callers import INACTIVE_S

if TYPE_CHECKING:
    # The parent process, which reads free memory, needs no numpy.
    from llamaslot.kvcache.nodes import Segment, SegmentRank


_MAX_STALE_ENTRIES = 64
"""A heap is rebuilt when it has this many entries more than twice the current segments: most are stale then."""
_NONE: Mapping[str, int] = {}


class SegmentLru:
    """LRU index of segments: at most `capacity` bytes in total, and `limit` for each API key (0 for no limit).

    Segments are ordered by `Segment.rank`, which increases when a segment is used, without notice to this index. So
    an entry of the heap may be outdated, but only too low: the rank of an entry that comes up is checked again.
    """

    def __init__(self, capacity: int, limit: int = 0) -> None:
        self.capacity = capacity
        """Bytes."""
        self.limit = limit
        self.used: Counter[str] = Counter()
        """Bytes of each tenant."""
        self.n_bytes = 0
        self.n_tokens = 0
        """Tokens whose KV is here."""
        self.n_bytes_put = 0
        """Bytes of all segments ever added."""
        self._segments: dict[int, Segment] = {}
        self._by_rank: dict[str, list[SegmentRank]] = {}
        """A heap for each tenant."""

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        """Iterate over all segments, in no particular order."""
        return iter(self._segments.values())

    def __contains__(self, segment: Segment) -> bool:
        """Return True if the segment is here."""
        return segment.number in self._segments

    def get(self, number: int) -> Segment | None:
        """Return the segment of this number, if it is here."""
        return self._segments.get(number)

    def put(self, segment: Segment) -> None:
        """Add a segment that is not here."""
        self._segments[segment.number] = segment
        self.n_bytes_put += segment.n_bytes
        self.n_bytes += segment.n_bytes
        self.n_tokens += segment.n_tokens
        self.used[segment.tenant] += segment.n_bytes
        heap = self._by_rank.setdefault(segment.tenant, [])
        heapq.heappush(heap, segment.rank)
        if len(heap) > 2 * len(self) + _MAX_STALE_ENTRIES:
            heap[:] = [each.rank for each in self if each.tenant == segment.tenant]
            heapq.heapify(heap)

    def remove(self, segment: Segment) -> None:
        """Remove a segment that is here."""
        del self._segments[segment.number]
        self.n_bytes -= segment.n_bytes
        self.n_tokens -= segment.n_tokens
        self.used[segment.tenant] -= segment.n_bytes
        if not self.used[segment.tenant]:
            del self.used[segment.tenant]
            del self._by_rank[segment.tenant]

    def exceeds_limit(self, tenant: str, n_bytes: int) -> bool:
        """True if `n_bytes` exceed the tenant's limit. Only API keys have one, not the nameless tenant."""
        return 0 < self.limit < n_bytes and bool(tenant)

    def oldest(
        self, may_evict: Callable[[Segment], bool], tenants: Collection[str] | None = None
    ) -> Segment | None:
        """Return the least recently used segment that may be evicted, of some tenants (None for all), if any."""
        each_oldest = [
            self._oldest_of(self._by_rank[tenant], may_evict)
            for tenant in (self.used if tenants is None else tenants)
            if tenant in self._by_rank
        ]
        return min(filter(None, each_oldest), key=lambda segment: segment.rank, default=None)

    def check(self) -> None:
        """Verify the sums and the limits; raises `AssertionError`."""
        assert self.n_bytes == sum(segment.n_bytes for segment in self) <= self.capacity
        assert self.n_tokens == sum(segment.n_tokens for segment in self)
        assert self.n_bytes == sum(self.used.values())
        assert not any(self.exceeds_limit(*each) for each in self.used.items())

    def _oldest_of(self, heap: list[SegmentRank], may_evict: Callable[[Segment], bool]) -> Segment | None:
        passed: list[SegmentRank] = []
        found = None
        while heap and found is None:
            rank = heapq.heappop(heap)
            segment = self._segments.get(rank.number)
            if segment is None:
                continue
            if rank != segment.rank:
                heapq.heappush(heap, segment.rank)
                continue
            passed.append(rank)
            if may_evict(segment):
                found = segment
        for each in passed:
            heapq.heappush(heap, each)
        return found


class TenantShares:
    """Shares of tenants: whose KV is evicted first if several tenants use a pool or a tier.

    All tenants with KV there have equal shares. KV beyond a tenant's share is evicted before that of tenants within
    their share, so no tenant can evict everything of the others by sending many prompts. Others may use the part of
    a share that its tenant does not fill. A tenant that has sent nothing for an hour has no share: all of its KV
    counts as beyond it. Times are seconds on the caller's clock. At the start all tenants count as active.
    """

    def __init__(self) -> None:
        self._started: float | None = None
        self._now = 0.0
        self._last_used: dict[str, float] = {}
        self.n_requests: Counter[str] = Counter()
        """Requests of each tenant that got a slot."""

    def tick(self, now: float) -> None:
        """Advance the clock."""
        self._now = now
        if self._started is None:
            self._started = now

    def keep_active(self, tenant: str) -> None:
        """Record that a tenant's KV is used, so that it keeps its share."""
        self._last_used[tenant] = self._now

    def use(self, tenant: str, *, is_new: bool = True) -> None:
        """Record that a tenant's request got a slot; `is_new` is False if it had one before."""
        self.keep_active(tenant)
        self.n_requests[tenant] += is_new

    def excess(
        self, used: Mapping[str, int], capacity: int, tenant: str | None = None, n: int = 0
    ) -> dict[str, int]:
        """Return by how much each tenant exceeds its share of `capacity`; negative for those below it.

        `used` has the amount of each tenant, in any unit; `tenant` is about to get `n` more.
        """
        amounts = {each: amount for each, amount in used.items() if amount}
        if tenant is not None and n:
            amounts[tenant] = amounts.get(tenant, 0) + n
        share = capacity // max(1, sum(map(self._is_active, amounts)))
        return {each: amount - share * self._is_active(each) for each, amount in amounts.items()}

    def losers(
        self, tier: SegmentLru, tenant: str, n_bytes: int, reserved: Mapping[str, int] = _NONE
    ) -> Collection[str]:
        """Return the tenants one of whom must lose a segment before `tenant` gets `n_bytes`; empty if they fit.

        `reserved` has further bytes of each tenant that the tier does not count itself.
        """
        used = {each: tier.used[each] + reserved.get(each, 0) for each in {*tier.used, *reserved}}
        if tier.exceeds_limit(tenant, used.get(tenant, 0) + n_bytes):
            return (tenant,)
        if sum(used.values()) + n_bytes <= tier.capacity:
            return ()
        return [each for each, n in self.excess(used, tier.capacity, tenant, n_bytes).items() if n > 0]

    def kept_by_others(self, tier: SegmentLru, tenant: str, n_bytes: int, kept: Mapping[str, int]) -> int:
        """Return the bytes that others keep if `tenant` gets `n_bytes`: up to their share, at least `kept`."""
        excess = self.excess(tier.used, tier.capacity, tenant, n_bytes)
        others = {*tier.used} - {tenant}
        return sum(max(kept.get(each, 0), tier.used[each] - max(0, excess.get(each, 0))) for each in others)

    def _is_active(self, tenant: str) -> bool:
        last_used = self._last_used.get(tenant, self._started if self._started is not None else self._now)
        return self._now - last_used < INACTIVE_S


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
    locked: int = 0
    """Bytes that were allocated for segments and are kept, whatever they hold."""


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
        # Evicting what is in locked memory would free nothing.
        self._bytes = max(self._bytes, min(reading.locked, self.max_bytes))
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
