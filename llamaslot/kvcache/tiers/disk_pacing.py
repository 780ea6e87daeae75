"""Pacing of disk I/O: when a segment is due to be written, and whether the disk responds.

Times are seconds on the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from llamaslot.kvcache.segment import Segment
from llamaslot.kvcache.tiers import pacing
from llamaslot.kvcache.tiers.disk_io import WriteTotals

READ_TIMEOUT_S = 10.0
"""Time without an answer to a read after which the disk counts as unresponsive, until it answers."""
_DAY_S = 86_400.0


class WriteBudget:
    """Token bucket of `bytes_per_day` (0 for no limit), which continues where an earlier server left it.

    A burst may use the bytes of a whole day; after that, writes average `bytes_per_day`. A single write may
    overdraw it. If the clock jumps ahead, at most the bytes of one day are added; if it jumps back, nothing
    changes.
    """

    def __init__(self, bytes_per_day: int, written: WriteTotals | None = None) -> None:
        self._bytes_per_day = bytes_per_day
        before = written or WriteTotals()
        n_used = max(0.0, before.budget_used_bytes - before.seconds_ago * bytes_per_day / _DAY_S)
        self._left = bytes_per_day - n_used
        """Bytes left at time `_at`; negative after an overdraft."""
        self._at: float | None = None

    @property
    def n_used(self) -> int:
        """Bytes of the budget in use."""
        return round(self._bytes_per_day - self._left) if self._bytes_per_day else 0

    def advance(self, now: float) -> None:
        """Add the bytes that have become available since the last call."""
        elapsed = max(0.0, now - self._at) if self._at is not None else 0.0
        self._left = min(self._bytes_per_day, self._left + elapsed * self._bytes_per_day / _DAY_S)
        self._at = now

    @property
    def opens_at(self) -> float:
        """Time at which the next write may begin."""
        if not self._bytes_per_day or self._at is None:
            return 0.0
        return self._at + max(0.0, -self._left) * _DAY_S / self._bytes_per_day

    def take(self, n_bytes: int, now: float) -> None:
        """Subtract a write that begins now."""
        self.advance(now)
        self._left -= n_bytes


class WriteQueue:
    """Dirty segments in the order in which they came.

    Partial segments, of fewer than `max_tokens`, wait, because they may soon be replaced; but not if
    `may_be_evicted_soon` returns True, since they may then be evicted from RAM first.
    """

    def __init__(
        self, max_tokens: int, budget: WriteBudget, may_be_evicted_soon: Callable[[Segment], bool]
    ) -> None:
        self._max_tokens = max_tokens
        self._budget = budget
        self._may_be_evicted_soon = may_be_evicted_soon
        self._segments: dict[Segment, None] = {}
        self._paused_until = 0.0
        self._is_flushing = False

    def __iter__(self) -> Iterator[Segment]:
        """Iterate over all segments."""
        return iter(self._segments)

    @property
    def due_at(self) -> float | None:
        """Time at which the next segment is due; None for an empty queue."""
        times = map(self._due_at, self._segments)
        return max(self._paused_until, self._budget.opens_at, min(times)) if self._segments else None

    def is_paused(self, now: float) -> bool:
        """True for `RETRY_DELAY_S` after a write failed, and while the budget is used up."""
        return now < self._paused_until or now < self._budget.opens_at

    def put(self, segment: Segment) -> None:
        """Add a segment."""
        self._segments[segment] = None

    def remove(self, segment: Segment) -> None:
        """Remove a segment, if it is here."""
        self._segments.pop(segment, None)

    def next_due(self, now: float) -> Segment | None:
        """Return the first segment that is due by now, without removing it."""
        if self.is_paused(now):
            return None
        return next((each for each in self._segments if self._due_at(each) <= now), None)

    def pause(self, now: float) -> None:
        """Write nothing for `RETRY_DELAY_S`."""
        self._paused_until = now + pacing.RETRY_DELAY_S

    def flush(self) -> None:
        """Make every segment due at once: the server is shutting down, so no path will grow."""
        self._is_flushing = True

    def _due_at(self, segment: Segment) -> float:
        return pacing.due_at(segment, self._max_tokens, self._is_urgent)

    def _is_urgent(self, segment: Segment) -> bool:
        return self._is_flushing or self._may_be_evicted_soon(segment)


class ReadWatchdog:
    """Detects a disk that does not answer a read within `READ_TIMEOUT_S`. Reads are sent one at a time."""

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._unresponsive_until = 0.0

    @property
    def times_out_at(self) -> float | None:
        """Time at which the pending read times out; None if there is none."""
        return None if self._waiting_since is None else self._waiting_since + READ_TIMEOUT_S

    def is_unresponsive(self, now: float) -> bool:
        """True while no reads may be sent."""
        return now < self._unresponsive_until

    def on_read_started(self, now: float) -> None:
        """Record that a read was sent."""
        if self._waiting_since is None:
            self._waiting_since = now

    def on_answer(self, now: float, *, has_more: bool, failed: bool = False) -> None:
        """Record an answer; `has_more` is True if more reads are pending.

        If an unresponsive disk answers with a failure, no reads are sent for `RETRY_DELAY_S`.
        """
        retry = failed and self.is_unresponsive(now)
        self._unresponsive_until = now + pacing.RETRY_DELAY_S if retry else 0.0
        self._waiting_since = now if has_more else None

    def check_timeout(self, now: float) -> bool:
        """Return True, once, if the pending read has timed out; it then no longer counts as pending."""
        if self.times_out_at is None or now < self.times_out_at:
            return False
        self._unresponsive_until, self._waiting_since = math.inf, None
        return True
