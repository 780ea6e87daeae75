"""Fair shares of the slots: which client's requests are admitted next, and which are preempted first.

Clients with the fewest running requests come first. Among those that have equally many, each gets a turn a round:
first the clients that had none in this round, in any order, so that the longest cached prefix decides among their
requests; then the others, by their last turn. A client that had a turn begins the next round by another one.

So while a client without a running request waits for a slot, each other client gets at most one, and one that has
requests running gets none: many requests of one client delay a single request of another by one request's duration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from llamaslot.base.turns import MAX_ROUND_TURNS, Turns
from llamaslot.scheduler.request import Request

Rank: TypeAlias = tuple[int, int]


class FairShare:
    """Ranks clients by what they have got."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._round_start = 0
        """Number of the last turn before this round."""

    def groups(self, queue: Iterable[Request], running: Iterable[Request]) -> list[list[Request]]:
        """Group the requests of a queue by the rank of their clients, those to be admitted first at the front."""
        n_running = Counter(request.submit.client for request in running)
        groups: dict[Rank, list[Request]] = {}
        for request in queue:
            client = request.submit.client
            groups.setdefault((n_running[client], self._turn(client)), []).append(request)
        return [groups[rank] for rank in sorted(groups)]

    def take_turn(self, client: str) -> None:
        """Count the admission of a client's request."""
        if self._turn(client) or self._turns.n_taken - self._round_start >= MAX_ROUND_TURNS:
            self._round_start = self._turns.n_taken
        self._turns.take(client)

    def _turn(self, client: str) -> int:
        """Return a client's last turn in this round, 0 if it had none."""
        last = self._turns.last(client)
        return last if last > self._round_start else 0


def by_share(running: Sequence[Request]) -> list[Request]:
    """Sort running requests, oldest first: the first one of each client, then the second ones, and so on.

    The last one is the first to be preempted. The oldest of all stays at the front.
    """
    seen: Counter[str] = Counter()
    ranked = []
    for request in sorted(running, key=lambda r: r.arrival):
        ranked.append((seen[request.submit.client], request.arrival, request))
        seen[request.submit.client] += 1
    return [request for _, _, request in sorted(ranked, key=lambda each: each[:2])]
