"""What scattered holes cost: prefill into single free cells between idle ones, and behind as many in a row.

Asked of the backend alone. Pairs of sequences are computed side by side, so that behind every `SPAN - 1` cells of
one lies a single cell of the other; when the other goes, each of its cells is a hole.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import numpy as np

from bench.client import BenchmarkError
from bench.report import Summary
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run, Status
from llamaslot.base.commands import Sampling
from llamaslot.base.kv_ops import Remove

PROMPT = 256
SPAN = 23
ROUNDS, PAIRS = 29, 9
"""Each round makes a hole with each of the pairs: 261 in all."""
IDLE, GAPS, FRESH = range(PAIRS), range(PAIRS, 2 * PAIRS), 2 * PAIRS
"""Sequence ids: what stays, what makes the holes, what is measured."""


class Pool:
    """A pool with as many idle cells either way."""

    def __init__(self, settings: LlamaSettings, *, rounds: int, scattered: bool) -> None:
        n_cells = rounds * PAIRS * SPAN
        self._backend = LlamaBackend(replace(settings, n_ctx=n_cells, n_slots=FRESH + 1, n_cache_seqs=0))
        self._sampler = self._backend.new_sampler(Sampling(temperature=0.0), np.empty(0, np.int32))
        self._random = np.random.default_rng(1)
        for i in range(rounds):
            runs = []
            for idle, gap in zip(IDLE, GAPS, strict=True):
                runs.append(self._fresh(idle, i * (SPAN - 1), SPAN - 1))
                runs += [self._fresh(gap, i, 1)] if scattered else []
            self._decode(*runs)
        for gap in GAPS:
            self._backend.change(Remove(gap, 0))

    def prefill(self) -> float:
        """Seconds that a fresh prompt takes, which leaves nothing behind."""
        run = self._fresh(FRESH, 0, PROMPT)
        started = perf_counter()
        self._decode(run)
        self._backend.sample([(FRESH, self._sampler)])
        seconds = perf_counter() - started
        self._backend.change(Remove(FRESH, 0))
        return seconds

    def close(self) -> None:
        """Free the model."""
        self._sampler.close()
        self._backend.close()

    def _decode(self, *runs: Run) -> None:
        if (status := self._backend.decode(runs).status) is not Status.OK:
            raise BenchmarkError(f"llama.cpp could not compute beside idle cells: {status.name}")

    def _fresh(self, seq: int, start: int, n_tokens: int) -> Run:
        tokens = self._random.integers(0, self._backend.info.n_vocab, n_tokens, dtype=np.int32)
        return Run(seq, start, tokens, output=seq == FRESH)


def among_holes(settings: LlamaSettings, repeats: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of prefill with and without holes in turn (A B B A), and their ratios by pairs."""
    pools = {kind: Pool(settings, rounds=rounds, scattered=kind == "scattered") for kind in ("scattered", "row")}
    seconds: dict[str, list[float]] = {kind: [] for kind in pools}
    for pool in pools.values():
        pool.prefill()
    for repeat in range(repeats):
        for kind in list(pools) if repeat % 2 == 0 else list(pools)[::-1]:
            seconds[kind].append(pools[kind].prefill())
    for pool in pools.values():
        pool.close()
    ratios = [a / b for a, b in zip(seconds["scattered"], seconds["row"], strict=True)]
    return {
        "holes": rounds * PAIRS,
        "idle_cells": rounds * PAIRS * (SPAN - 1),
        "seconds": {kind: asdict(Summary.of(times)) for kind, times in seconds.items()},
        "ratio": asdict(Summary.of(ratios)),
    }


def line(result: dict[str, Any]) -> str:
    """What came of it, to print."""
    ratio = Summary(**result["ratio"])
    times = (f"{1e3 * result['seconds'][kind]['median']:,.0f} ms" for kind in ("scattered", "row"))
    return (
        f"Prefill of {PROMPT} tokens beside {result['idle_cells']:,} idle cells takes {' and '.join(times)} into "
        f"{result['holes']} single holes and behind them: {ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})."
    )
