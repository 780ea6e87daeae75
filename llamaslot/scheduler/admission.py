"""Admission: which waiting request runs next, and in which slot.

A request waits while no slot is free, while it does not fit into the pool together with the running requests, and
while a running request (its leader) computes a prefix that it can share, instead of computing that again. Who waits
for whom is not stored: each plan compares the prompts again. So when a leader ends, for whatever reason, its
followers are free, and the first of them to be admitted leads the others.

Clients with the fewest running requests come first. Clients with equally many take turns, one each per round: first
those that had no turn in this round, whose order is free, so that the longest cached prefix decides among their
requests; then the others, in the order of their last turns. A second turn of a client starts the next round. So
while a client without a running request waits for a slot, each other client gets at most one slot, and those with
running requests get none: 100 requests from one client delay another client's by at most one request.

Among the requests of clients whose turn it is, the order is: preempted requests by arrival; then, by arrival,
requests overtaken too often and further choices (`n`) that got their first token from the logits of another one;
then the longest cached prefix.

One more request may wait in the background (`--warm-ahead`), beside the queue. It is admitted alone, while all
slots are free and nothing waits. Once something waits, the next plan preempts it, and its KV stays cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from llamaslot.base.callers import MAX_ROUND_TURNS, Turns
from llamaslot.base.images import before_tile
from llamaslot.base.tokens import n_common
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.match import Match
from llamaslot.scheduler.request import Request, RequestEvent, RequestState, Slot

MAX_OVERTAKEN = 8
"""Most later requests of clients with the same rank that may be admitted before a request that could run."""
MIN_EXPECTED_TOKENS = 64
"""Fewest tokens that a request without a limit is expected to generate, however short earlier replies were."""
MAX_CANDIDATES = 64
"""Most new requests ordered by longest cached prefix, oldest first; later ones are not matched yet."""
_NEWEST_WEIGHT = 0.1
"""Weight of the newest reply's length in the moving average."""


