"""Dummy rows that join the streams of a partitioned pool to fewer passes.

llama.cpp computes tokens of several slots in one pass only where the slots' ids follow one another (fact 3).
Streams in slots 0, 1, 3 and 6 take three passes over the weights; a token in each of the slots 0 to 7 takes one.
A dummy row may cost less than a pass, and a pass of eight rows even less than one of seven, because llama.cpp's
kernels compute four rows together (fact 36).

The time of a pass is learned by its number of rows. The first estimates (`StepCost`) are usually too low, so each
number of rows is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.model import StepCost

MIN_SPEEDUP = 1.05
"""Factor by which a step must become faster."""
MAX_STREAMS = 32
"""Streams up to which rows are chosen: the time that this takes grows with the cube of their number."""
_ROWS_OF_KERNEL = 4
"""Rows that llama.cpp's matrix kernels for CPUs compute together."""
_NEWEST_WEIGHT = 0.2
"""Weight of the newest observation."""
_DECAY = 0.999
"""Factor on `_excess` with each step, so that a passing slowdown does not rule out a number of rows."""


class Passes:
    """Chooses dummy rows for a step of streams by `cost`; none without a cost."""

    def __init__(self, cost: StepCost | None, n_slots: int) -> None:
        self._cost = cost
        self._n_slots = n_slots
        self._excess: dict[int, float] = {}
        """Milliseconds that passes of a number of rows take longer than `cost` says."""

    def fill(self, streams: Sequence[int], held: Mapping[int, int]) -> list[Run]:
        """Return a dummy token for each slot that joins `streams`, their slots in order, to faster passes.

        `held` has the number of tokens of each slot that has a cell free.
        """
        if self._cost is None or not 1 < len(streams) <= MAX_STREAMS:
            return []
        # Least time of the first streams, and the passes that take it.
        best: list[tuple[float, list[range]]] = [(0.0, [])]
        for last in range(len(streams)):
            best.append(
                min(
                    (
                        (before + self._ms(seqs, held), [*passes, seqs])
                        for first, (before, passes) in enumerate(best)
                        # What follows one another is computed together.
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
        return [Run(seq, held[seq], np.zeros(1, dtype=np.int32), output=False) for seq in dummies]

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
        """Return the candidates for a pass of some streams: the fewest slots, and as many as fill up the rows of
        kernels if there are.
        """
        seqs = range(streams[first], streams[last] + 1)
        end = streams[last + 1] - 1 if last + 1 < len(streams) else self._n_slots
        n_more = -len(seqs) % _ROWS_OF_KERNEL
        n_after = min(n_more, max(end - seqs.stop, 0))
        # Sequences before it may be in the pass before.
        n_before = n_more - n_after if first == 0 else 0
        wider = range(max(seqs.start - n_before, 0), seqs.stop + n_after)
        return [seqs, wider] if n_more and len(wider) % _ROWS_OF_KERNEL == 0 else [seqs]

    def _ms(self, seqs: range, held: Mapping[int, int]) -> float:
        """Milliseconds of a pass."""
        assert self._cost is not None
        expected = self._cost.small_ms(len(seqs), sum(held[seq] for seq in seqs))
        return max(expected + self._excess.get(len(seqs), 0.0), 0.0)


def adjacent(seqs: Sequence[int]) -> list[range]:
    """Group ids, which are in order, into ranges of adjacent ones."""
    result: list[range] = []
    for seq in seqs:
        if result and result[-1].stop == seq:
            result[-1] = range(result[-1].start, seq + 1)
        else:
            result.append(range(seq, seq + 1))
    return result
