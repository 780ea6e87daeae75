"""Budget of a tier: which segments it has, and which are evicted first.

`SegmentLru` is the index of RAM, of the checkpoints in RAM, and of the disk, within a budget of bytes.
`TenantShares` decides whose segments are evicted first if several tenants use a tier.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from llamaslot.kvcache.nodes import Segment, SegmentRank

_MAX_STALE_ENTRIES = 64
"""A heap is rebuilt when it has this many entries more than twice the current segments: most are stale then."""
INACTIVE_S = 3600.0
"""Time without requests after which a tenant loses its share."""
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
