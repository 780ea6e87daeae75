"""Positions at which a step of a running request ends, so that a checkpoint can be taken there.

A model with a partial state can be continued only where a checkpoint was taken, and only between two steps:

    system prompt ...|user ... |assistant ... |user question                 |assistant
                     1                       2 every `step_tokens`      3   4

1. the first message boundary after `min_gap` tokens: as a rule the end of the system prompt, with which other
   conversations begin too;
2. at even distances, moved back to the start of a message where one is near;
3. where the prompt departs from what is cached: others have gone on differently from here, and may again;
4. the start of the message that is to be generated, a few tokens before the end: templates change what is after
   it, and the same prompt may come again. The end of the reply is kept by `Checkpoints.take_at_end`.

Also where a waiting request departs from this one, and at the end of a prompt of which more choices wait.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from llamaslot.base.tokens import Tokens
from llamaslot.kvcache.cache_settings import CheckpointSettings

_LAST_TOKENS = 4
"""Tokens before the end of a prompt without control tokens at which a checkpoint is taken."""


class CheckpointStops:
    """Stops of one request, by position."""

    def __init__(self, positions: Sequence[int] = ()) -> None:
        self._positions = sorted(set(positions))

    def add(self, position: int) -> None:
        """Add a stop."""
        if not self.has(position):
            bisect.insort(self._positions, position)

    def has(self, position: int) -> bool:
        """Return True if there is a stop at a position."""
        at = bisect.bisect_left(self._positions, position)
        return at < len(self._positions) and self._positions[at] == position

    def limit(self, position: int, n: int) -> int:
        """Return how many of `n` tokens a step may compute after a position."""
        at = bisect.bisect_right(self._positions, position)
        return min(n, self._positions[at] - position) if at < len(self._positions) else n


def prompt_stops(
    tokens: Tokens,
    *,
    start: int,
    matched: int,
    existing: Collection[int],
    control: npt.NDArray[np.int32],
    settings: CheckpointSettings,
    n_ctx_slot: int,
) -> CheckpointStops:
    """Return the stops in a prompt that is computed from `start` on; `matched` of its tokens were computed before.

    `existing` are the positions of checkpoints on its path, and `control` the ids of control tokens. The stops at
    even distances go on in the reply, up to the end of the context.
    """
    n, gap = len(tokens), settings.min_gap
    deepest = max((each for each in existing if each <= start), default=0)
    starts = np.flatnonzero(np.isin(tokens, control))
    # Of control tokens that follow each other, the first one.
    starts = starts[(np.diff(starts, prepend=-2) > 1) & (starts > 0)]
    chosen: list[int] = []

    def choose(position: int, least: int) -> None:
        """Choose a position unless another one is closer than `least` tokens above or below it."""
        if start < position < n and all(abs(position - each) >= least for each in (*existing, *chosen)):
            chosen.append(position)

    last = int(starts[-1]) if len(starts) and n - starts[-1] < gap else n - _LAST_TOKENS
    if n - deepest >= gap:
        choose(last, 1)
        # The first message boundary after `min_gap` tokens, as a rule the end of the system prompt: other
        # conversations begin with it, however short the first message of this one is.
        choose(next((int(each) for each in starts if each >= gap), 0), _LAST_TOKENS)
        choose(matched, gap if abs(matched - last) >= gap else _LAST_TOKENS)
    at = deepest
    while at + settings.step_tokens < n:
        ideal = at + settings.step_tokens
        n_before = int(np.searchsorted(starts, ideal, side="right"))
        near = starts[n_before - 1] if n_before else 0
        at = int(near) if ideal - near <= settings.step_tokens // 4 and near > at else ideal
        choose(at, gap)
    in_reply = range(n + settings.step_tokens, n_ctx_slot, settings.step_tokens)
    return CheckpointStops([*chosen, *in_reply])
