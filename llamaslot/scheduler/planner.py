"""Handing out the tokens of one step: streams first, then what has least left; room goes to the oldest first.

1. Where the free cells do not do, idle ones are evicted, then the youngest request is preempted.
2. Prompts share what streams leave of the step, so that no stream waits longer than one bounded chunk: a quarter of
   that is the oldest's, which so always comes on; the rest goes to those that have least left, since each first
   token is somebody's wait.
3. Where all that runs is decoding, say for how many steps nothing will have to be decided, and make room for some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llamaslot.base.backend import Run
from llamaslot.base.model import TILE
from llamaslot.kvcache.ledger import Ledger
from llamaslot.scheduler.chunking import ChunkSizer
from llamaslot.scheduler.padding import Padding
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.settings import SchedulerSettings
from llamaslot.scheduler.step import Work

_OLDEST = 0.25
"""Share of a step's prompt tokens that is the oldest prompt's."""
_ROOM_AHEAD = 32
"""Idle cells taken at once for steps ahead: more lose prefixes early, fewer ask for a plan more often."""


class Planner:
    """Plans the work of one step for the running requests, oldest first; `preempt` sends one back to the queue.

    To be asked in this order: `grant`, `pad`, `n_ahead`.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        ledger: Ledger,
        chunks: ChunkSizer,
        padding: Padding,
        running: Sequence[Request],
        *,
        preempt: Callable[[Request], None],
        siblings: Callable[[Request], Sequence[Request]],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._chunks = chunks
        self._padding = padding
        self._running = list(running)
        self._preempt = preempt
        self._siblings = siblings
        self._n_granted = 0
        self._n_padding = 0
        self._has_cut = False
        self.preempted: list[Request] = []
        """Requests that were sent back to the queue."""
        self._served: set[str] = set()
        """Waiting requests whose first token this step samples."""

    def grant(self, requests: Sequence[Request]) -> list[Work]:
        """This step's work for `requests`, which are among the running ones, oldest first; by sequence id."""
        pending = {r.id: len(r.known) - self._ledger.length(r.slot_id) for r in requests}
        n_decoding = sum(n == 1 for n in pending.values())
        shares = self._shares(pending, self._chunks.limit(n_decoding))
        if self._cuts(pending, shares) and self._padding.gain_ms(
            self._spans(requests, shares), self._ledger.n_used
        ):
            # What would be padded takes tokens of the prompts that were cut instead.
            shares = self._shares(pending, TILE - n_decoding)
        self._has_cut = self._cuts(pending, shares)
        granted: list[Work] = []
        for request in requests:
            if request not in self._running:
                continue
            n = self._make_room(shares[request.id], request)
            if n == 0:
                continue
            granted.append(self._work(request, n, is_last=n == pending[request.id]))
            self._n_granted += n
        granted.sort(key=lambda work: work.run.seq)
        return granted

    @staticmethod
    def _cuts(pending: dict[str, int], shares: dict[str, int]) -> bool:
        """Whether any request gets less than it has left."""
        return any(shares[name] < n for name, n in pending.items())

    def _spans(self, requests: Sequence[Request], shares: dict[str, int]) -> list[tuple[int, int]]:
        """What each request holds, and what it gets."""
        return [(self._ledger.length(request.slot_id), shares[request.id]) for request in requests]

    @staticmethod
    def _shares(pending: dict[str, int], left: int) -> dict[str, int]:
        """The tokens of each request in this step, with so many for prompts, by what it has left, oldest first."""
        prompts = {name: n for name, n in pending.items() if n > 1}
        shares = {name: min(n, 1) for name, n in pending.items()} | dict.fromkeys(prompts, 0)
        turns = [(name, left) for name in sorted(prompts, key=lambda name: prompts[name])]
        if prompts:
            oldest = next(iter(prompts))
            turns.insert(0, (oldest, math.ceil(left * _OLDEST)))
        for name, most in turns:
            n = min(prompts[name] - shares[name], most, left)
            shares[name] += n
            left -= n
        return shares

    def _work(self, request: Request, n: int, *, is_last: bool) -> Work:
        start = self._ledger.length(request.slot_id)
        output = is_last and request.wants_tokens
        run = Run(request.slot_id, start, request.known.view(start, start + n), output)
        if not output or request.sampler is not None:
            return Work(request, run)
        siblings = tuple(other for other in self._siblings(request) if other.id not in self._served)
        self._served.update(other.id for other in siblings)
        return Work(request, run, siblings)

    def _make_room(self, wanted: int, request: Request) -> int:
        """Cells that `request` gets now, at most `wanted`; 0 if it had to be preempted itself."""
        if not self._settings.unified or wanted == 0:
            return wanted
        while True:
            free = self._ledger.n_free - self._n_granted
            if free < wanted:
                free += self._ledger.evict(wanted - free)
            if free > 0:
                return min(wanted, free)
            youngest = self._running.pop()
            self._preempt(youngest)
            self.preempted.append(youngest)
            if youngest is request:
                return 0

    def pad(self, work: Sequence[Work]) -> Run | None:
        """What to compute beside this step's work only to have it done sooner.

        Nothing where a prompt was cut, whose tokens are better. Idle cells make room if it gains more than to
        compute them again would take.
        """
        spans = [(each.run.start, len(each.run.tokens)) for each in work]
        gain = 0.0 if self._has_cut else self._padding.gain_ms(spans, self._ledger.n_used)
        if not gain:
            return None
        run = self._padding.run(self._n_granted)
        n, free = len(run.tokens), self._ledger.n_free - self._n_granted
        may_evict = not self.preempted and gain > self._padding.price_ms
        if free < n <= free + self._ledger.n_idle and may_evict:
            free += self._ledger.evict(n - free)
        if free < n:
            return None
        self._n_padding = n
        return run

    def n_ahead(self, work: Sequence[Work]) -> int:
        """How many steps may follow unasked: each computes what the one before sampled, and only the last may reach
        a limit. Takes up to `_ROOM_AHEAD` idle cells for them.

        A stop string is looked for on the loop, and a sampler that this step makes is known there only when it is
        committed: such requests go step by step.
        """
        requests = [each.request for each in work]
        if not work or not all(each.run.output and len(each.run.tokens) == 1 for each in work):
            return 0
        if any(request.sampler is None or request.submit.stop for request in requests):
            return 0
        left = [self._settings.n_ctx_slot - len(request.known) for request in requests]
        left += [n for request in requests if (n := request.n_remaining) is not None]
        n_ahead = min(left) - 1
        if self._settings.unified:
            free = self._ledger.n_free - self._n_granted - self._n_padding
            wanted = min(n_ahead * len(work), max(len(work), _ROOM_AHEAD))
            if not self.preempted and free < wanted:
                free += self._ledger.evict(wanted - free)
            n_ahead = min(n_ahead, free // len(work))
        return n_ahead
