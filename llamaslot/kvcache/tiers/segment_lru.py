"""LRU index of the segments in one tier, within a byte budget, by tenant.

Segments are ordered by `Segment.rank`, which grows without notice when a segment is used. So the heap has the rank
that each had when it was last looked at, which can only be too low: whatever comes up is looked at again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from llamaslot.kvcache.segment import Segment, SegmentRank

_MAX_STALE_ENTRIES = 64
"""Heap entries of segments that have left, beside one per segment, before the heap is rebuilt."""


class SegmentLru:
    """Segments of at most `capacity` bytes in all, and `limit` bytes of each API key (0 for any number)."""

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
        """Bytes of all segments that were ever put here."""
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
        """The segment of this number, if it is here."""
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
        """The least recently used segment of some tenants (None for all) that may be evicted, if there is one."""
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
