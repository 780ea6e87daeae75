"""Tokens that nobody wants, computed because that makes a step faster.

A step of fewer than `TILE` tokens goes token by token through llama.cpp's attention on a CPU, a larger one takes
`TILE` at once (`BatchCost`). A prompt whose prefix is known has few tokens left, and long ones to attend to: it is
often done several times as fast with as many again beside it. They are a run of their own in the scratch sequence,
which no other token attends to, and their cells are free again by the end of the step: the tokens of requests lie
where they would lie without, since llama.cpp places them first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamaslot.base.model import TILE, BatchCost
from llamaslot.core.backend import Run


class Padding:
    """Decides by `cost`, on a context that computes at most `n_ubatch` tokens at once; `scratch` is left empty."""

    def __init__(self, cost: BatchCost | None, scratch: int | None, n_ubatch: int) -> None:
        self._cost = cost if n_ubatch >= TILE else None
        self._scratch = scratch

    def run(self, runs: Sequence[Run], n_used: int) -> Run | None:
        """What to add to `runs`, if that pays; `n_used` cells are in use before them."""
        n = sum(len(run.tokens) for run in runs)
        if self._cost is None or self._scratch is None or not 0 < n < TILE:
            return None
        attended = sum(len(run.tokens) * (run.start + len(run.tokens) / 2) for run in runs)
        plain = n * self._cost.row_us + attended * self._cost.row_cell_us
        padded = self._cost.tile_us + (n_used + n) * self._cost.tile_cell_us
        if padded >= plain:
            return None
        return Run(self._scratch, 0, np.zeros(TILE - n, dtype=np.int32), output=False)
