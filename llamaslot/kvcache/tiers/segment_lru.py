"""LRU index of the segments in one tier, within a budget of bytes, by tenant.

Segments are ordered by `Segment.rank`, which increases when a segment is used, without notice to this index. So an
entry of the heap may be outdated, but only too low: the rank of an entry that comes up is checked again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from llamaslot.kvcache.segment import Segment, SegmentRank

_MAX_STALE_ENTRIES = 64
"""A heap is rebuilt when it has this many entries more than twice the current segments: most are stale then."""


class SegmentLru:
    """Segments of at most `capacity` bytes in total, and `limit` bytes for each API key (0 for no limit)."""

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
