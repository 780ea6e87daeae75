"""Stops: positions at which a step of a running request must end, so that a checkpoint can be taken there.

The path of a model with a partial state can be continued only from a checkpoint, and that can be taken only between
two steps:

    system prompt ...|user ... |assistant ... |user question                 |assistant
                     1                       2 every `step_tokens`      3   4

1. the first message boundary after `min_gap` tokens: usually the end of the system prompt, with which other
   conversations begin as well;
2. at even distances, moved back to the start of a message if one is near;
3. where the prompt diverges from what is cached: other prompts may branch off here as well;
4. the start of the message to be generated, a few tokens before the end of the prompt: templates change what
   follows it, and the same prompt may be sent again. For the end of the reply there is `Checkpoints.take_at_end`.

A checkpoint is also taken where a waiting request diverges from this one, and at the end of a prompt of which
further choices are waiting.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from llamaslot.base.tokens import Tokens
from llamaslot.kvcache.cache_settings import CheckpointSettings

_LAST_TOKENS = 4
"""Tokens between the last stop and the end of a prompt without control tokens near its end; also the smallest
distance of a stop from others where `min_gap` does not apply.
"""


class CheckpointStops:
    """Positions of the stops of one request."""

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
        """Return how many of the `n` tokens after `position` a step may compute."""
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
    """Return the stops of a prompt that is computed from `start` on; its first `matched` tokens are in the tree.

    `existing` has the positions of checkpoints on its path, `control` the ids of control tokens. The stops at even
    distances continue in the reply, up to the end of the context.
    """
    n, gap = len(tokens), settings.min_gap
    deepest = max((each for each in existing if each <= start), default=0)
    starts = np.flatnonzero(np.isin(tokens, control))
    # Only the first of adjacent control tokens.
    starts = starts[(np.diff(starts, prepend=-2) > 1) & (starts > 0)]
    chosen: list[int] = []

    def choose(position: int, least: int) -> None:
        """Choose a position unless a checkpoint or chosen stop is less than `least` tokens away."""
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
    at = deepest
    while at + settings.step_tokens < n:
        ideal = at + settings.step_tokens
        n_before = int(np.searchsorted(starts, ideal, side="right"))
        near = starts[n_before - 1] if n_before else 0
        at = int(near) if ideal - near <= settings.step_tokens // 4 and near > at else ideal
        choose(at, gap)
    in_reply = range(n + settings.step_tokens, n_ctx_slot, settings.step_tokens)
    return CheckpointStops([*chosen, *in_reply])
