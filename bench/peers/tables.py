"""The comparison with other servers as tables, for a terminal and for a document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from bench.peers.goals import Ratio
from bench.peers.results import METRICS, RunResult
from bench.peers.servers import SERVERS

FIGURES = ("", *(metric.name for metric in METRICS), "computed", "fewest", "x")
GOALS = ("workload", "figure", "against", "ratio", "range", "95%", "pairs", "goal", "")


def table(workload: str, runs: Sequence[RunResult], title: str) -> Table:
    """A line for each server: medians over the repeats."""
    caption = "medians over the repeats; ms, tokens/s; x: computed / fewest possible"
    return _table(f"{workload}, {title}", caption, FIGURES, rows(workload, runs))


def rows(workload: str, runs: Sequence[RunResult]) -> list[list[str]]:
    """The cells of `table`."""
    result = []
    for name, chosen in _by_server(workload, runs).items():
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


def goals(ratios: Sequence[Ratio]) -> Table:
    """The ratio of llamaslot to the server that it is compared with, beside the goal."""
    caption = "medians of pairs; 95%: by bootstrap; open: only the median reaches the goal"
    return _table("llamaslot / best llama-server", caption, GOALS, goal_rows(ratios))


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


def markdown(runs: Sequence[RunResult], ratios: Sequence[Ratio], title: str) -> str:
    """All tables, to paste into a document."""
    parts = [f"# llamaslot beside its peers: {title}", "", *markdown_table(GOALS, goal_rows(ratios))]
    for workload in dict.fromkeys(each.workload for each in runs):
        parts += ["", f"## {workload}", "", *markdown_table(FIGURES, rows(workload, runs))]
    return "\n".join([*parts, ""])


def _by_server(workload: str, runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    chosen = [each for each in runs if each.workload == workload]
    names = [each.name for each in SERVERS if any(run.server == each.name for run in chosen)]
    return {name: [each for each in chosen if each.server == name] for name in names}


def _table(title: str, caption: str, heading: Sequence[str], content: Sequence[Sequence[str]]) -> Table:
    result = Table(title=title, caption=caption)
    for i, name in enumerate(heading):
        result.add_column(name, justify="right" if i else "left")
    for row in content:
        result.add_row(*row)
    return result


def markdown_table(heading: Sequence[str], content: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *content)]
