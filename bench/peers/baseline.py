"""llamaslot of this checkout beside llamaslot of another one, in pairs: does a change make it slower or faster?

Both are served from their source folders with the same Python, libraries, model and flags.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

import llamaslot
from bench.client import BenchmarkError
from bench.peers.goals import bootstrap_interval
from bench.peers.results import DECODE, TTFT_MEAN, Metric, RunResult
from bench.peers.runner import N_SLOTS, Runner
from bench.peers.servers import BEFORE, OWN, CommonSettings, ServerSetup
from bench.peers.workloads import MANY, WORKLOADS, Workload
from bench.report import Summary, console, machine, new_table, notes, write_json
from bench.tokens import Tokens

N_PAIRS = {each.name: MANY for each in WORKLOADS} | {"chat": 16, "pressure": 8, "decode 1": 20, "decode 8": 20}
"""Pairs of each workload, fixed before any run; those whose ratios vary more between pairs get more."""
MAX_MEDIAN_LOSS, MAX_INTERVAL_LOSS = 0.02, 0.05
"""A change passes if the median is at most 2% worse, or the interval contains 1.00 and stays within 5%."""


@dataclass(frozen=True)
class Change:
    """A figure of this checkout divided by that of the other one, by pairs."""

    workload: str
    metric: str
    median: float
    interval: tuple[float, float]
    """95% bootstrap interval of the median."""
    low: float
    high: float
    n_pairs: int
    more_is_better: bool

    @property
    def passes(self) -> bool:
        """True if this checkout is not measurably slower."""
        low, high = self.interval
        if (self.median >= 1 - MAX_MEDIAN_LOSS) if self.more_is_better else (self.median <= 1 + MAX_MEDIAN_LOSS):
            return True
        return low <= 1.0 <= high and low >= 1 - MAX_INTERVAL_LOSS and high <= 1 + MAX_INTERVAL_LOSS


@dataclass(frozen=True)
class BothVersions:
    """Every pair is run by both versions; the order alternates."""

    servers: tuple[ServerSetup, ServerSetup]

    def of(self, _workload: Workload, repeat: int, _results: Sequence[RunResult]) -> list[ServerSetup]:
        """The servers of a pair, in turn."""
        return list(self.servers if repeat % 2 == 0 else self.servers[::-1])

    def expected(self, _workload: Workload, _repeat: int) -> int:
        """Number of servers that run a pair."""
        return len(self.servers)


def run(
    *,
    model: Path,
    title: str,
    baseline: Path,
    repeats: int | None,
    scale: float,
    threads: int,
    only: Sequence[str],
    folder: Path,
    server_flags: Sequence[str],
) -> None:
    """Measure, print a table, write `baseline.json`."""
    facts = machine()
    checkouts = {OWN: Path(llamaslot.__file__).resolve().parent.parent, BEFORE: baseline.resolve()}
    for name, checkout in checkouts.items():
        _require_package(checkout)
        notes.print(f"{name}: {checkout}, {revision(checkout) or 'no git commit'}")
    servers = tuple(ServerSetup(name, "llamaslot", checkout=checkout) for name, checkout in checkouts.items())
    workloads = [each for each in WORKLOADS if each.name in N_PAIRS and (not only or each.name in only)]
    if not workloads:
        raise BenchmarkError(f"--baseline measures {', '.join(N_PAIRS)}")
    n_pairs = {each.name: repeats or N_PAIRS[each.name] for each in workloads}
    runner = Runner(Tokens(model), CommonSettings(model, N_SLOTS, threads, 0, tuple(server_flags)), scale, folder)
    results = asyncio.run(runner.measure(n_pairs, workloads, BothVersions((servers[0], servers[1]))))
    changes = [change for each in workloads if (change := compared(each.name, results))]
    runner.failures |= without_figure(changes, results)
    console.print(table(changes, title))
    settings = {"model": title, "slots": N_SLOTS, "threads": threads, "pairs": n_pairs, "scale": scale}
    settings |= {"flags": " ".join(server_flags), "seed": runner.seed}
    content: dict[str, Any] = {"benchmark": "baseline", "settings": settings, "machine": facts}
    content |= {"revisions": {name: revision(checkout) for name, checkout in checkouts.items()}}
    content |= {"changes": [asdict(each) | {"passes": each.passes} for each in changes]}
    content |= {"failures": runner.failures, "runs": [asdict(each) for each in results]}
    write_json(folder / "baseline.json", content)
    if runner.failures:
        raise BenchmarkError("; ".join(f"{name}: {reason}" for name, reason in runner.failures.items()))


def compared(workload: str, results: Sequence[RunResult]) -> Change | None:
    """The change of a workload's metric: TTFT, or the decode rate; None without a pair."""
    metric = metric_of(workload)
    by_version = {
        name: {each.repeat: metric.of(each) for each in results if (each.workload, each.server) == (workload, name)}
        for name in (OWN, BEFORE)
    }
    new, old = by_version[OWN], by_version[BEFORE]
    pairs = [new[repeat] / old[repeat] for repeat in sorted(new.keys() & old.keys()) if old[repeat]]
    if not pairs:
        return None
    summary = Summary.of(pairs)
    return Change(
        workload=workload,
        metric=metric.name,
        median=summary.median,
        interval=bootstrap_interval(pairs),
        low=summary.low,
        high=summary.high,
        n_pairs=len(pairs),
        more_is_better=metric.more_is_better,
    )


