"""Oracle for reuse: compares logits after a reuse point with a cold run, within what rounding explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.raw_context import Logits, RawContext, RawModel

N_COMPARED = 64
"""Positions after the reuse point at which logits are compared."""
CHUNKS = (16, 64)
N_IDLE = 4
LEAST_SHARE = 1e-3
"""Part of the logits' standard deviation below which two runs always count as equal."""


@contextmanager
def opened(model: RawModel, **fields: Any) -> Iterator[RawContext]:
    """Open a context for one test."""
    context = RawContext(model, **fields)
    try:
        yield context
    finally:
        context.close()


def distance(one: Logits, other: Logits) -> npt.NDArray[np.float32]:
    """Return the rms of the difference at each position."""
    rms: npt.NDArray[np.float32] = np.sqrt(np.square(one - other).mean(axis=1))
    return rms


class ColdRun:
    """Logits at the positions `reused` .. `reused` + 63 of some ids, computed without any reuse.

    `noise` is the largest rms distance between two cold runs that differ only in chunk sizes or cells. `bound` is
    twice that, as cells that were not tried may move logits farther, and at least `LEAST_SHARE` of their deviation.
    A warm run must have the chunk boundaries of `logits`: one at `reused`, no other.
    """

    def __init__(self, model: RawModel, ids: Sequence[int], reused: int, **fields: Any) -> None:
        self._model, self._fields = model, fields
        self._ids, self._reused = list(ids[: reused + N_COMPARED]), reused
        assert len(self._ids) == reused + N_COMPARED
        self.logits = self._run()
        runs = [self.logits, self._run(n_idle=N_IDLE)]
        for chunk in CHUNKS:
            runs += [self._run(chunk), self._run(chunk, is_scattered=True)]
        self.noise = max(float(distance(*pair).max()) for pair in combinations(runs, 2))
        self.bound = max(2 * self.noise, LEAST_SHARE * float(self.logits.std()))

    def share(self, warm: Logits) -> float:
        """Return the largest distance of a warm run at any position, as a multiple of the bound."""
        assert np.isfinite(warm).all()
        return float(distance(warm, self.logits).max()) / self.bound

    def _run(self, chunk: int = 0, *, n_idle: int = 0, is_scattered: bool = False) -> Logits:
        """Return the logits of a cold run.

        `n_idle` short sequences take the first cells. If it is scattered, another sequence takes a few cells after
        each chunk.
        """
        with opened(self._model, **self._fields) as context:
            for seq in range(1, n_idle + 1):
                context.feed(seq, 0, self._ids[seq : seq + 11])
            start, length = 0, chunk or self._reused
            for at in range(0, self._reused, length):
                context.feed(0, at, self._ids[at : min(at + length, self._reused)])
                if is_scattered:
                    context.feed(1, start, self._ids[at : at + 7])
                    start += len(self._ids[at : at + 7])
            return context.feed(0, self._reused, self._ids[self._reused :], chunk)
