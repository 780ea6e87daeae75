"""Checkpoints of running requests: where each request stops for one, and which are taken before a step.

The path of a model with a partial state can be continued only from a checkpoint, and that can be taken only between
two steps:

    system prompt ...|user ... |assistant ... |user question                 |assistant
                     1                       2 every `limits.step`      3   4

1. the first message boundary after `min_gap` tokens: usually the end of the system prompt, with which other
   conversations begin as well;
2. at even distances, moved back to the start of a message if one is near;
3. where the prompt diverges from what is cached: other prompts may branch off here as well;
4. the start of the message to be generated, a few tokens before the end of the prompt: templates change what
   follows it, and the same prompt may be sent again. For the end of the reply there is `Checkpoints.take_at_end`;
5. the end of each image, which costs more to encode again than text to compute: others may ask something else;
6. before tokens that are marked for an image or an invocation (`base/cache_ids.py`): others may have another one.

A checkpoint is also taken where a waiting request diverges from this one, and at the end of a prompt of which
further choices are waiting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llamaslot.base.images import between_tiles
from llamaslot.base.tokens import WIDTH, Tokens
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.cache_settings import CheckpointSettings
from llamaslot.scheduler.request import CheckpointStops, Request

_LAST_TOKENS = 4
"""Tokens between the last stop and the end of a prompt without control tokens near its end; also the smallest
distance of a stop from others where `min_gap` does not apply.
"""


class _Checkpoint(Protocol):
    """A checkpoint of the cache, as far as its prompt tells what it is."""

    ends_images: bool
    ends_message: bool
    precedes_reply: bool

    @property
    def end(self) -> int: ...


class CheckpointTaker:
    """Chooses stops, and takes checkpoints there. Does nothing for models without a partial state.

    `control` has the ids of control tokens: each of them begins or ends a message.
    """

    def __init__(self, cache: KVCache, control: Collection[int], n_ctx_slot: int) -> None:
        self._cache = cache
        self._checkpoints = cache.checkpoints
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
            self._mark(request, each)
        request.stops = prompt_stops(
            request.tokens.view(),
            start=request.n_cached_at_admission,
            matched=request.match.n_matched if request.match is not None else 0,
            existing=positions,
            control_at=np.flatnonzero(np.isin(request.inputs(0), self._control)),
            forks=[*request.tiles.image_ends, *request.marked_from],
            settings=checkpoints.settings,
            n_ctx_slot=self._n_ctx_slot,
        )
        length = self._cache.length(request.slot)
        is_far = length - max(positions, default=0) >= checkpoints.settings.limits.step
        if length == request.n_cached_at_admission and is_far:
            # It continues from the end of a live sequence, and would move that state on without a copy of it.
            request.stops.add(length)

    def take_due(self, ready: Sequence[Request], queue: Sequence[Request]) -> list[Request]:
        """Take the checkpoints that are due, as many as decodes allow; returns the requests that may go on.

        Checkpoints that admissions in this plan took count towards the limit. `queue` has the waiting requests.
        """
        checkpoints = self._checkpoints
        limit = self._cache.settings.max_takes_in_gap if self._cache.has_decodes else None
        if not checkpoints.has_states or limit == 0:
            # If even one checkpoint takes longer than the gap, none is taken while requests decode.
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
                    self._mark(request, taken)
            go_on.append(request)
        return go_on

    def _mark(self, request: Request, checkpoint: _Checkpoint) -> None:
        """Record what a checkpoint on the path of a request is to its prompt.

        Only its prompt tells: the checkpoint may have been taken at the end of a sequence, or come from disk, the
        remote tier or a file.
        """
        checkpoint.ends_message |= self._ends_message(request, checkpoint.end)
        checkpoint.precedes_reply |= self._precedes_reply(request, checkpoint.end)
        checkpoint.ends_images |= checkpoint.end in request.tiles.image_ends[-1:]

    def _ends_message(self, request: Request, position: int) -> bool:
        """True if the token after this position is a control token, which begins or ends a message."""
        # Not its id in the cache, which is another one if the token is marked.
        next_token = request.inputs(position, position + 1)
        return bool(np.isin(next_token, self._control).any())

    def _precedes_reply(self, request: Request, position: int) -> bool:
        """True if the prompt ends a few tokens after this position."""
        return 0 < request.n_prompt - position < self._checkpoints.settings.min_gap

    def _is_due(self, request: Request, queue: Sequence[Request]) -> bool:
        """True at a stop, and at the end of a prompt of which further choices are waiting for a slot."""
        length, group = self._cache.length(request.slot), request.params.group
        has_choices = bool(group) and any(other.params.group == group for other in queue)
        return request.stops.has(length) or (length == request.n_prompt and has_choices)


def prompt_stops(
    tokens: Tokens,
    *,
    start: int,
    matched: int,
    existing: Collection[int],
    control_at: npt.NDArray[np.intp],
    forks: Collection[int],
    settings: CheckpointSettings,
    n_ctx_slot: int,
) -> CheckpointStops:
    """Return the stops of a prompt that is computed from `start` on; its first `matched` tokens are in the tree.

    `existing` has the positions of checkpoints on its path, `control_at` those of control tokens, `forks` further
    positions after which other prompts may differ: after each image, and before marked tokens. The stops at even
    distances continue in the reply, up to the end of the context.
    """
    n, gap, step = len(tokens), settings.min_gap, settings.limits.step
    deepest = max((each for each in existing if each <= start), default=0)
    # Only the first of adjacent control tokens.
    starts = control_at[(np.diff(control_at, prepend=-2) > 1) & (control_at > 0)]
    chosen: list[int] = []

    def choose(position: int, least: int) -> None:
        """Choose a position unless a checkpoint or chosen stop is less than `least` tokens away."""
        position = between_tiles(tokens, position)
        if start < position < n and all(abs(position - each) >= least for each in (*existing, *chosen)):
            chosen.append(position)

    last = int(starts[-1]) if len(starts) and n - starts[-1] < gap else n - _LAST_TOKENS
    if n - deepest >= gap:
        choose(last, 1)
        # The first message boundary after `min_gap` tokens, usually the end of the system prompt. Other
        # conversations begin with it too, so it is chosen even if the last stop is near because the first message
        # is short.
        choose(next((int(each) for each in starts if each >= gap), 0), _LAST_TOKENS)
        choose(matched, gap if abs(matched - last) >= gap else _LAST_TOKENS)
    # After the fork: other images may begin there, and one near it must not take its place.
    for fork in forks:
        choose(fork, 1)
    at = deepest
    while at + step < n:
        ideal = at + step
        n_before = int(np.searchsorted(starts, ideal, side="right"))
        near = starts[n_before - 1] if n_before else 0
        at = int(near) if ideal - near <= step // 4 and near > at else ideal
        choose(at, gap)
    in_reply = range(n + step, n_ctx_slot, step)
    return CheckpointStops([*chosen, *in_reply])
