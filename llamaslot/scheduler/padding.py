"""Dummy tokens in a small step, which make it faster: padding to a query block, and rows that join decodes.

On a CPU, llama.cpp's attention computes a step of fewer than `QUERY_BLOCK` tokens token by token, and a larger one
a query block at a time (`StepCost`, fact 22). A prompt whose prefix is cached has few tokens to compute and a long
prefix to attend to: padding often makes that several times as fast. In a unified pool the padding is in the scratch
sequence, which no other token attends to. In a partitioned pool it follows the prompt in its slot, because
llama.cpp computes other slots in separate passes. Its cells are free again at the end of the step. `step.py` sends
it after the real tokens, so that these get the same cells as without padding.

In a partitioned pool, decoding requests are computed in one pass only if the ids of their slots are consecutive
(fact 3). Those in slots 0, 1, 3 and 6 take three passes over the weights; a token in each of the slots 0 to 7 takes
one. A dummy row may cost less than a pass, and a pass of eight rows even less than one of seven, because
llama.cpp's kernels compute four rows together (fact 36). The time of a pass is learned by its number of rows. The
first estimates (`StepCost`) are usually too low, so that each number of rows gets tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.model import QUERY_BLOCK, StepCost

MIN_PADDING_SPEEDUP = 1.1
"""Factor by which padding must speed a step up; larger than the noise of the measurements."""
MIN_DUMMY_SPEEDUP = 1.05
"""Factor by which dummy rows must speed a step up."""
MAX_DECODES = 32
"""With more decodes no dummy rows are added: choosing them takes time in proportion to the cube of their number."""
_ROWS_OF_KERNEL = 4
"""Number of rows that llama.cpp's CPU kernels for matrices compute together (fact 36)."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest observation."""
_DECAY = 0.999
"""Factor on `_excess` after each step, so that a temporary slowdown does not rule out a number of rows forever."""


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
        return few - block if few > MIN_PADDING_SPEEDUP * block else 0.0

    @property
    def eviction_cost_ms(self) -> float:
        """Upper bound on the cost of evicting idle cells for padding: the time to compute as many tokens again."""
        return self._cost.block_ms(QUERY_BLOCK) if self._cost is not None else 0.0


class DummyRows:
    """Chooses dummy rows for a step of decoding requests by the measured `cost`; none if that is None."""

    def __init__(self, cost: StepCost | None, n_slots: int) -> None:
        self._cost = cost
        self._n_slots = n_slots
        self._excess: dict[int, float] = {}
        """Milliseconds by which a pass takes longer than `cost` says, by its number of rows."""

    def fill(self, decodes: Sequence[int], held: Mapping[int, int]) -> list[Run]:
        """Return dummy tokens in other slots that make a step of `decodes` (sorted slot ids) faster.

        `held` has the number of tokens that each slot with a free cell holds.
        """
        if self._cost is None or not 1 < len(decodes) <= MAX_DECODES:
            return []
        # Dynamic programming: for the first 0, 1, 2, ... decodes, the least time and the passes that take it.
        best: list[tuple[float, list[range]]] = [(0.0, [])]
        for last in range(len(decodes)):
            best.append(
                min(
                    (
                        (before + self._ms(seqs, held), [*passes, seqs])
                        for first, (before, passes) in enumerate(best)
                        # Adjacent slots are always computed in one pass, so no pass begins between two of them.
                        if first == 0 or decodes[first] > decodes[first - 1] + 1
                        for seqs in self._ranges(decodes, first, last)
                        if all(seq in held for seq in seqs)
                    ),
                    key=lambda each: each[0],
                )
            )
        ms, passes = best[-1]
        if ms * MIN_DUMMY_SPEEDUP > sum(self._ms(seqs, held) for seqs in adjacent(decodes)):
            return []
        dummies = [seq for seqs in passes for seq in seqs if seq not in decodes]
        return [Run(seq, held[seq], np.zeros(1, dtype=np.int32), n_outputs=0) for seq in dummies]

    def observe(self, runs: Sequence[Run], seconds: float) -> None:
        """Learn from a step of these runs of one token each."""
        if self._cost is None:
            return
        held = {run.seq: run.start for run in runs}
        passes = adjacent(sorted(held))
        error = 1e3 * seconds - sum(self._ms(seqs, held) for seqs in passes)
        for n in self._excess:
            self._excess[n] *= _DECAY
        for seqs in passes:
            n = len(seqs)
            self._excess[n] = self._excess.get(n, 0.0) + _NEWEST_WEIGHT * error / len(passes)

    def _ranges(self, decodes: Sequence[int], first: int, last: int) -> list[range]:
        """Return the candidates for one pass of some decodes: as few slots as possible, and, if there are enough,
        as many as make the number of rows a multiple of `_ROWS_OF_KERNEL`.
        """
        seqs = range(decodes[first], decodes[last] + 1)
        end = decodes[last + 1] - 1 if last + 1 < len(decodes) else self._n_slots
        n_more = -len(seqs) % _ROWS_OF_KERNEL
        n_after = min(n_more, max(end - seqs.stop, 0))
        # Only the first pass may be extended downwards: slots below others may be in the pass before.
        n_before = n_more - n_after if first == 0 else 0
        wider = range(max(seqs.start - n_before, 0), seqs.stop + n_after)
        return [seqs, wider] if n_more and len(wider) % _ROWS_OF_KERNEL == 0 else [seqs]

    def _ms(self, seqs: range, held: Mapping[int, int]) -> float:
        """Return the expected milliseconds of a pass."""
        assert self._cost is not None
        expected = self._cost.small_ms(len(seqs), sum(held[seq] for seq in seqs))
        return max(expected + self._excess.get(len(seqs), 0.0), 0.0)


def adjacent(seqs: Sequence[int]) -> list[range]:
    """Group sorted ids into ranges of consecutive ones."""
    result: list[range] = []
    for seq in seqs:
        if result and result[-1].stop == seq:
            result[-1] = range(result[-1].start, seq + 1)
        else:
            result.append(range(seq, seq + 1))
    return result
