"""The goals of llamaslot beside llama-server, the servers that run each pair, and whether a goal is met.

llamaslot is compared with the llama-server that is best at a figure. The first pairs, which all servers run, decide
which one that is; the later ones are left to llamaslot and the best, since a goal near 1 needs many pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.peers.results import (
    DECODE,
    GAP_P99,
    THROUGHPUT,
    TTFT_MEAN,
    TTFT_P50,
    TTFT_P95,
    WALL,
    Metric,
    RunResult,
)
from bench.peers.servers import OWN, SERVERS, ServerSetup
from bench.peers.workloads import Workload
from bench.report import Summary

GOALS: dict[str, tuple[tuple[Metric, float], ...]] = {
    "fan-out warm": ((TTFT_P95, 0.12), (TTFT_MEAN, 0.25)),
    "fan-out cold": ((TTFT_P95, 0.25), (WALL, 0.4)),
    "twenty": ((TTFT_MEAN, 0.6),),
    "agent": ((TTFT_MEAN, 0.6),),
    "branching": ((TTFT_MEAN, 0.6),),
    "groups": ((TTFT_MEAN, 0.6),),
    "interleaved": ((TTFT_MEAN, 1.0),),
    "pressure": ((TTFT_MEAN, 1.0),),
    "chat": ((TTFT_P50, 1.0),),
    "low reuse": ((TTFT_P50, 1.0), (THROUGHPUT, 1.0)),
    "conversations 1": ((WALL, 0.9),),
    "conversations 2": ((TTFT_MEAN, 0.8),),
    "conversations 3": ((TTFT_MEAN, 0.6), (WALL, 0.85)),
    "decode 1": ((DECODE, 1.0),),
    "decode 4": ((DECODE, 1.1),),
    "decode 8": ((DECODE, 1.2),),
    "sampled 8": ((DECODE, 1.15),),
    "long prefill": ((GAP_P99, 0.7),),
    "SmolLM2, first turn": ((TTFT_MEAN, 1.0),),
    "SmolLM2, six at once": ((WALL, 0.95),),
    "SmolLM2, decode 1": ((DECODE, 1.0),),
    "SmolLM2, decode 4": ((DECODE, 1.0),),
}
"""Ratios to the best llama-server: at most, or at least if more is better."""
FRUGAL = ("fan-out cold", "twenty", "agent", "branching", "groups", "interleaved", "pressure")
"""Workloads in which llamaslot should compute at most `MAX_COMPUTED` times the fewest possible prompt tokens."""
MAX_COMPUTED = 1.05
N_ALL = 4
"""Pairs that all servers run; an even number, so that each runs as often before the others as after them."""
N_BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Ratio:
    """A figure of llamaslot divided by that of another server, by pairs of runs of one repeat."""

    workload: str
    metric: str
    peer: str
    median: float
    low: float
    high: float
    """Range of the pairs."""
    interval: tuple[float, float]
    """95% bootstrap interval of the median."""
    n_pairs: int
    n_needed: int
    """Pairs that are needed to judge the goal."""
    goal: float
    at_least: bool

    @classmethod
    def of(
        cls,
        workload: str,
        metric: str,
        peer: str,
        *,
        pairs: Sequence[float],
        goal: float,
        n_needed: int,
        at_least: bool = False,
    ) -> Ratio:
        """From the ratio of each pair."""
        summary = Summary.of(pairs)
        return cls(
            workload=workload,
            metric=metric,
            peer=peer,
            median=summary.median,
            low=summary.low,
            high=summary.high,
            interval=bootstrap_interval(pairs),
            n_pairs=len(pairs),
            n_needed=n_needed,
            goal=goal,
            at_least=at_least,
        )

    @property
    def is_on_target(self) -> bool:
        """True if the median reaches the goal."""
        return self._passes(self.median)

    @property
    def is_met(self) -> bool:
        """True if median and worse end of the interval reach the goal, with as many pairs as needed."""
        end = self.interval[0] if self.at_least else self.interval[1]
        return self.is_on_target and self._passes(end) and self.n_pairs >= self.n_needed

    @property
    def verdict(self) -> str:
        """`met`, `open` (only the median reaches the goal), `missed` or `few pairs`."""
        if self.n_pairs < self.n_needed:
            return "few pairs"
        return "met" if self.is_met else "open" if self.is_on_target else "missed"

    def _passes(self, figure: float) -> bool:
        return figure >= self.goal if self.at_least else figure <= self.goal


@dataclass(frozen=True)
class Selection:
    """Chooses the servers of each pair; fixed before the first run.

    All servers run the first pairs. The later ones, which only goals near 1 need, are run by llamaslot and by the
    llama-server that was best at each figure with a goal in the first pairs.
    """

    servers: Sequence[ServerSetup]
    n_reference: int = N_ALL
    """Pairs of the servers that no goal depends on."""

    def of(self, workload: Workload, repeat: int, results: Sequence[RunResult]) -> list[ServerSetup]:
        """The servers that run a pair, in turn: forwards in even repeats, backwards in odd ones."""
        chosen = self._taking_part(workload, repeat)
        best = best_peers(workload.name, results)
        if repeat >= N_ALL and best and any(each.name == OWN for each in chosen):
            chosen = [each for each in chosen if each.name in (OWN, *best.values())]
        return chosen if repeat % 2 == 0 else chosen[::-1]

    def expected(self, workload: Workload, repeat: int) -> int:
        """Number of servers that will run a pair, as far as it is known before the first run."""
        n = len(self._taking_part(workload, repeat))
        return n if repeat < N_ALL or workload.name not in GOALS else min(n, 2)

    def _taking_part(self, workload: Workload, repeat: int) -> list[ServerSetup]:
        chosen = [each for each in self.servers if each.takes_part(workload.name)]
        return [each for each in chosen if repeat < self.n_reference or not each.is_reference]


def best_peers(workload: str, results: Sequence[RunResult]) -> dict[str, str]:
    """The best llama-server for each figure with a goal, by the pairs that all servers run."""
    first = [each for each in results if each.workload == workload and each.repeat < N_ALL]
    names = {each.name for each in SERVERS if each.is_peer} & {each.server for each in first}
    best = {}
    for metric, _ in GOALS.get(workload, ()) if names else ():
        medians = {
            name: statistics.median(metric.of(each) for each in first if each.server == name)
            for name in sorted(names)
        }
        best[metric.name] = (max if metric.more_is_better else min)(medians, key=lambda name: medians[name])
    return best


def compared(workload: Workload, results: Sequence[RunResult]) -> list[Ratio]:
    """The ratios of a workload's goals, each to the llama-server that is best at it."""
    chosen = [each for each in results if each.workload == workload.name]
    own = {each.repeat: each for each in chosen if each.server == OWN}
    best = best_peers(workload.name, results)
    ratios = []
    for metric, goal in GOALS.get(workload.name, ()):
        peer = best.get(metric.name)
        theirs = [each for each in chosen if each.server == peer and each.repeat in own and metric.of(each)]
        if peer and theirs:
            pairs = [metric.of(own[each.repeat]) / metric.of(each) for each in theirs]
            ratios.append(
                Ratio.of(
                    workload.name,
                    metric.name,
                    peer,
                    pairs=pairs,
                    goal=goal,
                    n_needed=workload.n_pairs,
                    at_least=metric.more_is_better,
                )
            )
    counted = [each.n_computed / each.n_fewest for each in own.values() if each.n_computed is not None]
    if workload.name in FRUGAL and counted:
        of = (workload.name, "computed", "the fewest possible")
        ratios.append(Ratio.of(*of, pairs=counted, goal=MAX_COMPUTED, n_needed=workload.n_pairs))
    return ratios


def bootstrap_interval(pairs: Sequence[float]) -> tuple[float, float]:
    """The 95% bootstrap interval of the median."""
    drawn = np.random.default_rng(1).choice(np.array(pairs), (N_BOOTSTRAPS, len(pairs)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)
