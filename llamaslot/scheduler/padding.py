"""Padding: dummy tokens in a small step, which make it faster.

On a CPU, llama.cpp's attention computes a step of fewer than `QUERY_BLOCK` tokens token by token, and a larger one
a query block at a time (`StepCost`, fact 22). A prompt whose prefix is cached has few tokens to compute and a long
prefix to attend to: padding often makes that several times as fast. In a unified pool the padding is in the scratch
sequence, which no other token attends to. In a partitioned pool it follows the prompt in its slot, because
llama.cpp computes other slots in separate passes. Its cells are free again at the end of the step. `step.py` sends
it after the real tokens, so that these get the same cells as without padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.model import QUERY_BLOCK, StepCost

MIN_SPEEDUP = 1.1
"""Factor by which padding must speed a step up; larger than the noise of the measurements."""


class Padding:
    """Decides on padding by the measured `cost`, for a context with micro-batches of `n_ubatch` tokens."""

    def __init__(self, cost: StepCost | None, n_ubatch: int) -> None:
        self._cost = cost if n_ubatch >= QUERY_BLOCK else None

    @staticmethod
    def run(n_tokens: int, seq: int, start: int = 0) -> Run:
        """Return padding that fills up a step to a query block, in a sequence that holds `start` tokens."""
        return Run(seq, start, np.zeros(QUERY_BLOCK - n_tokens, dtype=np.int32), n_outputs=0)

    def gain_ms(self, spans: Sequence[tuple[int, int]], n_used: int) -> float:
        """Return by how many milliseconds padding to a query block makes a step faster; 0 if it does not pay.

        `spans` has, for each sequence of the step, the number of tokens that it holds and the number to compute;
        `n_used` cells are in use.
        """
        n_tokens = sum(n for _, n in spans)
        if self._cost is None or not 0 < n_tokens < QUERY_BLOCK:
            return 0.0
        # A query block scans each block of cells once, however many of its tokens attend to it.
        n_cells = min(n_used + n_tokens, sum(start + n for start, n in spans))
        few = self._cost.small_ms(n_tokens, sum(n * (start + n / 2) for start, n in spans))
        block = self._cost.block_ms(n_cells)
        return few - block if few > MIN_SPEEDUP * block else 0.0

    @property
    def eviction_cost_ms(self) -> float:
        """Upper bound on the cost of evicting idle cells for padding: the time to compute as many tokens again."""
        return self._cost.block_ms(QUERY_BLOCK) if self._cost is not None else 0.0
