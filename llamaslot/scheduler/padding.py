"""Tokens that nobody wants, computed because that makes a step faster.

A step of fewer than `TILE` tokens goes token by token through llama.cpp's attention on a CPU, a larger one takes
`TILE` at once (`StepCost`). A prompt whose prefix is known has few tokens left, and a long prefix to attend to: it
is often done several times as fast with as many again beside it. They are a run of their own in the scratch
sequence, which no other token attends to, and their cells are free again by the end of the step.
`scheduler/step.py` sends them last, and llama.cpp places tokens in their order:
those of requests lie where they would lie without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.model import TILE, StepCost

_GAIN = 1.1
"""Factor by which a step must become faster; measurements differ by less."""


class Padding:
    """Decides by `cost`, on a context that computes at most `n_ubatch` tokens at once; `scratch` is left empty."""

    def __init__(self, cost: StepCost | None, scratch: int | None, n_ubatch: int) -> None:
        self._cost = cost if n_ubatch >= TILE and scratch is not None else None
        self._scratch = scratch

    def run(self, n_tokens: int) -> Run:
        """What fills a step of so many tokens up to a tile."""
        assert self._scratch is not None
        return Run(self._scratch, 0, np.zeros(TILE - n_tokens, dtype=np.int32), output=False)

    def gain_ms(self, spans: Sequence[tuple[int, int]], n_used: int) -> float:
        """Milliseconds by which a step is faster as a tile; 0 where it hardly is, or cannot be one.

        For each sequence of the step `spans` has the tokens that it holds and those to compute; `n_used` cells are
        in use.
        """
        n_tokens = sum(n for _, n in spans)
        if self._cost is None or not 0 < n_tokens < TILE:
            return 0.0
        # A tile goes through each block of cells that one of its tokens attends to, however many do.
        n_cells = min(n_used + n_tokens, sum(start + n for start, n in spans))
        few = self._cost.few_ms(n_tokens, sum(n * (start + n / 2) for start, n in spans))
        tile = self._cost.tile_ms(n_cells)
        return few - tile if few > _GAIN * tile else 0.0

    @property
    def price_ms(self) -> float:
        """What it costs at most to give up the cells of idle tokens for it: to compute as many again."""
        return self._cost.tile_ms(TILE) if self._cost is not None else 0.0
