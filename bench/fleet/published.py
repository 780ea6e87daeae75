"""The published comparison of fleets: one run with a fixed plan, its raw data, and the tables made from it.

`python -m bench fleet --publish --cache-remote URL` runs the plan at a clean commit and writes
`bench/published/fleet.json.gz`. The part of `bench/README.md` between two lines is generated from that file alone;
a test compares them.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from bench.client import BenchmarkError
from bench.fleet import run as fleet
from bench.fleet.compare import GOAL
from bench.fleet.failures import OUTCOMES
from bench.fleet.setups import APIS, ONE, PARTS, SETUPS, Settings, median_cell
from bench.peers.baseline import clean_revision, require_revision
from bench.peers.tables import markdown_table
from bench.progress import duration
from bench.report import ROOT, keep_raw, machine, model_file, page_with, raw_data, wrapped, write_json

RAW = ROOT / "bench" / "published" / "fleet.json.gz"
PAGE = ROOT / "bench" / "README.md"
BEGIN, END = "<!-- fleets: begin -->", "<!-- fleets: end -->"
"""Around the generated part of the page."""
COMMAND = "python -m bench fleet --publish"
MODELS = {"compare": "60m", "kill": "qwen3-0.6b", "rolling": "60m"}
"""Shape of each part's model. The kill takes a larger one: there, fetching a prefix must beat computing it."""
GOAL_MOVED = 0.2
"""Median TTFT of conversations that moved from a killed worker, divided by that of new text of the same length."""


def plan(part: str, *, remote: str, nginx: str, threads: int, quick: bool = False) -> Settings:
    """Return the settings of one part; workers share the store `remote` in the kill and in the rolling restart."""
    shape = "tiny" if quick else MODELS[part]
    chosen = Settings(
        model=model_file(shape),
        title=f"{shape} shape (random weights, Q8_0)",
        parts=(part,),
        threads=threads,
        fleet_flags=() if part == "compare" else ("--cache-remote", remote),
        nginx=nginx,
    )
    if not quick:
        return chosen
    return replace(chosen, n_conversations=8, lengths=replace(chosen.lengths, system=200), pause_s=0.1)


def run(*, remote: str, nginx: str, threads: int, folder: Path, quick: bool) -> None:
    """Measure what is published; raises `BenchmarkError` if a part fails, or if the checkout is not clean.

    With `quick`, the same parts with small prompts: a trial that publishes nothing.
    """
    if not remote:
        raise BenchmarkError("--publish needs --cache-remote URL: a store by which workers share prefixes")
    if not (shutil.which(nginx or "nginx") or shutil.which("/usr/sbin/nginx")):
        raise BenchmarkError("--publish needs nginx in PATH, or --nginx FILE")
    commit = "" if quick else clean_revision(ROOT)
    content: dict[str, Any] = {"benchmark": "fleet", "commit": commit, "machine": machine(), "parts": {}}
    began = monotonic()
    for part in PARTS:
        settings = plan(part, remote=remote, nginx=nginx, threads=threads, quick=quick)
        content["parts"][part] = fleet.run(settings=settings, folder=folder)
    content["seconds"] = monotonic() - began
    write_json(folder / "fleet-published.json", content)
    if quick:
        return
    require_revision(ROOT, commit)
    publish(folder / "fleet-published.json")


def publish(results: Path) -> None:
    """Keep the raw data that a run of the plan wrote, and write the tables."""
    keep_raw(results, RAW)
    render()


def render() -> None:
    """Write the generated part of the page."""
    PAGE.write_text(rendered())


def rendered() -> str:
    """Return the page as it is with its generated part made from the raw data."""
    return page_with(PAGE, BEGIN, END, _part(raw_data(RAW)))


