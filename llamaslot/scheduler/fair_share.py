"""Fair shares of the slots: which client's requests are admitted next, and which are preempted first.

Clients with the fewest running requests come first. Clients with equally many take turns, one each per round: first
those that had no turn in this round, whose order is free, so that the longest cached prefix decides among their
requests; then the others, in the order of their last turns. A second turn of a client starts the next round.

So while a client without a running request waits for a slot, each other client gets at most one slot, and those
with running requests get none: 100 requests from one client delay another client's by at most one request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from llamaslot.base.callers import MAX_ROUND_TURNS, Turns
from llamaslot.scheduler.request import Request

Rank: TypeAlias = tuple[int, int]


class FairShare:
    """Ranks clients by their running requests and past turns."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._round_start = 0
        """Number of the last turn before this round."""

    def groups(self, queue: Iterable[Request], running: Iterable[Request]) -> list[list[Request]]:
        """Group the requests of a queue by the rank of their clients, the first to be admitted at the front."""
        n_running = Counter(request.params.client for request in running)
        groups: dict[Rank, list[Request]] = {}
        for request in queue:
            client = request.params.client
            groups.setdefault((n_running[client], self._turn(client)), []).append(request)
        return [groups[rank] for rank in sorted(groups)]

    def take_turn(self, client: str) -> None:
        """Count the admission of a client's request."""
        if self._turn(client) or self._turns.n_taken - self._round_start >= MAX_ROUND_TURNS:
            self._round_start = self._turns.n_taken
        self._turns.take(client)

    def _turn(self, client: str) -> int:
        """Return the number of a client's last turn in this round; 0 if it had none."""
        last = self._turns.last(client)
        return last if last > self._round_start else 0


def by_share(running: Sequence[Request]) -> list[Request]:
    """Sort running requests: the oldest of each client, then the second oldest ones, and so on, each by arrival.

    The last one is preempted first. The oldest of all is at the front.
    """
    seen: Counter[str] = Counter()
    ranked = []
    for request in sorted(running, key=lambda r: r.arrival):
        ranked.append((seen[request.params.client], request.arrival, request))
        seen[request.params.client] += 1
    return [request for _, _, request in sorted(ranked, key=lambda each: each[:2])]
