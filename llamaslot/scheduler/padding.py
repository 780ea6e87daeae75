"""Padding: extra tokens in a small step, computed only because the step then runs faster.

llama.cpp's attention on a CPU takes a step of fewer than `QUERY_BLOCK` tokens token by token, and a larger one a
query block at a time (`StepCost`, fact 22). A prompt whose prefix is cached has few tokens left and a long prefix
to attend to: with padding it is often done several times as fast. In a unified pool it runs in the scratch
sequence, which no other token attends to; in a partitioned one it follows the prompt, for llama.cpp computes other
slots' tokens apart. Its cells are free again by the end of the step. `step.py` sends it after the real tokens, so
that their cells are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.model import QUERY_BLOCK, StepCost

MIN_SPEEDUP = 1.1
"""Factor by which a step must become faster; measurements differ by less."""


class Padding:
    """Decides by `cost`, for a context that computes at most `n_ubatch` tokens at once."""

    def __init__(self, cost: StepCost | None, n_ubatch: int) -> None:
        self._cost = cost if n_ubatch >= QUERY_BLOCK else None

    @staticmethod
    def run(n_tokens: int, seq: int, start: int = 0) -> Run:
        """Padding that fills a step of `n_tokens` up to a query block, in a sequence that holds `start` tokens."""
        return Run(seq, start, np.zeros(QUERY_BLOCK - n_tokens, dtype=np.int32), output=False)

    def gain_ms(self, spans: Sequence[tuple[int, int]], n_used: int) -> float:
        """Milliseconds by which a step is faster as a query block; 0 if it hardly is, or is too large.

        `spans` has for each sequence of the step the tokens that it holds and those to compute; `n_used` cells are
        in use.
        """
        n_tokens = sum(n for _, n in spans)
        if self._cost is None or not 0 < n_tokens < QUERY_BLOCK:
            return 0.0
        # A query block visits each block of cells that any of its tokens attends to, however many do.
        n_cells = min(n_used + n_tokens, sum(start + n for start, n in spans))
        few = self._cost.small_ms(n_tokens, sum(n * (start + n / 2) for start, n in spans))
        block = self._cost.block_ms(n_cells)
        return few - block if few > MIN_SPEEDUP * block else 0.0

    @property
    def eviction_cost_ms(self) -> float:
        """Upper bound on the cost of evicting idle cells for padding: computing as many tokens again."""
        return self._cost.block_ms(QUERY_BLOCK) if self._cost is not None else 0.0
