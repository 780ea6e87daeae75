"""The comparison with other servers as plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from bench.report import notes

if TYPE_CHECKING:
    from bench.peers.results import RunResult


def draw(runs: Sequence[RunResult], folder: Path, title: str) -> None:
    """Four plots in one file: TTFT per turn, TTFT under fan-out, computed tokens, decode rate."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    _turns(axes[0][0], _of(runs, "chat"))
    _fan_out(axes[0][1], _of(runs, "fan-out cold"))
    _computed(axes[1][0], runs)
    _decode(axes[1][1], [each for each in runs if each.workload.startswith("decode")])
    figure.suptitle(title)
    path = folder / "peers.png"
    figure.savefig(path, dpi=144)
    notes.print(f"plot: {path}")


def _of(runs: Sequence[RunResult], workload: str) -> list[RunResult]:
    return [each for each in runs if each.workload == workload]


def _by_server(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    names = dict.fromkeys(each.server for each in runs)
    return {name: [each for each in runs if each.server == name] for name in names}


def _turns(axis: Any, runs: Sequence[RunResult]) -> None:
    for name, chosen in _by_server(runs).items():
        medians = [1e3 * statistics.median(times) for times in zip(*(each.ttft for each in chosen), strict=True)]
        axis.plot(range(1, len(medians) + 1), medians, marker="o", label=name)
    axis.set(title="four-turn chat", xlabel="turn", ylabel="time to first token, ms", yscale="log")
    _finish(axis)


def _fan_out(axis: Any, runs: Sequence[RunResult]) -> None:
    for name, chosen in _by_server(runs).items():
        times = sorted(1e3 * time for each in chosen for time in each.ttft)
        axis.step(times, [(i + 1) / len(times) for i in range(len(times))], where="post", label=name)
    axis.set(title="cold fan-out, 16 users", xlabel="time to first token, ms", ylabel="share of requests")
    _finish(axis)


def _computed(axis: Any, runs: Sequence[RunResult]) -> None:
    counted = [each for each in runs if each.n_computed is not None]
    workloads = list(dict.fromkeys(each.workload for each in counted))
    servers = _by_server(counted)
    width = 0.8 / max(len(servers), 1)
    for i, (name, chosen) in enumerate(servers.items()):
        places, shares = [], []
        for place, workload in enumerate(workloads):
            figures = [1 - (each.n_computed or 0) / each.n_prompt for each in _of(chosen, workload)]
            if figures:
                places.append(place + i * width)
                shares.append(statistics.median(figures))
        axis.bar(places, shares, width, label=name)
    for place, workload in enumerate(workloads):
        best = statistics.median([1 - each.n_fewest / each.n_prompt for each in _of(counted, workload)])
        axis.hlines(best, place - width / 2, place + 0.8, colors="black", linestyles="dotted")
    axis.set_xticks([place + 0.4 for place in range(len(workloads))], workloads, rotation=30, ha="right")
    axis.set(title="prompt tokens from the cache; dotted: the most possible", ylabel="share", ylim=(0, 1))
    _finish(axis)


def _decode(axis: Any, runs: Sequence[RunResult]) -> None:
    for name, chosen in _by_server(runs).items():
        workloads = dict.fromkeys(each.workload for each in chosen)
        rates = [statistics.median([each.decode_rate for each in _of(chosen, w)]) for w in workloads]
        axis.plot([w.removeprefix("decode ") for w in workloads], rates, marker="o", label=name)
    axis.set(title="decoding", xlabel="streams", ylabel="tokens per second, all streams")
    _finish(axis)


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
