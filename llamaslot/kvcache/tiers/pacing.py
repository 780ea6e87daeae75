"""Delays and speeds that all tiers have in common. Times are seconds on the caller's clock.

Use the constants as `pacing.RETRY_DELAY_S`: tests shorten them here.
"""

from __future__ import annotations

from collections.abc import Callable

from llamaslot.kvcache.segment import Segment

PARTIAL_DELAY_S = 1.0
"""Age at which a partial segment is written or uploaded: a conversation's next turn usually replaces it before."""
RETRY_DELAY_S = 30.0
"""Time until what failed is tried again: a save or load without memory, a read, a write, the remote tier."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest transfer in the moving average."""


def due_at(segment: Segment, max_tokens: int, is_urgent: Callable[[Segment], bool]) -> float:
    """Return the time at which to write or upload a segment: at once, or after `PARTIAL_DELAY_S` if it is partial.

    A full segment has `max_tokens`. A partial one `is_urgent` if it must not wait.
    """
    waits = segment.is_partial(max_tokens) and not is_urgent(segment)
    return segment.offloaded_at + (PARTIAL_DELAY_S if waits else 0.0)


class TransferRate:
    """Moving average of the time to transfer a token or byte, known for `RETRY_DELAY_S` after the last one.

    Then it is None, so that what was slow is tried again.
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
        """Know no rate, as at the start."""
        self._valid_until = 0.0

    def seconds(self, now: float) -> float | None:
        """Seconds per unit; None if nothing was transferred lately."""
        return self._seconds if now < self._valid_until else None

    def _learn(self, seconds: float, now: float) -> None:
        self._seconds, self._valid_until = seconds, now + RETRY_DELAY_S
