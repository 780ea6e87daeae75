"""A clock of the running event loop that tests move on, so that limits of minutes pass at once."""

from __future__ import annotations

import asyncio


class LoopClock:
    """The event loop's time, plus what it was moved on. Timers that are due run in the loop's next iteration."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        self._added = 0.0
        loop.time = lambda: real() + self._added  # type: ignore[method-assign]

    def advance(self, seconds: float) -> None:
        """Move the clock on."""
        self._added += seconds
