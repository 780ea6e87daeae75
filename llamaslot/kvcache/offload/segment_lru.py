"""LRU index of the segments in one tier, within a byte budget.

Segments are ordered by `Segment.rank`, which grows without notice when a segment is used. So the heap has the rank
that each had when it was last looked at, which can only be too low: whatever comes up is looked at again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from llamaslot.kvcache.segment import LruRank, Segment

_MAX_STALE_ENTRIES = 64
"""Heap entries of segments that have left, beside one per segment, before the heap is rebuilt."""


class SegmentLru:
    """Segments of at most `capacity` bytes in all."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Bytes."""
        self.n_bytes = 0
        self.n_tokens = 0
        """Tokens whose KV is here."""
        self._segments: dict[int, Segment] = {}
        self._by_rank: list[LruRank] = []

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

    def fits(self, n_bytes: int) -> bool:
        """True if `n_bytes` more are within the capacity."""
        return self.n_bytes + n_bytes <= self.capacity

    def put(self, segment: Segment) -> None:
        """Add a segment that is not here."""
        self._segments[segment.number] = segment
        self.n_bytes += segment.n_bytes
        self.n_tokens += segment.n_tokens
        heapq.heappush(self._by_rank, segment.rank)
        if len(self._by_rank) > 2 * len(self) + _MAX_STALE_ENTRIES:
            self._by_rank = [each.rank for each in self]
            heapq.heapify(self._by_rank)

    def remove(self, segment: Segment) -> None:
        """Remove a segment that is here."""
        del self._segments[segment.number]
        self.n_bytes -= segment.n_bytes
        self.n_tokens -= segment.n_tokens

    def oldest(self, may_evict: Callable[[Segment], bool]) -> Segment | None:
        """The least recently used segment that may be evicted; None if there is none."""
        passed: list[LruRank] = []
        found = None
        while self._by_rank and found is None:
            rank = heapq.heappop(self._by_rank)
            segment = self._segments.get(rank.number)
            if segment is None:
                continue
            if rank != segment.rank:
                heapq.heappush(self._by_rank, segment.rank)
                continue
            passed.append(rank)
            if may_evict(segment):
                found = segment
        for each in passed:
            heapq.heappush(self._by_rank, each)
        return found
