"""A tier: segments that are kept in one place, within a budget, and which of them goes next.

Segments are ordered by `Segment.rank`, which grows without a word to the tiers. So the heap has each by what it was
when it was last looked at, which can only be too low: whoever comes up is looked at again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from llamaslot.kvcache.segments import Rank, Segment

_SLACK = 64
"""Entries of segments that have left, beside as many as there are segments, before the heap is made anew."""


class Tier:
    """Segments of at most `capacity` bytes together."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.n_bytes = 0
        self.n_tokens = 0
        """Tokens whose KV is here."""
        self._segments: dict[int, Segment] = {}
        self._by_rank: list[Rank] = []

    def __len__(self) -> int:
        """Segments."""
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        """All of them."""
        return iter(self._segments.values())

    def __contains__(self, segment: Segment) -> bool:
        """Whether it is here."""
        return segment.number in self._segments

    def get(self, number: int) -> Segment | None:
        """The segment of this number, if it is here."""
        return self._segments.get(number)

    def has_room(self, n_bytes: int) -> bool:
        """Whether so many bytes fit beside what is here."""
        return self.n_bytes + n_bytes <= self.capacity

    def put(self, segment: Segment) -> None:
        """Take in a segment that is not here."""
        self._segments[segment.number] = segment
        self.n_bytes += segment.n_bytes
        self.n_tokens += segment.n_tokens
        heapq.heappush(self._by_rank, segment.rank)
        if len(self._by_rank) > 2 * len(self) + _SLACK:
            self._by_rank = [each.rank for each in self]
            heapq.heapify(self._by_rank)

    def drop(self, segment: Segment) -> None:
        """Let go of a segment that is here."""
        del self._segments[segment.number]
        self.n_bytes -= segment.n_bytes
        self.n_tokens -= segment.n_tokens

    def oldest(self, may_go: Callable[[Segment], bool]) -> Segment | None:
        """The least recently used of those that may go; None if there is none."""
        passed: list[Rank] = []
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
            if may_go(segment):
                found = segment
        for each in passed:
            heapq.heappush(self._by_rank, each)
        return found
