"""Admission: which waiting request runs next, and in which slot.

A request waits while no slot is free, while its need and that of the running ones do not fit together, and
while a running request (its leader) computes a prefix that it can share.

Order: preempted requests by arrival; then those overtaken too often, and choices that got their first token from
the logits of another one, by arrival; then the longest cached prefix first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.pool import Sharing
from llamaslot.scheduler.in_flight import InFlight
from llamaslot.scheduler.request import Request, Slot

MAX_OVERTAKEN = 8
"""Later requests that may be admitted before one that could run too."""
MIN_EXPECTED_TOKENS = 64
"""Tokens that a request without a limit of its own is expected to generate, however short others were."""
MAX_CANDIDATES = 64
"""New requests, oldest first, among which the one with the longest cached prefix is admitted first."""
_NEWEST_WEIGHT = 0.1
"""Weight of the newest length in the moving average."""


class Admission:
    """The queue, and the choice of what leaves it. `n_ctx_slot` is the number of tokens that a slot may hold."""

    def __init__(self, cache: KVCache, slots: Sequence[Slot], n_ctx_slot: int) -> None:
        self._cache = cache
        self._slots = slots
        self._n_ctx_slot = n_ctx_slot
        self._in_flight = InFlight()
        self._mean_generated = 0.0
        self.queue: list[Request] = []
        """Waiting requests by arrival."""
        self.n_waits = 0
        """Requests that waited for a prefix that another one computed."""

    def enqueue(self, request: Request) -> None:
        """Add a request to the queue, in the order of arrival."""
        self.queue.append(request)
        self.queue.sort(key=lambda r: r.arrival)
        self._cache.touch([self.match(request)])

    def match(self, request: Request) -> Match:
        """Match a request's prefix; the lookup is repeated only when the cache has changed."""
        request.match = self._cache.match(request.namespace, request.prefix, request.match)
        return request.match

    def withdraw(self, request: Request) -> None:
        """Take a request from the queue."""
        self.queue.remove(request)
        self._in_flight.remove(request)

    def admit(self, running: Sequence[Request], now: float) -> list[Request]:
        """Move every request that may run now from the queue into a slot; `running` are those that run already."""
        free = [slot for slot in self._slots if slot.request is None]
        admitted: list[Request] = []
        skipped: list[Request] = []
        for request in self._ordered(running, free) if free else ():
            choices = _free_slots(request, free)
            if not choices:
                skipped.append(request)
            elif self._waits_for_prefix(request, [*running, *admitted], choices):
                continue
            elif self._fits(request, [*running, *admitted]):
                self._start(request, choices, now)
                free.remove(self._slots[request.slot])
                admitted.append(request)
            elif request.has_started or request.n_overtaken >= MAX_OVERTAKEN:
                break
            else:
                skipped.append(request)
        for request in skipped:
            wanted = request.submit.id_slot
            request.n_overtaken += sum(
                other.arrival > request.arrival and wanted in (-1, other.slot) for other in admitted
            )
        return admitted

    def release(self, request: Request) -> None:
        """Take a request from its slot, whose sequence keeps what was computed."""
        self._slots[request.slot].request = None
        self._in_flight.remove(request)
        self._cache.release(request.slot)

    def observe_length(self, n_generated: int) -> None:
        """Learn from a request that ended after `n_generated` tokens."""
        self._mean_generated += _NEWEST_WEIGHT * (n_generated - self._mean_generated)

    def siblings(self, request: Request) -> list[Request]:
        """Waiting requests of the same group with exactly the same tokens, which want a first token."""
        tokens = request.tokens.view()
        return [
            other
            for other in self.queue
            if _are_siblings(request, other)
            and other.sampler is None
            and other.wants_tokens
            and len(other.tokens) == len(tokens)
            and np.array_equal(other.tokens.view(), tokens)
        ]

    def _ordered(self, running: Sequence[Request], free: Sequence[Slot]) -> list[Request]:
        """Sort the queue by admission order; requests that cannot run now do not count as candidates."""
        resumed: list[Request] = []
        due: list[Request] = []
        fresh: list[Request] = []
        blocked: list[Request] = []
        for request in self.queue:
            choices = _free_slots(request, free)
            if request.slot >= 0:
                resumed.append(request)
            elif request.has_started or request.n_overtaken >= MAX_OVERTAKEN:
                due.append(request)
            elif not choices:
                blocked.append(request)
            elif len(fresh) < MAX_CANDIDATES and not self._waits_for_prefix(request, running, choices):
                fresh.append(request)
        fresh.sort(key=lambda r: (-self.match(r).n_cached, r.arrival))
        return [*resumed, *due, *fresh, *blocked]

    def _start(self, request: Request, choices: Sequence[int], now: float) -> None:
        self.queue.remove(request)
        request.admit(self._cache.acquire(choices, self.match(request)), now)
        self._slots[request.slot].request = request
        self._in_flight.add(request)

    def _waits_for_prefix(self, request: Request, running: Sequence[Request], choices: Sequence[int]) -> bool:
        """True if a request should wait while a running one computes a part of its prompt.

        That part must be worth it: it counts how much of it the leader had to compute when it was admitted, however
        little of that is left. A request that has waited for a prefix keeps waiting when another one leads.
        """
        match = self.match(request)
        n_in_flight, leaders = self._in_flight.longest(request)
        sharing = self._cache.sharing(match, choices, n_in_flight)
        if sharing is not Sharing.SHARE:
            return sharing is Sharing.WAIT
        if any(_are_siblings(leader, request) and leader.sampler is None for leader in running):
            return True
        if n_in_flight <= match.n_cached:
            return False
        n_cached = min(leader.n_cached_at_admission for leader in leaders)
        if n_in_flight - n_cached > self._cache.settings.min_shared:
            self.n_waits += not request.n_waited_for
            request.n_waited_for = max(request.n_waited_for, n_in_flight)
        return min(n_in_flight, request.n_waited_for) > match.n_cached

    def _fits(self, request: Request, running: Sequence[Request]) -> bool:
        """True if a prompt and what it is expected to generate fit together with what the running requests need.

        Idle cells count as free, except those of the request's own prefix.
        """
        cache = self._cache
        if not cache.settings.unified or not running:
            return True
        reserved = sum(len(r.tokens) - cache.length(r.slot) + self._n_expected(r) for r in running)
        needed = len(request.tokens) + self._n_expected(request)
        if cache.settings.shares_cells:
            match = self.match(request)
            needed += match.n_idle - match.n_resident
        return cache.cells.pinned + reserved + needed <= cache.cells.total

    def _n_expected(self, request: Request) -> int:
        """Tokens that a request is expected to generate still."""
        expected = max(MIN_EXPECTED_TOKENS, round(self._mean_generated) - request.n_generated)
        expected = min(expected, self._n_ctx_slot - len(request.tokens))
        remaining = request.n_remaining
        return expected if remaining is None else min(remaining, expected)


def _free_slots(request: Request, free: Sequence[Slot]) -> list[int]:
    """Free slots that a request may run in."""
    return [slot.id for slot in free if request.submit.id_slot in (-1, slot.id)]


def _are_siblings(a: Request, b: Request) -> bool:
    """True if two requests are choices of one prompt."""
    return bool(a.submit.group) and (a.submit.group, a.namespace) == (b.submit.group, b.namespace)
