"""Taking checkpoints of running requests: where each of them stops, and which are due before a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.cache import KVCache
from llamaslot.scheduler.checkpoint_stops import prompt_stops
from llamaslot.scheduler.request import Request


class CheckpointTaker:
    """Takes checkpoints of running requests at stops that it chooses. Without a partial state it does nothing.

    `control` are the ids of control tokens: a message begins or ends at each of them.
    """

    def __init__(self, cache: KVCache, control: Collection[int], n_ctx_slot: int) -> None:
        self._cache = cache
        self._control = np.array(sorted(control), dtype=np.int32)
        self._n_ctx_slot = n_ctx_slot

    def choose_stops(self, request: Request) -> None:
        """Choose where an admitted request stops for checkpoints that later ones may continue from."""
        checkpoints = self._cache.checkpoints
        if not checkpoints.has_states or request.is_private:
            return
        # What is loaded for it is not on the slot's path yet.
        cached = checkpoints.cached(request.namespace, request.prefix[: request.n_cached_at_admission * WIDTH])
        positions = [each.end for each in cached]
        for each in cached:
            # The next token was not known where it was taken at the end of a sequence, or read from elsewhere.
            each.ends_message |= self._ends_message(request, each.end)
            each.precedes_reply |= self._precedes_reply(request, each.end)
        request.stops = prompt_stops(
            request.tokens.view(),
            start=request.n_cached_at_admission,
            matched=request.match.n_matched if request.match is not None else 0,
            existing=positions,
            control=self._control,
            settings=checkpoints.settings,
            n_ctx_slot=self._n_ctx_slot,
        )
        length = self._cache.length(request.slot)
        is_far = length - max(positions, default=0) >= checkpoints.settings.step_tokens
        if length == request.n_cached_at_admission and is_far:
            # It continues from a sequence's end, and so moves the state on.
            request.stops.add(length)

    def take_due(self, ready: Sequence[Request], queue: Sequence[Request]) -> list[Request]:
        """Take the checkpoints that are due, as many as streams allow; returns the requests that may go on.

        What admitted requests needed taken counts too. `queue` are the requests that wait.
        """
        checkpoints = self._cache.checkpoints
        limit = self._cache.settings.max_takes_in_gap if self._cache.has_streams else None
        if not checkpoints.has_states or limit == 0:
            # A checkpoint that fits into no gap is not taken.
            return list(ready)
        n_left = math.inf if limit is None else max(0, limit - checkpoints.n_to_take)
        go_on = []
        for request in ready:
            if self._is_due(request, queue) and not checkpoints.has_at_end(request.slot):
                if n_left == 0:
                    # It waits for the next gap.
                    continue
                taken = checkpoints.take(request.slot)
                n_left -= taken is not None
                if taken is not None:
                    taken.ends_message |= self._ends_message(request, taken.end)
                    taken.precedes_reply |= self._precedes_reply(request, taken.end)
            go_on.append(request)
        return go_on

    def _ends_message(self, request: Request, position: int) -> bool:
        """True if the token of a request at this position begins or ends a message."""
        next_token = request.tokens.view(position)[:1]
        return bool(np.isin(next_token, self._control).any())

    def _precedes_reply(self, request: Request, position: int) -> bool:
        """True if the prompt of a request ends a few tokens after this position."""
        return 0 < request.n_prompt - position < self._cache.checkpoints.settings.min_gap

    def _is_due(self, request: Request, queue: Sequence[Request]) -> bool:
        """True at a stop, and at the end of a prompt of which other choices wait for a slot."""
        length, group = self._cache.length(request.slot), request.submit.group
        has_choices = bool(group) and any(other.submit.group == group for other in queue)
        return request.stops.has(length) or (length == request.n_prompt and has_choices)
