"""What `bench.compare` measured, as tables for a terminal and for a document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from bench.contenders import CONTENDERS
from bench.figures import METRICS, Run
from bench.goals import Ratio
from bench.memory import Memory

FIGURES = ("", *(metric.name for metric in METRICS), "computed", "fewest", "x")
MEMORY = ("", "resident", "KV pool", "RAM tier", "beyond", "n_seq_max")
GOALS = ("workload", "figure", "against", "ratio", "range", "95%", "pairs", "goal", "")


def table(workload: str, runs: Sequence[Run], title: str) -> Table:
    """A line for each contender: medians over the repeats."""
    caption = "medians over the repeats; ms, tokens/s; x: of the fewest"
    return _table(f"{workload}, {title}", caption, FIGURES, rows(workload, runs))


def rows(workload: str, runs: Sequence[Run]) -> list[list[str]]:
    """The cells of `table`."""
    result = []
    for name, chosen in _by_contender(workload, runs).items():
        figures = [statistics.median(metric.of(each) for each in chosen) for metric in METRICS]
        least = statistics.median(each.n_fewest for each in chosen)
        counted = [(each.n_computed, each.n_fewest) for each in chosen if each.n_computed is not None]
        cells = [name, *(f"{figure:,.0f}" if figure else "" for figure in figures)]
        if len(counted) == len(chosen):
            computed = statistics.median(n for n, _ in counted)
            share = statistics.median(n / fewest for n, fewest in counted)
            cells += [f"{computed:,.0f}", f"{least:,.0f}", f"{share:.2f}"]
        else:
            cells += ["", f"{least:,.0f}", ""]
        result.append(cells)
    return result


def memory(runs: Sequence[Run]) -> Table:
    """A line for each contender that was weighed: medians over the repeats."""
    caption = "medians, MiB; resident: all but the weights"
    return _table("memory", caption, MEMORY, memory_rows(runs))


def memory_rows(runs: Sequence[Run]) -> list[list[str]]:
    """The cells of `memory`."""
    result = []
    for name, chosen in _by_contender("memory", runs).items():
        weighed = [each.memory for each in chosen if each.memory]
        if weighed:
            columns = (
                [each.resident for each in weighed],
                [each.pool for each in weighed],
                [each.tier for each in weighed],
                [each.beyond for each in weighed],
            )
            sizes = [f"{statistics.median(column) / 2**20:,.0f}" for column in columns]
            result.append([name, *sizes, _n_seqs(weighed[0])])
    return result


def goals(ratios: Sequence[Ratio]) -> Table:
    """llamaslot over whom it is compared with, beside what it is to reach."""
    caption = "medians of pairs; 95%: by bootstrap; open: only the median is on target"
    return _table("llamaslot over the best llama-server", caption, GOALS, goal_rows(ratios))


def goal_rows(ratios: Sequence[Ratio]) -> list[list[str]]:
    """The cells of `goals`."""
    return [
        [
            each.workload,
            each.metric,
            each.peer,
            f"{each.median:.2f}",
            f"{each.low:.2f}-{each.high:.2f}",
            f"{each.interval[0]:.2f}-{each.interval[1]:.2f}",
            str(each.n_pairs),
            f"{'>=' if each.at_least else '<='} {each.goal:.2f}",
            each.verdict,
        ]
        for each in ratios
    ]


def markdown(runs: Sequence[Run], ratios: Sequence[Ratio], title: str) -> str:
    """All tables, to paste into a document."""
    parts = [f"# llamaslot beside its peers: {title}", "", *_markdown(GOALS, goal_rows(ratios))]
    for workload in dict.fromkeys(each.workload for each in runs):
        parts += ["", f"## {workload}", "", *_markdown(FIGURES, rows(workload, runs))]
    if weighed := memory_rows(runs):
        parts += ["", "### MiB", "", *_markdown(MEMORY, weighed)]
    return "\n".join([*parts, ""])


def _by_contender(workload: str, runs: Sequence[Run]) -> dict[str, list[Run]]:
    chosen = [each for each in runs if each.workload == workload]
    names = [each.name for each in CONTENDERS if any(run.contender == each.name for run in chosen)]
    return {name: [each for each in chosen if each.contender == name] for name in names}


def _n_seqs(weighed: Memory) -> str:
    return "" if weighed.n_seqs is None else str(weighed.n_seqs)


def _table(title: str, caption: str, heading: Sequence[str], content: Sequence[Sequence[str]]) -> Table:
    result = Table(title=title, caption=caption)
    for i, name in enumerate(heading):
        result.add_column(name, justify="right" if i else "left")
    for row in content:
        result.add_row(*row)
    return result


def _markdown(heading: Sequence[str], content: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *content)]
