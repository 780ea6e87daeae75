"""When the disk is asked for what: which segments are to be written by now, whether reading takes too long, and
whether the disk answers at all.

Times are seconds on the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from llamaslot.kvcache.segments import Segment

OPEN_SECONDS = 2.0
"""How long the last segment of a path lies before it is written."""
PAUSE_SECONDS = 30.0
"""How long what failed is not tried again: to write, to read a segment, to store without memory."""
SILENT_SECONDS = 10.0
"""How long a request waits for a disk that answers no reading; a slower one is silent until it does."""
_WEIGHT = 0.2
"""Share of the newest reading in the mean."""


class WriteQueue:
    """Segments to write, in the order in which they came. `is_open` says which may be replaced soon."""

    def __init__(self, is_open: Callable[[Segment], bool]) -> None:
        self._is_open = is_open
        self._segments: dict[Segment, None] = {}
        self._goes_on_at = 0.0
        self._is_ending = False

    def __iter__(self) -> Iterator[Segment]:
        """All of them."""
        return iter(self._segments)

    @property
    def due_at(self) -> float | None:
        """When the next one is to be written; None without any."""
        times = map(self._written_at, self._segments)
        return max(self._goes_on_at, min(times)) if self._segments else None

    def is_paused(self, now: float) -> bool:
        """Whether nothing is written for a while."""
        return now < self._goes_on_at

    def put(self, segment: Segment) -> None:
        """Have a segment written."""
        self._segments[segment] = None

    def drop(self, segment: Segment) -> None:
        """Do not write a segment, should it be here."""
        self._segments.pop(segment, None)

    def take(self, now: float) -> Segment | None:
        """One that is to be written by now; it is here no more."""
        if self.is_paused(now):
            return None
        found = next((each for each in self._segments if self._written_at(each) <= now), None)
        if found is not None:
            self.drop(found)
        return found

    def pause(self, now: float) -> None:
        """Write nothing for a while."""
        self._goes_on_at = now + PAUSE_SECONDS

    def end(self) -> None:
        """Wait for nothing any more: no path goes on."""
        self._is_ending = True

    def _written_at(self, segment: Segment) -> float:
        lies = self._is_open(segment) and not self._is_ending
        return segment.stored_at + (OPEN_SECONDS if lies else 0.0)


class ReadRate:
    """How long the disk takes to read a token, by what was read of late."""

    def __init__(self) -> None:
        self._us = 0.0
        self._until = 0.0

    def note(self, n_tokens: int, seconds: float, now: float) -> None:
        """So many tokens were read."""
        us, known = 1e6 * seconds / n_tokens, self.us(now)
        self._us = us if known is None else known + _WEIGHT * (us - known)
        self._until = now + PAUSE_SECONDS

    def us(self, now: float) -> float | None:
        """Microseconds a token; None where nothing was read of late, so that a slow disk is tried again."""
        return self._us if now < self._until else None


class ReadWatch:
    """Whether the disk answers what it is asked to read, one thing after another: it is silent once it has not for
    `SILENT_SECONDS`, until it does.
    """

    def __init__(self) -> None:
        self._waits_since: float | None = None
        self._silent_until = 0.0

    @property
    def due_at(self) -> float | None:
        """When it falls silent, if it does not answer before; None if nothing is asked of it."""
        return None if self._waits_since is None else self._waits_since + SILENT_SECONDS

    def is_silent(self, now: float) -> bool:
        """Whether nothing is to be asked of it."""
        return now < self._silent_until

    def asked(self, now: float) -> None:
        """It begins to read something."""
        if self._waits_since is None:
            self._waits_since = now

    def answered(self, now: float, *, waits: bool, failed: bool = False) -> None:
        """It has read something, or could not; `waits`: whether more is asked of it.

        One that is silent and then fails is left alone for a while.
        """
        self._silent_until = now + PAUSE_SECONDS if failed and self.is_silent(now) else 0.0
        self._waits_since = now if waits else None

    def falls_silent(self, now: float) -> bool:
        """Whether it has not answered for too long by now; nothing is awaited of it then."""
        if self.due_at is None or now < self.due_at:
            return False
        self._silent_until, self._waits_since = math.inf, None
        return True
