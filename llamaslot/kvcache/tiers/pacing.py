"""Delays and transfer rates common to all tiers. Times are seconds on the caller's clock.

Refer to the constants as `pacing.RETRY_DELAY_S`, because tests shorten them in this module.
"""

from __future__ import annotations

from collections.abc import Callable

from llamaslot.kvcache.segment import Segment

PARTIAL_DELAY_S = 1.0
"""Delay before a partial segment is written or uploaded: a conversation's next turn usually replaces it sooner."""
RETRY_DELAY_S = 30.0
"""Delay before a retry: of saves and loads after memory ran out, of reads, writes, and use of the remote tier."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest transfer in the moving average."""


def due_at(segment: Segment, max_tokens: int, is_urgent: Callable[[Segment], bool]) -> float:
    """Return when to write or upload a segment: at once if it has `max_tokens`, else after `PARTIAL_DELAY_S`.

    `is_urgent` returns True for a partial segment that must not wait.
    """
    waits = segment.is_partial(max_tokens) and not is_urgent(segment)
    return segment.offloaded_at + (PARTIAL_DELAY_S if waits else 0.0)


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
