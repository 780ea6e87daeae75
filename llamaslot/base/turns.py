"""Turns: which client (`base/callers.py`) is served next by the prompt worker and at the slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

MAX_CLIENTS = 1024
"""Clients whose last turn is remembered: those that had one most recently."""
MAX_ROUND_TURNS = 64
"""Turns after which a client counts as one that had none: a stream of new clients cannot keep it waiting longer."""


class Turns:
    """Numbers the turns that clients take; the next one to be served is the one whose last turn is oldest."""

    def __init__(self) -> None:
        self.n_taken = 0
        self._last: dict[str, int] = {}

    def last(self, client: str) -> int:
        """Return the number of a client's last turn; 0 if it had none, or so long ago that it is forgotten."""
        return self._last.get(client, 0)

    def next(self, waiting: Iterable[T], client_of: Callable[[T], str | None]) -> T:
        """Return the first item of the client whose turn it is; items of no client come before all others."""

        def place(item: T) -> int:
            client = client_of(item)
            if client is None:
                return -1
            last = self.last(client)
            return last if last > self.n_taken - MAX_ROUND_TURNS else 0

        return min(waiting, key=place)

    def take(self, client: str) -> None:
        """Count a turn of a client."""
        self.n_taken += 1
        self._last.pop(client, None)
        self._last[client] = self.n_taken
        if len(self._last) > MAX_CLIENTS:
            del self._last[next(iter(self._last))]
