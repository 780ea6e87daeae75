"""The result of one run of a workload on one server, and the metrics that are computed from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RunResult:
    """One run of a workload on one server; times in seconds."""

    workload: str
    server: str
    repeat: int
    ttft: list[float]
    """Of each measured request, in the order in which they were sent."""
    gap_p50: float
    """Percentiles of the times between neighbouring chunks of a measured stream."""
    gap_p99: float
    wall: float
    """From the first measured request to the end of the last."""
    decode_rate: float
    """Tokens per second of the measured streams together, while all of them decode; 0 where they do not overlap."""
    n_output: int
    """Tokens of the measured answers."""
    n_prompt: int
    n_computed: int | None
    """Prompt tokens that the server computed for all requests, by its own count; None if it does not report any."""
    n_fewest: int
    """The fewest prompt tokens that any server could compute for these prompts and replies."""
    ready: float = 0.0
    """From the server's start until it was healthy; 0 in older raw data."""


@dataclass(frozen=True)
class Metric:
    """One figure of a run."""

    name: str
    of: Callable[[RunResult], float]
    more_is_better: bool = False


TTFT_MEAN = Metric("TTFT mean", lambda run: 1e3 * statistics.fmean(run.ttft))
TTFT_P50 = Metric("TTFT p50", lambda run: 1e3 * statistics.median(run.ttft))
TTFT_P95 = Metric("TTFT p95", lambda run: 1e3 * float(np.percentile(run.ttft, 95)))
GAP_P50 = Metric("gap p50", lambda run: 1e3 * run.gap_p50)
GAP_P99 = Metric("gap p99", lambda run: 1e3 * run.gap_p99)
WALL = Metric("wall", lambda run: 1e3 * run.wall)
THROUGHPUT = Metric("output", lambda run: run.n_output / run.wall, more_is_better=True)
DECODE = Metric("decode", lambda run: run.decode_rate, more_is_better=True)
METRICS = (TTFT_MEAN, TTFT_P50, TTFT_P95, GAP_P50, GAP_P99, WALL, THROUGHPUT, DECODE)
"""Milliseconds and tokens per second."""
