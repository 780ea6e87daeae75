"""Taking checkpoints of running requests: where each request stops for one, and which are due before a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.tiers.checkpoints import Checkpoints
from llamaslot.scheduler.checkpoint_stops import prompt_stops
from llamaslot.scheduler.request import Request


class CheckpointTaker:
    """Chooses stops, and takes checkpoints there. Does nothing for models without a partial state.

    `control` has the ids of control tokens: each of them begins or ends a message.
    """

    def __init__(self, cache: KVCache, checkpoints: Checkpoints, control: Collection[int], n_ctx_slot: int) -> None:
        self._cache = cache
        self._checkpoints = checkpoints
        self._control = np.array(sorted(control), dtype=np.int32)
        self._n_ctx_slot = n_ctx_slot

    def choose_stops(self, request: Request) -> None:
        """Choose where an admitted request stops for checkpoints from which later requests may continue."""
        checkpoints = self._checkpoints
        if not checkpoints.has_states or request.is_private:
            return
        # Looked up by tokens, because what is still to be loaded is not on the slot's path yet.
        cached = checkpoints.cached(request.namespace, request.prefix[: request.n_cached_at_admission * WIDTH])
        positions = [each.end for each in cached]
        for each in cached:
            # Both depend on the tokens that follow, which were unknown if the checkpoint was taken at the end of a
            # sequence, or came from disk, the remote tier or a file.
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
            # It continues from the end of a live sequence, and would move that state on without a copy of it.
            request.stops.add(length)

    def take_due(self, ready: Sequence[Request], queue: Sequence[Request]) -> list[Request]:
        """Take the checkpoints that are due, as many as streams allow; returns the requests that may go on.

        Checkpoints that admissions in this plan took count towards the limit. `queue` has the waiting requests.
        """
        checkpoints = self._checkpoints
        limit = self._cache.settings.max_takes_in_gap if self._cache.has_streams else None
        if not checkpoints.has_states or limit == 0:
            # If even one checkpoint takes longer than the gap, none is taken while streams run.
            return list(ready)
        n_left = math.inf if limit is None else max(0, limit - checkpoints.n_to_take)
        go_on = []
        for request in ready:
            if self._is_due(request, queue) and not checkpoints.has_at_end(request.slot):
                if n_left == 0:
                    # This request waits for the next step.
                    continue
                taken = checkpoints.take(request.slot)
                n_left -= taken is not None
                if taken is not None:
                    taken.ends_message |= self._ends_message(request, taken.end)
                    taken.precedes_reply |= self._precedes_reply(request, taken.end)
            go_on.append(request)
        return go_on

    def _ends_message(self, request: Request, position: int) -> bool:
        """True if the token after this position is a control token, which begins or ends a message."""
        next_token = request.tokens.view(position)[:1]
        return bool(np.isin(next_token, self._control).any())

    def _precedes_reply(self, request: Request, position: int) -> bool:
        """True if the prompt ends a few tokens after this position."""
        return 0 < request.n_prompt - position < self._checkpoints.settings.min_gap

    def _is_due(self, request: Request, queue: Sequence[Request]) -> bool:
        """True at a stop, and at the end of a prompt of which further choices are waiting for a slot."""
        length, group = self._cache.length(request.slot), request.params.group
        has_choices = bool(group) and any(other.params.group == group for other in queue)
        return request.stops.has(length) or (length == request.n_prompt and has_choices)
