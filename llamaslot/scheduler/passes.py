"""Dummy rows that join the streams of a partitioned pool into fewer passes.

llama.cpp computes tokens of several slots in one pass only if the slots' ids are consecutive (fact 3). Streams in
slots 0, 1, 3 and 6 take three passes over the weights; a token in each of the slots 0 to 7 takes one. A dummy row
may cost less than a pass, and a pass of eight rows even less than one of seven, because llama.cpp's kernels compute
four rows together (fact 36).

The time of a pass is learned by its number of rows. The first estimates (`StepCost`) are usually too low, so that
each number of rows gets tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.model import StepCost

MIN_SPEEDUP = 1.05
"""Factor by which dummy rows must speed a step up."""
MAX_STREAMS = 32
"""With more streams no dummy rows are added: choosing them takes time in proportion to the cube of their number."""
_ROWS_OF_KERNEL = 4
"""Number of rows that llama.cpp's CPU kernels for matrices compute together (fact 36)."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest observation."""
_DECAY = 0.999
"""Factor on `_excess` after each step, so that a temporary slowdown does not rule out a number of rows forever."""


class Passes:
    """Chooses dummy rows for a step of streams by the measured `cost`; none if that is None."""

    def __init__(self, cost: StepCost | None, n_slots: int) -> None:
        self._cost = cost
        self._n_slots = n_slots
        self._excess: dict[int, float] = {}
        """Milliseconds by which a pass takes longer than `cost` says, by its number of rows."""

    def fill(self, streams: Sequence[int], held: Mapping[int, int]) -> list[Run]:
        """Return dummy tokens in other slots that make a step of `streams` (sorted slot ids) faster.

        `held` has the number of tokens that each slot with a free cell holds.
        """
        if self._cost is None or not 1 < len(streams) <= MAX_STREAMS:
            return []
        # Dynamic programming: for the first 0, 1, 2, ... streams, the least time and the passes that take it.
        best: list[tuple[float, list[range]]] = [(0.0, [])]
        for last in range(len(streams)):
            best.append(
                min(
                    (
                        (before + self._ms(seqs, held), [*passes, seqs])
                        for first, (before, passes) in enumerate(best)
                        # Adjacent slots are always computed in one pass, so no pass begins between two of them.
                        if first == 0 or streams[first] > streams[first - 1] + 1
                        for seqs in self._ranges(streams, first, last)
                        if all(seq in held for seq in seqs)
                    ),
                    key=lambda each: each[0],
                )
            )
        ms, passes = best[-1]
        if ms * MIN_SPEEDUP > sum(self._ms(seqs, held) for seqs in adjacent(streams)):
            return []
        dummies = [seq for seqs in passes for seq in seqs if seq not in streams]
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

    def _ranges(self, streams: Sequence[int], first: int, last: int) -> list[range]:
        """Return the candidates for one pass of some streams: as few slots as possible, and, if there are enough,
        as many as make the number of rows a multiple of `_ROWS_OF_KERNEL`.
        """
        seqs = range(streams[first], streams[last] + 1)
        end = streams[last + 1] - 1 if last + 1 < len(streams) else self._n_slots
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
