"""Layout of the pool: unified or partitioned, whichever suits the current requests better.

    unified        sequences share cells, and a request may use all of them. But attention also scans the cells of
                   other sequences: they are masked, which takes as much time.
    partitioned    attention scans only the cells of the token's own slot. But a shared prefix is copied to each
                   slot, and no request may be longer than a part.

A change saves the pool to RAM, creates the context again, and loads the KV of running requests:

    requests    too long for a part    own tokens    saves the time of two changes    layout
    ----------------------------------------------------------------------------------------
    any         one is                 any           any                              unified
    any         one is expected to be  any           any                              stays
    one         no                     any           any                              stays
    several     no                     most          partitioned                      partitioned
    several     no                     few           partitioned                      stays
    several     no                     any           unified                          unified

While memory is short, the layout stays too, and while a request runs whose context was shifted. Savings are
estimated up to the end of the current requests, but a long request that arrives meanwhile forces a change back. So
each time that happens, the next partition must save twice as much, until no such request has come for a while.

How long replies will be is not known. So the same requests are considered again after every `MIN_EXPECTED_TOKENS`
tokens, and each is expected to generate at least as many more as it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from llamaslot.base.tokens import n_common
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.admission import MIN_EXPECTED_TOKENS, Admission
from llamaslot.scheduler.request import Request

_MAX_SHARED = 4.0
"""Largest ratio of all tokens to distinct tokens at which the pool is partitioned. Each part needs its own copy of
a shared prefix, which beyond this takes as much time as it saves: eight conversations of 3,000 tokens took 27, 22,
7.3 and 3.0 s in a unified pool if 50, 70, 80 and 90% were shared, and 7.3, 5.7, 4.6 and 3.3 s in parts (60m, two
cores).
"""
_MIN_CHANGES, _MAX_CHANGES = 2, 256
"""Threshold for a change of layout, in durations of a change: the other layout must save at least this much time.
The threshold starts at the first number and doubles, up to the second, with each long request that unified the
pool.
"""
_RARER_FOR_S = 60.0
"""Time after a long request unified the pool until the threshold for partitions returns to `_MIN_CHANGES`."""


class LayoutChoice:
    """Decides which layout suits the requests. Times are seconds on the caller's clock."""

    def __init__(self, cache: KVCache, admission: Admission) -> None:
        self._cache = cache
        self._admission = admission
        self._seen: tuple[bool, frozenset[str]] | None = None
        """Layout and ids of the requests at the last plan."""
        self._consider_at = 0
        """Number of tokens that those requests have generated in all when a change is considered next."""
        self._n_changes = _MIN_CHANGES
        self._rarer_until = 0.0

    def decide(self, running: Sequence[Request], now: float) -> bool:
        """Return the layout (True for unified) for running requests and those that free slots go to next."""
        settings = self._cache.settings
        waiting = self._admission.next_up()
        # Forced tokens may exceed a context that is shifted before they are computed.
        n_ctx = self._admission.n_ctx_slot
        is_too_long = any(min(len(request.tokens), n_ctx) > settings.part_cells for request in running)
        # While memory is short, running requests would lose their KV by a change, so a long request waits for them.
        may_change = settings.unified or not running or self._cache.can_empty_pool
        if is_too_long or (may_change and any(map(self._admission.exceeds_part, waiting))):
            if not settings.unified:
                self._n_changes = min(2 * self._n_changes, _MAX_CHANGES)
                self._rarer_until = now + _RARER_FOR_S
            return True
        if any(request.n_discarded for request in running):
            # What a context shift has left cannot be saved.
            return settings.unified
        requests = [*running, *waiting]
        seen = settings.unified, frozenset(request.id for request in requests)
        n_generated = sum(request.n_generated for request in requests)
        if seen != self._seen:
            # Wait for one more plan: of requests sent together, some may still be arriving.
            self._seen, self._consider_at = seen, 0
        elif len(requests) > 1 and n_generated >= self._consider_at:
            self._consider_at = n_generated + MIN_EXPECTED_TOKENS * len(requests)
            if now >= self._rarer_until:
                self._n_changes = _MIN_CHANGES
            return self._cheaper(requests, n_running=len(running))
        return settings.unified

    def _cheaper(self, requests: Sequence[Request], *, n_running: int) -> bool:
        """Return the layout in which requests take less time, including the time of a change."""
        settings = self._cache.settings
        # Without memory for the saved pool, its tokens would have to be computed again.
        if not self._cache.can_empty_pool or any(map(self._admission.exceeds_part, requests)):
            return settings.unified
        # All tokens, including those that the requests are expected to generate.
        lengths = [len(request.tokens) + self._n_expected(request) for request in requests]
        # The same, but shared prefixes count once. In this order each request shares its longest with a neighbour.
        ordered = sorted(requests, key=lambda request: (request.namespace, request.prefix))
        common = [
            n_common(a.tokens.view(), b.tokens.view()) if a.namespace == b.namespace else 0
            for a, b in pairwise(ordered)
        ]
        n_distinct = sum(lengths) - sum(common)
        # Tokens of waiting requests' shared prefixes, which a partitioned pool copies to their slots.
        waiting = set(requests[n_running:])
        shared = zip(ordered, [0, *common], [*common, 0], strict=True)
        n_copied = sum(max(before, after) for request, before, after in shared if request in waiting)
        # Pairs of a token still to be computed and a cell of another request, in a unified pool.
        held = [self._cache.length(request.slot) for request in requests[:n_running]]
        cached = [*held, *(request.match.n_cached if request.match else 0 for request in requests[n_running:])]
        n_foreign = sum((n - min(m, n)) * (n_distinct - n) for n, m in zip(lengths, cached, strict=True))
        change_us = 1e3 * settings.context_ms + settings.move_us(self._cache.cells.used, sum(held))
        gain_us = settings.cost.foreign_us * n_foreign - settings.move_us(n_copied, n_copied)
        if not settings.unified:
            return -gain_us > _MIN_CHANGES * change_us
        return sum(lengths) > _MAX_SHARED * n_distinct or gain_us <= self._n_changes * change_us

    def _n_expected(self, request: Request) -> int:
        """Return how many more tokens a request is expected to generate, but not more than fit into a part."""
        remaining = request.n_remaining
        longer = request.n_generated if remaining is None else min(request.n_generated, remaining)
        longer = min(longer, self._cache.settings.part_cells - len(request.tokens))
        return max(self._admission.n_expected(request), longer)