def _part(content: Mapping[str, Any]) -> list[str]:
    """Return the lines of the generated part: what was measured, computed tokens, failures, and the verdict."""
    parts = {part: content["parts"][part] for part in PARTS}
    results = parts["compare"]["compare"]
    whole = {each["api"]: each["n_prompt_computed"] for each in results if each["setup"] == ONE}
    lines = []
    for setup in parts["compare"]["settings"]["setups"]:
        found = {each["api"]: each for each in results if each["setup"] == setup}
        cells = [_computed(found[api], whole[api]) if api in found else "" for api in APIS]
        lines.append([setup, *cells])
    return [
        *wrapped(_origin(content, parts["compare"]["settings"], parts["kill"]["settings"])),
        "",
        *markdown_table(("setup", *APIS), lines),
        "",
        *wrapped(
            "A worker killed while it streams, then a rolling restart of all workers. TTFTs are medians of turns "
            "sent one at a time (in brackets: how many); *failed* are requests of the rolling restart that did not "
            "end well:"
        ),
        "",
        *markdown_table(
            ("setup", *OUTCOMES[:2], "lost", "stayed", "moved", "cold", "moved / cold", "restart", "failed"),
            [_failures(*both) for both in zip(parts["kill"]["kill"], parts["rolling"]["rolling"], strict=True)],
        ),
        "",
        *wrapped(_verdict(parts, whole)),
    ]


def _origin(content: Mapping[str, Any], usual: Mapping[str, Any], killed: Mapping[str, Any]) -> str:
    facts = content["machine"]
    where = f"{facts['processor']} ({facts['threads']} threads, {facts['memory_gib']} GiB, load before the run"
    return (
        f"One run of `{COMMAND}` at commit `{content['commit'][:10]}`, {facts['date'][:10]}, on {where} "
        f"{facts['load_before']}), in {duration(content['seconds'])} ([raw data](published/{RAW.name})). Models: "
        f"{usual['model']}, and for the kill {killed['model']}. In kill and rolling restart workers share a store "
        f"(`--cache-remote`). Computed prompt tokens, and their ratio to {ONE}:"
    )


def _computed(result: Mapping[str, Any], whole: int) -> str:
    return f"{result['n_prompt_computed']:,} ({result['n_prompt_computed'] / whole:.2f})"


def _failures(killed: Mapping[str, Any], rolled: Mapping[str, Any]) -> list[str]:
    """Return the cells of one gateway; both results must be of the same."""
    if killed["setup"] != rolled["setup"]:
        raise BenchmarkError("kill and rolling restart were not measured with the same setups")
    return [
        killed["setup"],
        *(str(killed["outcomes"][name]) for name in OUTCOMES[:2]),
        f"{killed['n_turns_lost']} of {killed['n_turns']}",
        *(f"{median_cell(killed[name])} ({len(killed[name])})" for name in ("stayed", "moved", "cold")),
        f"{_moved_over_cold(killed):.2f}",
        str(sum(rolled["outcomes"].values())),
        str(_n_failed(rolled)),
    ]


def _moved_over_cold(killed: Mapping[str, Any]) -> float:
    return statistics.median(killed["moved"]) / statistics.median(killed["cold"])


def _n_failed(rolled: Mapping[str, Any]) -> int:
    return sum(n for name, n in rolled["outcomes"].items() if name != "ok")


def _verdict(parts: Mapping[str, Any], whole: Mapping[str, int]) -> str:
    """Return which goals were missed, each with the setups."""
    smg = [each for each in parts["compare"]["compare"] if SETUPS[each["setup"]] == "smg"]
    missed = {
        f"computed tokens at most {GOAL} times those of {ONE}, by cached prefix": [
            each["api"] for each in smg if each["n_prompt_computed"] > GOAL * whole[each["api"]]
        ],
        "no turn lost after the kill": [each["setup"] for each in parts["kill"]["kill"] if each["n_turns_lost"]],
        f"moved / cold at most {GOAL_MOVED}": [
            each["setup"] for each in parts["kill"]["kill"] if _moved_over_cold(each) > GOAL_MOVED
        ],
        "no failed request in the rolling restart": [
            each["setup"] for each in parts["rolling"]["rolling"] if _n_failed(each)
        ],
    }
    texts = [f"{goal}: {_missed(found)}" for goal, found in missed.items()]
    return f"Goals: {'; '.join(texts)}."


def _missed(found: Sequence[str]) -> str:
    return f"**missed** ({', '.join(found)})" if found else "met"