def without_figure(changes: Sequence[Change], results: Sequence[RunResult]) -> dict[str, str]:
    """Return why workloads that ran have no comparison: a missing one must not pass for 'no change'."""
    missing = dict.fromkeys(each.workload for each in results if each.workload not in {c.workload for c in changes})
    return {
        name: f"no pair has {metric_of(name).name} of both versions: runs failed, or streams came in a single read"
        for name in missing
    }


def metric_of(workload: str) -> Metric:
    """The metric that a workload is compared by."""
    return DECODE if workload.startswith(("decode", "sampled")) else TTFT_MEAN


def table(changes: Sequence[Change], title: str) -> Table:
    """A line for each workload."""
    caption = "new / old, medians of pairs; 95%: by bootstrap; TTFT: less is better, decode: more is better"
    headings, left = ("workload", "figure", "ratio", "95%", "range", "pairs", ""), ("workload", "figure", "")
    result = new_table(f"{OWN} / {BEFORE}, {title}", headings, left, caption)
    for each in changes:
        result.add_row(
            each.workload,
            each.metric,
            f"{each.median:.3f}",
            f"{each.interval[0]:.3f}-{each.interval[1]:.3f}",
            f"{each.low:.2f}-{each.high:.2f}",
            str(each.n_pairs),
            "passes" if each.passes else "slower",
        )
    return result


def revision(checkout: Path) -> str:
    """The commit of a checkout, and whether files differ from it; empty outside of a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        if shutil.which("git") is None:
            return ""
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain") else "")


def clean_revision(checkout: Path) -> str:
    """The commit of a checkout whose results are to be published; raises `BenchmarkError` if it has changes."""
    commit = revision(checkout)
    if not commit or " " in commit:
        raise BenchmarkError("the published run needs a clean git checkout: commit or stash all changes")
    return commit


def require_revision(checkout: Path, commit: str) -> None:
    """Raise `BenchmarkError` if a checkout is not, or no longer, at a commit, without changes."""
    if revision(checkout) != commit:
        raise BenchmarkError("nothing is published: the checkout has changed during the run")


def _require_package(checkout: Path) -> None:
    """Raise `BenchmarkError` unless Python imports llamaslot from this checkout when it is told to."""
    command = [
        "env",
        f"PYTHONPATH={checkout}",
        sys.executable,
        "-P",
        "-c",
        "import llamaslot; print(llamaslot.__file__)",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = Path(done.stdout.strip()).resolve().parent.parent
    if done.returncode != 0 or found != checkout:
        raise BenchmarkError(f"{checkout} is no checkout of llamaslot: Python imports it from {found}")
