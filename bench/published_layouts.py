"""The published costs of layouts: a table for each model, made from the raw data of one run with it.

`python -m bench layouts --publish` keeps what a run at a clean commit wrote in `bench/published/layouts-*.json.gz`,
in place of the run with this model before, and writes the tables in `bench/README.md` from these files alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.tables import markdown_table
from bench.report import ROOT, keep_raw, page_with, raw_data, wrapped

FOLDER = ROOT / "bench" / "published"
PAGE = ROOT / "bench" / "README.md"
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"
"""Around the generated part of the page."""
_COLUMNS = {
    "512 of one": ("apart", "tidy", "blocks", "interleaved"),
    "decode": ("apart", "tidy", "blocks", "interleaved"),
    "a chunk of each, one step": ("apart", "tidy"),
    "a chunk of each, a step each": ("apart", "tidy"),
    "llama-batched-bench: prompts": ("apart", "tidy"),
    "llama-batched-bench: decode": ("apart", "tidy"),
    "whole": ("apart", "served"),
}
"""Published steps, and the layouts of each."""
_HEADINGS = (
    "n x tokens, shared",
    "512 of one",
    "decode",
    "chunks",
    "a step each",
    "bench: prompts",
    "bench: decode",
    "whole",
)


def publish(results: Path, name: str) -> None:
    """Keep the raw data of a run with the model of this name, and write the tables."""
    keep_raw(results, FOLDER / f"layouts-{name}.json.gz")
    PAGE.write_text(rendered())


def rendered() -> str:
    """Return the page as it is with its generated part made from the raw data."""
    lines: list[str] = []
    for raw in sorted(FOLDER.glob("layouts-*.json.gz")):
        lines += [*_table(raw_data(raw), raw.name), ""]
    return page_with(PAGE, BEGIN, END, lines[:-1])


def _table(content: Mapping[str, Any], raw: str) -> list[str]:
    facts, results = content["machine"], content["results"]
    origin = (
        f"{content['model']}, {content['threads']} threads, at commit `{content['commit'][:10]}`, "
        f"{facts['date'][:10]}, on {facts['processor']} ({facts['threads']} threads, {facts['memory_gib']} GiB, "
        f"load before the run {facts['load_before']}; [raw data](published/{raw})):"
    )
    cases = dict.fromkeys((each["conversations"], each["tokens"], each["shared"]) for each in results)
    rows = [
        [f"{n} x {tokens:,}, {shared:.0%}", *_cells(results, (n, tokens, shared))] for n, tokens, shared in cases
    ]
    return [*wrapped(origin), "", *markdown_table(_HEADINGS, rows)]


def _cells(results: Sequence[Mapping[str, Any]], case: tuple[int, int, float]) -> list[str]:
    here = [each for each in results if (each["conversations"], each["tokens"], each["shared"]) == case]
    rates = {
        (each["step"], each["layout"]): f"{each['computed'] / statistics.median(each['seconds']):.0f}"
        for each in here
    }
    return [
        "/".join(rates[step, layout] for layout in layouts if (step, layout) in rates)
        for step, layouts in _COLUMNS.items()
    ]
