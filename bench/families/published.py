"""The published comparison by kind of model: one run with a fixed plan, its raw data, and the tables made from it.

`python -m bench families --publish` runs `PLAN` at a clean commit and writes `bench/published/families.json.gz`.
The tables in `bench/README.md` and in `docs/models.md` are generated from that file alone, so no row can be
replaced without the others. A test compares them with the raw data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.client import BenchmarkError
from bench.families import run as families
from bench.families.goals import FamilyRun, Row, rows
from bench.families.kinds import KINDS
from bench.families.oracle import Need
from bench.peers.baseline import clean_revision, require_revision
from bench.peers.tables import markdown_table
from bench.progress import duration
from bench.report import ROOT, keep_raw, page_with, raw_data, wrapped

RAW = ROOT / "bench" / "published" / "families.json.gz"
PAGES = ROOT / "docs" / "models.md", ROOT / "bench" / "README.md"
"""The summary for users, and the benchmark's page."""
BEGIN, END = "<!-- kinds of models: begin -->", "<!-- kinds of models: end -->"
"""Around the generated part of each page."""
COMMAND = "python -m bench families --publish"
PLAN = families.Settings(KINDS, families.NAMES, families.PEERS, scale=0.35, interval=families.INTERVAL, seed=1)
"""At this scale a system prompt has 350 tokens, still more than the windows (256) and the interval (256), and the
agent's tools 3,500.
"""
N_REPEATS = 2
"""Runs of each workload on each server, fixed before the run; the whole takes 40 minutes on 2 cores."""
_KIB = 2**10


def run(*, threads: int, folder: Path) -> None:
    """Measure what is published; raises `BenchmarkError` if a run failed, or if the checkout is not clean."""
    commit = clean_revision(ROOT)
    content = families.run(settings=PLAN, repeats=N_REPEATS, threads=threads, folder=folder, server_flags=())
    if content["failures"]:
        raise BenchmarkError(f"nothing is published: {'; '.join(content['failures'])}")
    require_revision(ROOT, commit)
    publish(folder / "families.json")


def publish(results: Path) -> None:
    """Keep the raw data that a run of `PLAN` wrote, and write the tables."""
    keep_raw(results, RAW)
    render()


def render() -> None:
    """Write the generated parts of both pages."""
    for page in PAGES:
        page.write_text(rendered(page))


def rendered(page: Path) -> str:
    """Return a page as it is with its generated part made from the raw data."""
    content = raw_data(RAW)
    return page_with(page, BEGIN, END, _summary(content) if page == PAGES[0] else _tables(content))


def _summary(content: Mapping[str, Any]) -> list[str]:
    """For users: what is reused of each kind, and what a checkpoint takes."""
    sizes, by_kind, lines = content["checkpoint_bytes"], _by_kind(content), []
    for kind in KINDS:
        own = [row.computed / row.fewest for row in by_kind[kind.name]]
        peer = [row.peer_computed / row.fewest for row in by_kind[kind.name] if row.peer_computed is not None]
        n_bytes = sizes[kind.name]
        lines.append(
            [
                kind.models,
                "by checkpoints" if n_bytes else "to the token",
                f"{n_bytes / _KIB:,.0f} KiB" if n_bytes else "",
                _range(own),
                _range(peer),
                f"`{kind.shape}`",
            ]
        )
    return markdown_table(
        ("models", "reused", "checkpoint", "computed / fewest", "best llama-server", "shape"), lines
    )


def _tables(content: Mapping[str, Any]) -> list[str]:
    """For the benchmark's page: counts and times by kind and workload, and the goals that were missed."""
    facts, settings = content["machine"], content["settings"]
    names = settings["workloads"]
    by_kind = _by_kind(content)
    compared = [row for kind in by_kind.values() for row in kind]
    counts = [[kind, *map(_shares, found)] for kind, found in by_kind.items()]
    times = [[kind, *(f"{row.ttft_ratio:.2f}" for row in found)] for kind, found in by_kind.items()]
    seconds, peers = duration(content["seconds"]), ", ".join(f"`{name}`" for name in settings["peers"])
    origin = (
        f"One run of `{COMMAND}` at commit `{content['commit'][:10]}`, {facts['date'][:10]}, on "
        f"{facts['processor']} ({facts['threads']} threads, {facts['memory_gib']} GiB, load before the run "
        f"{facts['load_before']}): `--scale {settings['scale']:g}`, {settings['repeats']} runs of each workload on "
        f"each server, {len(content['runs'])} in {seconds} ([raw data](published/{RAW.name})). The servers beside "
        f"llamaslot are {peers}; it is compared with the best of them at each figure. Computed prompt tokens / "
        "fewest, of llamaslot and of the best llama-server:"
    )
    most = max(row.computed / row.fewest for row in compared)
    worst_turn = max(row.worst_turn or 0 for row in compared)
    verdict = (
        f"llamaslot computes at most {most:.2f} times the fewest, and in a turn at most {worst_turn} tokens beyond "
        f"the new ones. **Goal 1 missed:** {_missed(compared, lambda row: row.is_frugal)}. "
        f"**Goal 2 missed in computed tokens:** {_missed(compared, lambda row: row.computes_less)}. "
        f"**Goal 2 missed in TTFT:** {_missed(compared, lambda row: row.is_fast)}."
    )
    return [
        *wrapped(origin),
        "",
        *markdown_table(("kind", *names), counts),
        "",
        "The ratio of the mean TTFTs:",
        "",
        *markdown_table(("kind", *names), times),
        "",
        *wrapped(verdict),
    ]


def _by_kind(content: Mapping[str, Any]) -> dict[str, list[Row]]:
    runs = [FamilyRun(**each | {"needs": [Need(**need) for need in each["needs"]]}) for each in content["runs"]]
    compared = rows(runs, content["settings"]["interval"])
    return {kind.name: [row for row in compared if row.kind == kind.name] for kind in KINDS}


def _missed(compared: Sequence[Row], is_met: Callable[[Row], bool]) -> str:
    """Return the workloads in which a goal was missed, each with the number of kinds."""
    n_kinds = len({row.kind for row in compared})
    found = [row.workload for row in compared if not is_met(row)]
    return ", ".join(f"{name} ({found.count(name)} of {n_kinds} kinds)" for name in dict.fromkeys(found)) or "none"


def _shares(row: Row) -> str:
    """Return what llamaslot and the best llama-server computed, over the fewest."""
    return ", ".join(f"{n / row.fewest:.2f}" for n in (row.computed, row.peer_computed) if n is not None)


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.2f} to {max(shares):.2f}"
