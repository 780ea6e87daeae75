"""Layout of the pool: one for all slots, or a part for each, as the requests of now want it.

    unified        sequences share cells, and a request may take all of them. But each token is compared with
                   everybody's cells: those of others are masked, which takes time all the same.
    partitioned    a token attends to the cells of its own slot only. But a shared prefix is copied to each slot,
                   and no request may be longer than a part.

A change saves the pool to RAM, makes the context again, and loads what running requests hold:

    requests    own tokens    too long    cheaper partitioned, by two changes    layout
    -----------------------------------------------------------------------------------
    one         any           any         any                                    stays
    several     any           one is      any                                    unified
    several     most          none        yes                                    partitioned
    several     few           none        yes                                    stays

Both costs count what is still to be computed, so a change is worth it by the requests of now alone, and requests
that alternate do not make it go back and forth for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llamaslot.base.tokens import n_common
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.request import Request

_MAX_SHARED = 1.5
"""Tokens of all requests over those that differ, up to which a pool is partitioned: more take many more cells."""
_MIN_CHANGES = 2
"""Changes that another layout must save the time of."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of some requests."""

    held: int
    """Of all of them, those that they are expected to generate included."""
    distinct: int
    """The same, but what several begin with counts once."""
    longest: int
    foreign: int
    """Pairs of a token that is still to be computed and a cell of another request, in a unified pool."""
    copied: int
    """Tokens of waiting requests that others have in another slot."""
    cached: int
    """Tokens that running requests hold."""


class LayoutChoice:
    """Decides which layout requests want; `n_expected` returns the tokens that one is expected to generate."""

    def __init__(self, cache: KVCache, n_expected: Callable[[Request], int]) -> None:
        self._cache = cache
        self._n_expected = n_expected
        self._considered: tuple[bool, tuple[str, ...]] | None = None
        """Layout and requests that were considered last: only others may want another one."""

    def wanted(self, running: Sequence[Request], waiting: Sequence[Request]) -> bool:
        """Return the layout, true for unified, for requests that run or will as soon as there are slots."""
        settings = self._cache.settings
        part, unified = settings.part_cells, settings.unified
        if not part:
            return unified
        if any(len(request.tokens) > part for request in running):
            return True
        if any(len(request.tokens) + self._n_expected(request) > part for request in waiting):
            return True
        requests = [*running, *waiting][: settings.n_slots]
        considered = unified, tuple(request.id for request in requests)
        if considered != self._considered:
            self._considered = considered
            unified = self._cheaper(requests, n_running=len(running))
        return unified

    def _cheaper(self, requests: Sequence[Request], *, n_running: int) -> bool:
        """Return the layout in which requests take less time, a change to it included."""
        settings = self._cache.settings
        if not requests:
            return settings.unified
        tokens = self._count(requests, n_running=n_running)
        if tokens.longest > settings.part_cells:
            return True
        change_us = 1e3 * settings.layout_ms + settings.save_us * self._cache.cells.used
        change_us += settings.load_us * tokens.cached
        gain_us = settings.foreign_us * tokens.foreign - (settings.save_us + settings.load_us) * tokens.copied
        if not settings.unified:
            return -gain_us > _MIN_CHANGES * change_us
        return tokens.held > _MAX_SHARED * tokens.distinct or gain_us <= _MIN_CHANGES * change_us

    def _count(self, requests: Sequence[Request], *, n_running: int) -> _Tokens:
        lengths = [len(request.tokens) + self._n_expected(request) for request in requests]
        # Neighbours in this order have the longest prefixes in common.
        ordered = sorted(requests, key=lambda request: (request.namespace, request.prefix))
        shared = {
            b.id: n_common(a.tokens.view(), b.tokens.view()) if a.namespace == b.namespace else 0
            for a, b in pairwise(ordered)
        }
        distinct = sum(lengths) - sum(shared.values())
        held = [self._cache.length(request.slot) for request in requests[:n_running]]
        cached = [*held, *(request.match.n_cached if request.match else 0 for request in requests[n_running:])]
        to_compute = [n - min(m, n) for n, m in zip(lengths, cached, strict=True)]
        return _Tokens(
            held=sum(lengths),
            distinct=distinct,
            longest=max(lengths),
            foreign=sum(n * (distinct - own) for n, own in zip(to_compute, lengths, strict=True)),
            copied=sum(shared.get(request.id, 0) for request in requests[n_running:]),
            cached=sum(held),
        )
