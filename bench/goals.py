"""What llamaslot is to reach beside its peers, who plays to find that out, and whether it does.

The one to beat is the llama-server that is best at a figure. Which one that is, the first repeats say, in which all
play; later ones, where a bound near 1 needs many pairs, are left to llamaslot and the best.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.contenders import CONTENDERS, OWN, Contender
from bench.figures import (
    DECODE,
    GAP_P99,
    RESIDENT,
    THROUGHPUT,
    TTFT_MEAN,
    TTFT_P50,
    TTFT_P95,
    WALL,
    Metric,
    Run,
)
from bench.report import Summary
from bench.workloads import Workload

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
    "low reuse": ((TTFT_P50, 1.03), (THROUGHPUT, 0.98)),
    "decode 1": ((DECODE, 1.0),),
    "decode 4": ((DECODE, 1.05),),
    "decode 8": ((DECODE, 1.15),),
    "sampled 8": ((DECODE, 1.15),),
    "long prefill": ((GAP_P99, 0.7),),
    "memory": ((RESIDENT, 1.3),),
}
"""As ratios to the best llama-server: at most, or at least where more is better."""
FRUGAL = ("fan-out cold", "twenty", "agent", "branching", "groups", "interleaved", "pressure")
"""Where llamaslot is to compute at most `MOST_COMPUTED` of the fewest possible prompt tokens."""
MOST_COMPUTED = 1.05
N_ALL = 4
"""Repeats in which all play; an even number, so that each is as often before the others as behind them."""
_BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Ratio:
    """A figure of llamaslot over that of whom it is compared with, by pairs of one repeat."""

    workload: str
    metric: str
    peer: str
    median: float
    low: float
    high: float
    """Range of the pairs."""
    interval: tuple[float, float]
    """Bootstrap interval of 95% for the median."""
    n_pairs: int
    n_needed: int
    """Pairs that it takes to judge."""
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
            interval=_interval(pairs),
            n_pairs=len(pairs),
            n_needed=n_needed,
            goal=goal,
            at_least=at_least,
        )

    @property
    def is_on_target(self) -> bool:
        """Whether the median is on the right side."""
        return self._passes(self.median)

    @property
    def is_met(self) -> bool:
        """Whether the passing end of the interval is there too, with as many pairs as it takes."""
        end = self.interval[0] if self.at_least else self.interval[1]
        return self.is_on_target and self._passes(end) and self.n_pairs >= self.n_needed

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.n_pairs < self.n_needed:
            return "few pairs"
        return "met" if self.is_met else "open" if self.is_on_target else "short"

    def _passes(self, figure: float) -> bool:
        return figure >= self.goal if self.at_least else figure <= self.goal


def players(
    workload: Workload, contenders: Sequence[Contender], repeat: int, runs: Sequence[Run]
) -> list[Contender]:
    """Who plays a repeat, in turn: forwards and backwards through all, later through llamaslot and the best."""
    chosen = [each for each in contenders if each.plays(workload.name)]
    best = best_peers(workload.name, runs)
    if repeat >= N_ALL and best and any(each.name == OWN for each in chosen):
        chosen = [each for each in chosen if each.name in (OWN, *best.values())]
    return chosen if repeat % 2 == 0 else chosen[::-1]


def best_peers(workload: str, runs: Sequence[Run]) -> dict[str, str]:
    """By figure with a goal the llama-server that is best at it in the repeats that all play."""
    first = [each for each in runs if each.workload == workload and each.repeat < N_ALL]
    names = {each.name for each in CONTENDERS if each.is_peer} & {each.contender for each in first}
    best = {}
    for metric, _ in GOALS.get(workload, ()) if names else ():
        medians = {
            name: statistics.median(metric.of(each) for each in first if each.contender == name)
            for name in sorted(names)
        }
        best[metric.name] = (max if metric.more_is_better else min)(medians, key=lambda name: medians[name])
    return best


def compared(workload: Workload, runs: Sequence[Run]) -> list[Ratio]:
    """llamaslot's goals for a workload, each against the llama-server that is best at it."""
    chosen = [each for each in runs if each.workload == workload.name]
    own = {each.repeat: each for each in chosen if each.contender == OWN}
    best = best_peers(workload.name, runs)
    ratios = []
    for metric, goal in GOALS.get(workload.name, ()):
        peer = best.get(metric.name)
        theirs = [each for each in chosen if each.contender == peer and each.repeat in own and metric.of(each)]
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
        ratios.append(Ratio.of(*of, pairs=counted, goal=MOST_COMPUTED, n_needed=workload.n_pairs))
    return ratios


def _interval(pairs: Sequence[float]) -> tuple[float, float]:
    drawn = np.random.default_rng(1).choice(np.array(pairs), (_BOOTSTRAPS, len(pairs)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)
