"""Admission: which waiting request runs next, and in which slot.

A request waits while no slot is free, while its need and that of the running ones do not fit together, and
while a running request (its leader) computes a prefix that it can share.

Clients take turns (`fair_share.py`). Order among the requests of those whose turn it is: preempted requests by
arrival; then those overtaken too often, and choices that got their first token from the logits of another one, by
arrival; then the longest cached prefix first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.match import Match
from llamaslot.scheduler.fair_share import FairShare
from llamaslot.scheduler.in_flight import InFlight
from llamaslot.scheduler.request import Request, Slot

MAX_OVERTAKEN = 8
"""Later requests that may be admitted before one that could run too, unless it is their clients' turn."""
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
        self._in_flight = InFlight(self._has_passed)
        self._shares = FairShare()
        self._mean_generated = 0.0
        self.queue: list[Request] = []
        """Waiting requests by arrival."""
        self.is_held = False
        """True while no request is admitted, so that those that run come to an end."""
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

    def is_in_flight(self, request: Request) -> bool:
        """True if a running request computes more of a prompt than is cached, and it is worth waiting for."""
        n_in_flight, _ = self._in_flight.longest(request)
        return n_in_flight - self.match(request).n_cached > self._cache.settings.min_shared

    def withdraw(self, request: Request) -> None:
        """Take a request from the queue."""
        self.queue.remove(request)
        self._in_flight.remove(request)

    def admit(self, running: Sequence[Request], now: float) -> list[Request]:
        """Move every request that may run now from the queue into a slot; `running` are those that run already."""
        if self.is_held:
            return []
        admitted: list[Request] = []
        free = [slot for slot in self._slots if slot.request is None]

        def waits(request: Request) -> bool:
            return self._waits_for_prefix(request, running)

        candidates = self._candidates(running, free, waits) if free else []
        while free:
            found = self._next(candidates, [*running, *admitted], free)
            if found is None:
                break
            request, others = found
            self._start(request, _free_slots(request, free), now)
            candidates.remove(request)
            free.remove(self._slots[request.slot])
            admitted.append(request)
            for other in others:
                is_later = request.arrival > other.arrival
                other.n_overtaken += is_later and other.submit.id_slot in (-1, request.slot)
        return admitted

    def next_up(self, running: Sequence[Request]) -> list[Request]:
        """Return the requests that free slots go to next, the first one first, if there are cells for them.

        Without those that may wait for a prefix.
        """
        free = [slot for slot in self._slots if slot.request is None]
        candidates = self._candidates(running, free, self._may_wait) if free and self.queue else []
        ordered = [each for group in self._shares.groups(candidates, running) for each in sorted(group, key=_order)]
        return ordered[: len(free)]

    def end_trial(self, *, allows_reuse: bool) -> None:
        """Match all waiting requests again after `KVCache.is_on_trial`; without reuse they share nothing."""
        for request in self.queue:
            if allows_reuse:
                request.match = None
            elif not request.is_private:
                request.isolate(b"")
                request.miss = "self_test_failed"

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
            and other.is_ready
            and other.wants_tokens
            and len(other.tokens) == len(tokens)
            and np.array_equal(other.tokens.view(), tokens)
        ]

    def _candidates(
        self, running: Sequence[Request], free: Sequence[Slot], waits: Callable[[Request], bool]
    ) -> list[Request]:
        """Return the queue without requests that have no free slot, or wait for a prefix.

        Of the new requests of clients of one rank, only the oldest are looked at.
        """
        candidates: list[Request] = []
        for group in self._shares.groups(self.queue, running):
            n_fresh = 0
            for request in group:
                is_fresh = not _is_due(request)
                choices = _free_slots(request, free)
                if not request.is_ready or not choices or (is_fresh and n_fresh >= MAX_CANDIDATES):
                    continue
                if not waits(request):
                    candidates.append(request)
                    n_fresh += is_fresh
        return candidates

    def _next(
        self, candidates: Sequence[Request], running: Sequence[Request], free: Sequence[Slot]
    ) -> tuple[Request, Sequence[Request]] | None:
        """Return the candidate to be admitted, and those of clients of the same rank.

        While one does not fit, others of that rank may overtake it, but none of clients that had more.
        """
        for group in self._shares.groups(candidates, running):
            is_full = False
            for request in sorted(group, key=_order):
                choices = _free_slots(request, free)
                if not choices or self._waits_for_prefix(request, running):
                    continue
                if self._fits(request, running):
                    return request, group
                is_full = True
                if _is_due(request):
                    break
            if is_full:
                break
        return None

    def _start(self, request: Request, choices: Sequence[int], now: float) -> None:
        self.queue.remove(request)
        self._cache.window_cells.evict_for(self.match(request))
        acquired = self._cache.acquire(choices, self.match(request), is_new=request.slot < 0)
        request.admit(acquired, now)
        self._slots[request.slot].request = request
        self._in_flight.add(request)
        self._shares.take_turn(request.submit.client)

    def _may_wait(self, request: Request) -> bool:
        """True if a running request computes more of a prompt than is cached."""
        n_in_flight, _ = self._in_flight.longest(request)
        return n_in_flight > self.match(request).n_cached

    def _waits_for_prefix(self, request: Request, running: Sequence[Request]) -> bool:
        """True if a request should wait while a running one computes a part of its prompt.

        That part must be worth it: it counts how much of it the leader had to compute when it was admitted, however
        little of that is left. A request that has waited for a prefix keeps waiting when another one leads.
        """
        if self._cache.is_on_trial or not self._cache.settings.can_reuse:
            return False
        match = self.match(request)
        n_in_flight, leaders = self._in_flight.longest(request)
        if any(_are_siblings(leader, request) and leader.sampler is None for leader in running):
            return True
        if n_in_flight <= match.n_cached:
            return False
        n_cached = min(leader.n_cached_at_admission for leader in leaders)
        if n_in_flight - n_cached > self._cache.settings.min_shared:
            self.n_waits += not request.n_waited_for
            request.n_waited_for = max(request.n_waited_for, n_in_flight)
        waits = min(n_in_flight, request.n_waited_for) > match.n_cached
        if waits and self._cache.checkpoints.has_states:
            for leader in leaders:
                leader.stops.add(n_in_flight)
        return waits

    def _has_passed(self, leader: Request, n: int) -> bool:
        """True if no checkpoint will be taken after `n` tokens of a running request, though one is needed."""
        checkpoints = self._cache.checkpoints
        return checkpoints.has_states and (self._cache.length(leader.slot) > n or not checkpoints.can_take(n))

    def _fits(self, request: Request, running: Sequence[Request]) -> bool:
        """True if a prompt and what it is expected to generate fit together with what the running requests need.

        Idle cells count as free, except those of the request's own prefix.
        """
        cache = self._cache
        if not cache.settings.unified:
            return not self.exceeds_part(request)
        if not running:
            return True
        if not cache.window_cells.fits([len(r.tokens) + self.n_expected(r) for r in (request, *running)]):
            return False
        reserved = sum(len(r.tokens) - cache.length(r.slot) + self.n_expected(r) for r in running)
        needed = len(request.tokens) + self.n_expected(request)
        if cache.settings.shares_cells:
            match = self.match(request)
            needed += match.n_idle - match.n_resident
        n_missing = cache.cells.pinned + reserved + needed - cache.cells.total
        if n_missing <= 0:
            return True
        if not cache.settings.shares_cells:
            return n_missing <= cache.pool.n_idle_duplicates
        # Of its prefix, what running requests hold may be given to it in just these cells, which are pinned then.
        match = self.match(request)
        return n_missing + match.n_resident - match.n_idle <= cache.pool.n_idle_duplicates

    def exceeds_part(self, request: Request) -> bool:
        """True if a request needs more than its part of a partitioned pool whose layout may change."""
        part = self._cache.settings.part_cells
        return 0 < part < len(request.tokens) + self.n_expected(request)

    def n_expected(self, request: Request) -> int:
        """Tokens that a request is expected to generate still."""
        expected = max(MIN_EXPECTED_TOKENS, round(self._mean_generated) - request.n_generated)
        expected = min(expected, self._n_ctx_slot - len(request.tokens))
        remaining = request.n_remaining
        return expected if remaining is None else min(remaining, expected)


def _free_slots(request: Request, free: Sequence[Slot]) -> list[int]:
    """Free slots that a request may run in."""
    return [slot.id for slot in free if request.submit.id_slot in (-1, slot.id)]


def _is_due(request: Request) -> bool:
    """True if a request goes before those with a longer cached prefix, and is not overtaken if it does not fit."""
    return request.has_started or request.n_overtaken >= MAX_OVERTAKEN


def _order(request: Request) -> tuple[int, int, int]:
    """Sort key of the admission order; the prefix counts as of the last lookup."""
    if request.slot >= 0 or _is_due(request):
        return request.slot < 0, 0, request.arrival
    return 2, -request.match.n_cached if request.match else 0, request.arrival


def _are_siblings(a: Request, b: Request) -> bool:
    """True if two requests are choices of one prompt."""
    return bool(a.submit.group) and (a.submit.group, a.namespace) == (b.submit.group, b.namespace)
