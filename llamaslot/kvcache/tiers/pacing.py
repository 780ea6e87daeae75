"""Pacing of the tiers: delays, speed of transfers, the daily budget of writes, and a disk that does not respond.

Refer to the constants as `pacing.RETRY_DELAY_S`, because tests shorten them in this module. Times are seconds on
the caller's clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from llamaslot.kvcache.disk_io import WriteTotals

PARTIAL_DELAY_S = 1.0
"""Delay before a partial segment is written or uploaded: a conversation's next turn usually replaces it sooner."""
RETRY_DELAY_S = 30.0
"""Delay before a retry: of saves and loads after memory ran out, of reads, writes, and use of the remote tier."""
READ_TIMEOUT_S = 10.0
"""Time without an answer to a read after which the disk counts as unresponsive, until it answers."""
_LOOK_S = 0.1
"""Interval at which a pending read is looked at."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest transfer in the moving average."""
_N_NEWEST_READS = 5
"""Reads that decide: few, so that a disk that has become slow or fast is noticed soon."""
N_TRUSTED_READS = 3
"""Reads whose median is believed. The first read after a start is often far slower than the others."""
MIN_READ_BYTES = 2**18
"""A smaller read takes as long as this one: on a disk that reads 7 MB in 4.2 ms, 100 KB take 0.18 ms."""
_DAY_S = 86_400.0


class TransferRate:
    """Moving average of the time to transfer a token or byte, valid for `RETRY_DELAY_S` after the last transfer.

    After that it is None, so that a tier that was slow is tried again.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._valid_until = 0.0

    def observe(self, n: int, seconds: float, now: float) -> None:
        """Learn from a transfer of `n` units."""
        newest, average = seconds / max(n, 1), self.seconds(now)
        self._learn(newest if average is None else average + _NEWEST_WEIGHT * (newest - average), now)

    def at_least(self, n: int, seconds: float, now: float) -> None:
        """Learn from a transfer of `n` units that took longer than `seconds`."""
        self._learn(max(seconds / max(n, 1), self.seconds(now) or 0.0), now)

    def reset(self) -> None:
        """Forget the rate."""
        self._valid_until = 0.0

    def seconds(self, now: float) -> float | None:
        """Return the seconds per unit; None if nothing was transferred lately."""
        return self._seconds if now < self._valid_until else None

    def _learn(self, seconds: float, now: float) -> None:
        self._seconds, self._valid_until = seconds, now + RETRY_DELAY_S


class ReadRate:
    """Seconds to read a byte from disk: the median of the newest reads, so that no single one decides.

    It stays known, so that no request waits for a guess. `is_doubtful` says when to read something that no request
    waits for: without that, a disk that was slow once would never be read again.
    """

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=_N_NEWEST_READS)
        self._observed_at = 0.0

    def observe(self, n_bytes: int, seconds: float, now: float) -> None:
        """Learn from a read of `n_bytes`."""
        self._newest.append(seconds / max(n_bytes, MIN_READ_BYTES))
        self._observed_at = now

    @property
    def seconds(self) -> float | None:
        """Seconds for a byte; None before the first read."""
        # Of two reads the faster one: what disturbs a read makes it slower.
        return statistics.median_low(self._newest) if self._newest else None

    def is_doubtful(self, now: float) -> bool:
        """True if few reads were observed, or none for `RETRY_DELAY_S`."""
        return len(self._newest) < N_TRUSTED_READS or now >= self._observed_at + RETRY_DELAY_S


class WriteBudget:
    """Token bucket of `bytes_per_day` (0 for no limit), which continues where an earlier server left it.

    A burst may use the bytes of a whole day; after that, writes average `bytes_per_day`. A single write may
    overdraw it. If the clock jumps ahead, at most the bytes of one day are added; if it jumps back, nothing
    changes.
    """

    def __init__(self, bytes_per_day: int, written: WriteTotals) -> None:
        self._bytes_per_day = bytes_per_day
        n_used = max(0.0, written.budget_used_bytes - written.seconds_ago * bytes_per_day / _DAY_S)
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


class ReadWatchdog:
    """Detects a disk that does not answer a read within `READ_TIMEOUT_S`. Reads are sent one at a time."""

    def __init__(self) -> None:
        self.waiting_since: float | None = None
        """Time at which the pending read was sent; None if there is none."""
        self._unresponsive_until = 0.0

    @property
    def times_out_at(self) -> float | None:
        """Time at which the pending read times out; None if there is none."""
        return None if self.waiting_since is None else self.waiting_since + READ_TIMEOUT_S

    def due_at(self, now: float) -> float | None:
        """Time at which to look whether waiting for the pending read still pays; None if there is none."""
        times_out_at = self.times_out_at
        return None if times_out_at is None else min(times_out_at, now + _LOOK_S)

    def is_unresponsive(self, now: float) -> bool:
        """True while no reads may be sent."""
        return now < self._unresponsive_until

    def on_read_started(self, now: float) -> None:
        """Record that a read was sent."""
        if self.waiting_since is None:
            self.waiting_since = now

    def on_answer(self, now: float, *, has_more: bool, failed: bool = False) -> None:
        """Record an answer; `has_more` is True if more reads are pending.

        If an unresponsive disk answers with a failure, no reads are sent for `RETRY_DELAY_S`.
        """
        retry = failed and self.is_unresponsive(now)
        self._unresponsive_until = now + RETRY_DELAY_S if retry else 0.0
        self.waiting_since = now if has_more else None

    def check_timeout(self, now: float) -> bool:
        """Return True, once, if the pending read has timed out; it then no longer counts as pending."""
        if self.times_out_at is None or now < self.times_out_at:
            return False
        self._unresponsive_until, self.waiting_since = math.inf, None
        return True
