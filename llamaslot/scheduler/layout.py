"""Layout of the pool: one for all slots, or a part for each, as the requests of now want it.

    unified        sequences share cells, and a request may take all of them. But each token is compared with
                   everybody's cells: those of others are masked, which takes time all the same.
    partitioned    a token attends to the cells of its own slot only. But a shared prefix is copied to each slot,
                   and no request may be longer than a part.

A change saves the pool to RAM, makes the context again, and gives running requests their KV back:

    requests    too long for a part    own tokens    saves the time of two changes    layout
    ----------------------------------------------------------------------------------------
    any         one is                 any           any                              unified
    any         one is expected to be  any           any                              stays
    one         no                     any           any                              stays
    several     no                     most          partitioned                      partitioned
    several     no                     few           partitioned                      stays
    several     no                     any           unified                          unified

It stays as well while memory is short. What a layout saves counts until these requests end. A long request ends it
earlier, so after each one that unified the pool, the next partition must save twice as much, until none came for a
while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from llamaslot.base.tokens import n_common
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.admission import Admission
from llamaslot.scheduler.request import Request

_MAX_SHARED = 1.5
"""Tokens of all requests over those that differ, up to which a pool is partitioned: more take many more cells."""
_MIN_CHANGES, _MAX_CHANGES = 2, 256
"""Changes that another layout must save the time of, after the last long request and after many of them."""
_RARER_FOR_S = 60.0
"""Seconds after a long request unified the pool, in which partitions stay rarer."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of some requests."""

    total: int
    """Of all of them, those that they are expected to generate included."""
    distinct: int
    """The same, but what several begin with counts once."""
    foreign: int
    """Pairs of a token that is still to be computed and a cell of another request, in a unified pool."""
    copied: int
    """Tokens that waiting requests begin with as others do, which parts copy to each slot."""
    held: int
    """Tokens that running requests hold."""


class LayoutChoice:
    """Decides which layout requests want. Times are seconds on the caller's clock."""

    def __init__(self, cache: KVCache, admission: Admission) -> None:
        self._cache = cache
        self._admission = admission
        self._seen: tuple[bool, frozenset[str]] | None = None
        """Layout and requests of the last plan."""
        self._is_considered = False
        """True if these were considered: only others may want another layout."""
        self._n_changes = _MIN_CHANGES
        self._rarer_until = 0.0

    def decide(self, running: Sequence[Request], now: float) -> bool:
        """Return the layout, true for unified, for requests that run and for those that free slots go to next."""
        settings = self._cache.settings
        waiting = self._admission.next_up(running)
        is_too_long = any(len(request.tokens) > settings.part_cells for request in running)
        # While memory is short, a change would cost running requests their KV: a long one waits for them.
        may_change = settings.unified or not running or self._cache.can_empty_pool
        if is_too_long or (may_change and any(map(self._admission.exceeds_part, waiting))):
            if not settings.unified:
                self._n_changes = min(2 * self._n_changes, _MAX_CHANGES)
                self._rarer_until = now + _RARER_FOR_S
            return True
        requests = [*running, *waiting]
        seen = settings.unified, frozenset(request.id for request in requests)
        if seen != self._seen:
            # Those that come at once arrive one by one: the first of them say little about all.
            self._seen, self._is_considered = seen, False
        elif len(requests) > 1 and not self._is_considered:
            self._is_considered = True
            if now >= self._rarer_until:
                self._n_changes = _MIN_CHANGES
            return self._cheaper(requests, n_running=len(running))
        return settings.unified

    def _cheaper(self, requests: Sequence[Request], *, n_running: int) -> bool:
        """Return the layout in which requests take less time, a change to it included."""
        settings = self._cache.settings
        # What RAM has no memory for would be computed again.
        if not self._cache.can_empty_pool or any(map(self._admission.exceeds_part, requests)):
            return settings.unified
        tokens = self._count(requests, n_running=n_running)
        change_us = 1e3 * settings.context_ms + settings.move_us(self._cache.cells.used, tokens.held)
        gain_us = settings.foreign_us * tokens.foreign - settings.move_us(tokens.copied, tokens.copied)
        if not settings.unified:
            return -gain_us > _MIN_CHANGES * change_us
        return tokens.total > _MAX_SHARED * tokens.distinct or gain_us <= self._n_changes * change_us

    def _count(self, requests: Sequence[Request], *, n_running: int) -> _Tokens:
        lengths = [len(request.tokens) + self._admission.n_expected(request) for request in requests]
        # Neighbours in this order have the longest prefixes in common.
        ordered = sorted(requests, key=lambda request: (request.namespace, request.prefix))
        common = [
            n_common(a.tokens.view(), b.tokens.view()) if a.namespace == b.namespace else 0
            for a, b in pairwise(ordered)
        ]
        shared = {
            each.id: max(both)
            for each, both in zip(ordered, zip([0, *common], [*common, 0], strict=True), strict=True)
        }
        distinct = sum(lengths) - sum(common)
        held = [self._cache.length(request.slot) for request in requests[:n_running]]
        cached = [*held, *(request.match.n_cached if request.match else 0 for request in requests[n_running:])]
        to_compute = [n - min(m, n) for n, m in zip(lengths, cached, strict=True)]
        return _Tokens(
            total=sum(lengths),
            distinct=distinct,
            foreign=sum(n * (distinct - own) for n, own in zip(to_compute, lengths, strict=True)),
            copied=sum(shared[request.id] for request in requests[n_running:]),
            held=sum(held),
        )