class Admission:
    """The queue, and which requests leave it. `n_ctx_slot` is the number of tokens that a slot may hold."""

    def __init__(self, cache: KVCache, slots: Sequence[Slot], n_ctx_slot: int) -> None:
        self._cache = cache
        self._slots = slots
        self.n_ctx_slot = n_ctx_slot
        self._turns = Turns()
        self._round_start = 0
        """Number of the last turn of a client before this round."""
        self._mean_generated = 0.0
        self.queue: list[Request] = []
        """Waiting requests by arrival."""
        self.background: Request | None = None
        """The request that waits, or runs, while there is no other."""
        self.is_held = False
        """True while no request is admitted, so that the running ones come to an end."""
        self.n_waits = 0
        """Number of requests that waited for a prefix which another request computed."""
        self.n_preempted = 0
        """Number of preemptions."""

    def enqueue(self, request: Request) -> None:
        """Add a request to the queue, in the order of arrival; one in the background waits beside it."""
        if request.params.is_background:
            self.background = request
            return
        self.queue.append(request)
        self.queue.sort(key=lambda r: r.arrival)
        self._cache.touch([self.match(request)])

    def match(self, request: Request) -> Match:
        """Match a request's prefix. The lookup is repeated only if the cache has changed."""
        request.match = self._cache.match(request.namespace, request.prefix, request.match)
        return request.match

    def is_in_flight(self, request: Request) -> bool:
        """True if running requests compute enough of this prompt beyond its cached part that waiting pays."""
        n_in_flight, _ = self._longest_in_flight(request)
        return n_in_flight - self.match(request).n_cached > self._cache.settings.min_shared

    def remove(self, request: Request) -> None:
        """Remove a request that ends from the queue, or from its slot."""
        if request is self.background:
            self.background = None
        if request.state is RequestState.RUNNING:
            self._release(request)
        elif not request.params.is_background:
            self.queue.remove(request)

    def preempt(self, request: Request, now: float) -> None:
        """Send a running request back to the queue."""
        self.n_preempted += not request.params.is_background
        self._release(request)
        request.handle(RequestEvent.PREEMPT, now)
        self.enqueue(request)

    def make_way(self, now: float) -> None:
        """Preempt the request that runs in the background if any other waits."""
        if self.queue and self.background is not None and self.background.state is RequestState.RUNNING:
            self.preempt(self.background, now)

    def admit(self, now: float) -> list[Request]:
        """Move every request that may run now from the queue to a slot."""
        if self.is_held:
            return []
        admitted: list[Request] = []
        free = [slot for slot in self._slots if slot.request is None]
        candidates = self._candidates(free, self._waits_for_prefix) if free else []
        while free:
            found = self._next(candidates, free)
            if found is None:
                break
            request, others = found
            self._start(request, _free_slots(request, free), now)
            candidates.remove(request)
            free.remove(self._slots[request.slot])
            admitted.append(request)
            for other in others:
                is_later = request.arrival > other.arrival
                other.n_overtaken += is_later and other.params.id_slot in (-1, request.slot)
        background = self.background
        if background is not None and not self.queue and len(free) == len(self._slots) and self._fits(background):
            self._start(background, [slot.id for slot in free], now)
            admitted.append(background)
        return admitted

    def next_up(self) -> list[Request]:
        """Return the requests that free slots go to next, in order, if there are cells for them.

        Requests that may wait for a prefix are left out.
        """
        free = [slot for slot in self._slots if slot.request is None]
        candidates = self._candidates(free, self._may_wait) if free and self.queue else []
        ordered = [each for group in self._by_rank(candidates) for each in sorted(group, key=_order)]
        return ordered[: len(free)]

    def end_trial(self, *, allows_reuse: bool) -> None:
        """Match all waiting requests again once the self-test is done; if reuse is not allowed, isolate them."""
        for request in self.queue:
            if allows_reuse:
                request.match = None
            elif not request.is_private:
                request.isolate(b"")
                request.miss = "self_test_failed"

    def observe_length(self, n_generated: int) -> None:
        """Learn the usual length of replies from a request that ended after `n_generated` tokens."""
        # With a context shift a reply may be far longer than what a slot holds of it at once.
        n_generated = min(n_generated, self.n_ctx_slot)
        self._mean_generated += _NEWEST_WEIGHT * (n_generated - self._mean_generated)

    def siblings(self, request: Request) -> list[Request]:
        """Return waiting choices of the same prompt (`n`) that can take their first token from the same logits."""
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

    def _running(self) -> list[Request]:
        return [slot.request for slot in self._slots if slot.request is not None]

    def _candidates(self, free: Sequence[Slot], waits: Callable[[Request], bool]) -> list[Request]:
        """Return the queue without requests that have no free slot or wait for a prefix.

        Of the new requests of clients with the same rank, only the oldest `MAX_CANDIDATES` are considered.
        """
        candidates: list[Request] = []
        for group in self._by_rank(self.queue):
            n_fresh = 0
            for request in group:
                is_fresh = not _is_due(request)
                # In this order: texts to embed come by the thousand.
                if is_fresh and n_fresh >= MAX_CANDIDATES:
                    continue
                if not request.is_ready or not _free_slots(request, free):
                    continue
                if not waits(request):
                    candidates.append(request)
                    n_fresh += is_fresh
        return candidates

    def _by_rank(self, waiting: Sequence[Request]) -> list[list[Request]]:
        """Group waiting requests by the rank of their clients, the first to be admitted at the front."""
        n_running = Counter(request.params.client for request in self._running())
        groups: dict[tuple[int, int], list[Request]] = {}
        for request in waiting:
            client = request.params.client
            groups.setdefault((n_running[client], self._turn(client)), []).append(request)
        return [groups[rank] for rank in sorted(groups)]

    def _turn(self, client: str) -> int:
        """Return the number of a client's last turn in this round; 0 if it had none."""
        last = self._turns.last(client)
        return last if last > self._round_start else 0

    def _next(
        self, candidates: Sequence[Request], free: Sequence[Slot]
    ) -> tuple[Request, Sequence[Request]] | None:
        """Return the candidate to be admitted next, and all candidates of clients with the same rank.

        A request that does not fit may be overtaken by others of that rank, but not by those of later ranks.
        """
        for group in self._by_rank(candidates):
            is_full = False
            for request in sorted(group, key=_order):
                slots = _free_slots(request, free)
                if not slots or self._waits_for_prefix(request):
                    continue
                if self._fits(request):
                    return request, group
                is_full = True
                if _is_due(request):
                    break
            if is_full:
                break
        return None

    def _start(self, request: Request, slots: Sequence[int], now: float) -> None:
        is_background = request.params.is_background
        is_new = request.slot < 0 and not is_background
        # Those of replies, which take most steps.
        adapters = request.adapters_at(request.n_prompt)
        apart = [each.slot for each in self._running() if each.adapters_at(each.n_prompt) != adapters]
        acquired = self._cache.acquire(slots, self.match(request), is_new=is_new, apart=apart)
        request.admit(acquired, now)
        self._slots[request.slot].request = request
        if is_background:
            return
        self.queue.remove(request)
        client = request.params.client
        if self._turn(client) or self._turns.n_taken - self._round_start >= MAX_ROUND_TURNS:
            self._round_start = self._turns.n_taken
        self._turns.take(client)

    def _release(self, request: Request) -> None:
        """Free a request's slot; the slot's sequence keeps what was computed."""
        self._slots[request.slot].request = None
        self._cache.release(request.slot)

    def _may_wait(self, request: Request) -> bool:
        """True if a running request is computing more of a prompt than is cached."""
        n_in_flight, _ = self._longest_in_flight(request)
        return n_in_flight > self.match(request).n_cached

    def _waits_for_prefix(self, request: Request) -> bool:
        """True if a request should wait while a running one computes a part of its prompt.

        That part must be long enough. It counts from what was cached when the leader was admitted, even if little
        of it is left to compute. A request that has waited for a prefix keeps waiting if another leader takes over.
        """
        if self._cache.settings.is_on_trial or not self._cache.settings.can_reuse:
            return False
        match = self.match(request)
        n_in_flight, leaders = self._longest_in_flight(request)
        if any(_are_siblings(leader, request) and leader.sampler is None for leader in self._running()):
            return True
        if n_in_flight <= match.n_cached:
            return False
        n_cached = min(leader.n_cached_at_admission for leader in leaders)
        if n_in_flight - n_cached > self._cache.settings.min_shared:
            self.n_waits += not request.n_waited_for
            request.n_waited_for = max(request.n_waited_for, n_in_flight)
        waits = min(n_in_flight, request.n_waited_for) > match.n_cached
        if waits and self._cache.settings.has_states:
            for leader in leaders:
                leader.stops.add(n_in_flight)
        return waits

    def _longest_in_flight(self, request: Request) -> tuple[int, Sequence[Request]]:
        """Return the longest prefix of a waiting request that running ones hold or compute, and which these are.

        They are compared by the tokens that they had when they were admitted. One that can no longer share so many
        of them does not count: no checkpoint will be taken after them.
        """
        prefix = request.tokens.view(0, len(request.tokens) - 1)
        longest = 0
        leaders: list[Request] = []
        for leader in self._running():
            if leader.namespace != request.namespace:
                continue
            key = leader.arrival, leader.n_at_admission
            if key not in request.n_common:
                n = n_common(prefix, leader.tokens.view(0, leader.n_at_admission))
                request.n_common[key] = before_tile(prefix, n)
            n = request.n_common[key]
            if n == 0 or n < longest or not self._cache.can_share(leader.slot, n):
                continue
            leaders = [leader] if n > longest else [*leaders, leader]
            longest = n
        return longest, leaders

    def _fits(self, request: Request) -> bool:
        """True if a request's prompt and expected reply fit into the pool together with those of running requests.

        Idle cells count as free, except those of the request's own prefix.
        """
        cache = self._cache
        if not cache.settings.unified:
            return not self.exceeds_part(request)
        running = self._running()
        if not running:
            return True
        expected = {r.slot: len(r.tokens) + self.n_expected(r) for r in running}
        return cache.can_hold(self.match(request), len(request.tokens) + self.n_expected(request), expected)

    def exceeds_part(self, request: Request) -> bool:
        """True if a request is expected to outgrow a part of the pool, and the layout may change."""
        part = self._cache.settings.part_cells
        return 0 < part < len(request.tokens) + self.n_expected(request)

    def n_expected(self, request: Request) -> int:
        """Return how many more tokens a request is expected to generate."""
        expected = max(MIN_EXPECTED_TOKENS, round(self._mean_generated) - request.n_generated)
        expected = min(expected, self.n_ctx_slot - len(request.tokens))
        remaining = request.n_remaining
        return expected if remaining is None else min(remaining, expected)


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


def _free_slots(request: Request, free: Sequence[Slot]) -> list[int]:
    """Return the free slots in which a request may run."""
    return [slot.id for slot in free if request.params.id_slot in (-1, slot.id)]


def _is_due(request: Request) -> bool:
    """True if a request precedes those with longer cached prefixes, and may not be overtaken if it does not fit."""
    return request.has_started or request.n_overtaken >= MAX_OVERTAKEN


def _order(request: Request) -> tuple[int, int, int]:
    """Sort key of the order of admission; the cached prefix is that of the last lookup."""
    if request.slot >= 0 or _is_due(request):
        return request.slot < 0, 0, request.arrival
    return 2, -request.match.n_cached if request.match else 0, request.arrival


def _are_siblings(a: Request, b: Request) -> bool:
    """True if two requests are choices of one prompt."""
    return bool(a.params.group) and (a.params.group, a.namespace) == (b.params.group, b.namespace)
