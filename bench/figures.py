"""What one play of a workload gives, and the figures that are made of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.memory import Memory


@dataclass(frozen=True)
class Run:
    """One play of a workload against one contender; times in seconds."""

    workload: str
    contender: str
    repeat: int
    ttft: list[float]
    """Of each measured request, in the order in which they were asked."""
    gaps: list[float]
    """Between neighbouring chunks of the measured streams."""
    wall: float
    """From the first measured request to the end of the last."""
    decode_rate: float
    """Tokens per second of the measured streams together, while all of them decode; 0 where they do not overlap."""
    n_output: int
    """Tokens of the measured answers."""
    n_prompt: int
    n_computed: int | None
    """Prompt tokens that the server computed for all requests, as it counts them; None where it does not say."""
    n_fewest: int
    """The fewest that anyone could compute for these prompts and replies."""
    memory: Memory | None = None
    """At the end, where the workload asks for it."""


@dataclass(frozen=True)
class Metric:
    """One figure of a run."""

    name: str
    of: Callable[[Run], float]
    more_is_better: bool = False


def _beyond(run: Run) -> float:
    return run.memory.beyond / 2**20 if run.memory else 0.0


TTFT_MEAN = Metric("TTFT mean", lambda run: 1e3 * statistics.fmean(run.ttft))
TTFT_P50 = Metric("TTFT p50", lambda run: 1e3 * statistics.median(run.ttft))
TTFT_P95 = Metric("TTFT p95", lambda run: 1e3 * float(np.percentile(run.ttft, 95)))
GAP_P50 = Metric("gap p50", lambda run: 1e3 * float(np.percentile(run.gaps, 50)))
GAP_P99 = Metric("gap p99", lambda run: 1e3 * float(np.percentile(run.gaps, 99)))
WALL = Metric("wall", lambda run: 1e3 * run.wall)
THROUGHPUT = Metric("output", lambda run: run.n_output / run.wall, more_is_better=True)
DECODE = Metric("decode", lambda run: run.decode_rate, more_is_better=True)
RESIDENT = Metric("resident", _beyond)
METRICS = (TTFT_MEAN, TTFT_P50, TTFT_P95, GAP_P50, GAP_P99, WALL, THROUGHPUT, DECODE)
"""Milliseconds and tokens per second; `RESIDENT` is MiB."""
