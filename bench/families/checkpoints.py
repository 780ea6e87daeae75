"""`python -m bench checkpoints`: reuse by checkpoints once prefixes have left the pool, and memory for checkpoints.

restart  TTFT of a conversation's next turn after a restart of the server / TTFT of a cold prompt of that length
eight    prompt tokens computed for eight conversations, with pool and RAM for three / fewest possible
memory   resident memory / that of llama-server with the same limit for checkpoints
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from rich.table import Table

from bench.client import BenchmarkError
from bench.families import checkpoint_runs as runs
from bench.families.checkpoint_runs import Bench, Shape
from bench.families.kinds import state_sizes
from bench.peers import build
from bench.peers.baseline import revision
from bench.progress import progress
from bench.report import ROOT, Summary, console, machine, model_file, new_table, notes, write_json
from bench.tokens import Tokens

MEASUREMENTS = ("restart", "eight", "memory")
HYBRID, WINDOW = "60m-granite", "60m-swa"
"""Shapes that are measured unless told: `WINDOW` for memory, since windows take cells of their own."""
QUICK_HYBRID, QUICK_WINDOW = "tiny-granite", "tiny-swa"
QUICK_SCALE = 0.1
MAX_RESTART = 0.1
MAX_COMPUTED = 1.2
MAX_PSS, MORE_PSS_MIB = 1.1, 100
"""Most that llamaslot may have in memory: a factor of llama-server's PSS, and MiB beside that."""
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark."""

    measurements: Sequence[str]
    model: str | None
    """A shape or a file for all measurements; None for the usual ones."""
    scale: float
    """Factor for the long prompts."""
    seed: int
    """Seed of the text."""
    tiny: bool = False
    """Use the tiny shapes: nothing that is timed then means anything."""

    def model_of(self, measurement: str) -> str:
        """The shape or file that a measurement takes."""
        hybrid, window = (QUICK_HYBRID, QUICK_WINDOW) if self.tiny else (HYBRID, WINDOW)
        return self.model or (window if measurement == "memory" else hybrid)


@dataclass(frozen=True)
class Figure:
    """A figure of one measurement, with a value for each repeat."""

    measurement: str
    model: str
    name: str
    values: list[float]
    most: float | None = None
    """The goal for the median; None for a figure that is only shown."""

    @property
    def is_met(self) -> bool | None:
        """True if the goal is met; None without one."""
        return None if self.most is None else Summary.of(self.values).median <= self.most

    def cells(self) -> list[str]:
        """The row of the table."""
        form = "{:.3f}" if self.most is not None else "{:,.0f}"
        summary = Summary.of(self.values)
        spread = "-".join(form.format(each) for each in (summary.low, summary.high))
        goal = ("", "") if self.most is None else (f"at most {self.most:g}", "met" if self.is_met else "missed")
        return [self.measurement, self.model, self.name, form.format(summary.median), spread, *goal]


def run(
    *, settings: Settings, repeats: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> list[Figure]:
    """Measure, print the table, write `checkpoints.json` and the log of the server that ran last."""
    facts, started = machine(), monotonic()
    bench = Bench(threads, settings.scale, settings.seed, folder / "checkpoints-server.log", tuple(server_flags))
    found = asyncio.run(_measure(settings, bench, repeats))
    figures = [
        each for name, measured in found.items() for each in figures_of(name, settings.model_of(name), measured)
    ]
    console.print(table(figures))
    content: dict[str, Any] = {"benchmark": "checkpoints", "commit": revision(ROOT), "machine": facts}
    flags = " ".join(server_flags)
    content["settings"] = asdict(settings) | {"repeats": repeats, "threads": threads, "flags": flags}
    content |= {"seconds": monotonic() - started, "runs": found}
    content["figures"] = [asdict(each) | {"is_met": each.is_met} for each in figures]
    write_json(folder / "checkpoints.json", content)
    return figures


async def _measure(settings: Settings, bench: Bench, repeats: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in settings.measurements}
    peer: str | None = runs.PEER
    if "memory" in found and settings.tiny and not build.has_llama_server():
        notes.print("llama-server is not built, which takes minutes: a quick look leaves it out")
        peer = None
    shapes = {name: _shape(settings.model_of(name), bench.threads) for name in found}
    with progress("run", len(found) * repeats) as advance:
        for name, shape in shapes.items():
            for repeat in range(repeats):
                match name:
                    case "restart":
                        measured = await runs.restart(bench, shape, repeat)
                    case "eight":
                        measured = await runs.eight(bench, shape, repeat)
                    case "memory":
                        measured = await runs.memory(bench, shape, repeat, peer)
                    case _:
                        raise BenchmarkError(f"there is no measurement {name}")
                found[name].append(measured)
                advance(name)
    return found


def _shape(name: str, threads: int) -> Shape:
    model = model_file(name)
    return Shape(name, model, Tokens(model), state_sizes(model, threads))


def figures_of(measurement: str, model: str, measured: Sequence[dict[str, float]]) -> list[Figure]:
    """Return the figures of all runs of a measurement; that with a goal comes last."""

    def of(name: str, *values: float, most: float | None = None) -> Figure:
        return Figure(measurement, Path(model).name, name, list(values), most)

    if measurement == "restart":
        return [
            of("prompt tokens", *(each["prompt"] for each in measured)),
            of("computed after the restart", *(each["computed"] for each in measured)),
            of("cold TTFT, ms", *(1e3 * each["cold_s"] for each in measured)),
            of("TTFT after the restart, ms", *(1e3 * each["resumed_s"] for each in measured)),
            of("ratio", *(each["resumed_s"] / each["cold_s"] for each in measured), most=MAX_RESTART),
        ]
    if measurement == "eight":
        return [
            of("prompt tokens", *(each["prompt"] for each in measured)),
            of("fewest", *(each["fewest"] for each in measured)),
            of("computed", *(each["computed"] for each in measured)),
            # Nothing, if pool and RAM had room for all.
            of("read from disk", *(each["read_tokens"] for each in measured)),
            of("computed / fewest", *(each["computed"] / each["fewest"] for each in measured), most=MAX_COMPUTED),
        ]
    names = {"own": "llamaslot", "peer": runs.PEER}
    labels = {"rss": "RSS", "pss": "PSS", "checkpoints": "checkpoints"}
    shown = [
        of(f"{labels[kind]} of {title}, MiB", *(each[f"{side}_{kind}"] / MIB for each in measured))
        for side, title in names.items()
        for kind in labels
        if all(f"{side}_{kind}" in each for each in measured)
    ]
    if any("peer_pss" not in each for each in measured):
        return shown
    limits = [MAX_PSS * each["peer_pss"] + MORE_PSS_MIB * MIB for each in measured]
    ratios = [each["own_pss"] / limit for each, limit in zip(measured, limits, strict=True)]
    name = f"PSS / ({MAX_PSS:g} x llama-server's + {MORE_PSS_MIB} MiB)"
    return [*shown, of(name, *ratios, most=1.0)]


def table(figures: Sequence[Figure]) -> Table:
    """A line for each figure."""
    caption = "memory is that of all processes of a server; PSS counts shared pages once"
    left = ("measured", "shape", "figure", "goal", "")
    result = new_table("Checkpoints", ("measured", "shape", "figure", "median", "range", "goal", ""), left, caption)
    for each in figures:
        result.add_row(*each.cells(), end_section=each.most is not None)
    return result
