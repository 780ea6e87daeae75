"""llamaslot beside what a user would run instead: the same workloads, machine, model and libraries, in turn.

Each contender plays each workload on a server of its own, started for it; repeats go forwards and backwards through
the contenders (A B B A), so that a change of the machine's mood meets all. What is compared is paired within a
repeat. Every llama-server is built to run the very library files that llamaslot loads.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.progress import Progress
from rich.table import Table

from bench.client import BenchmarkError
from bench.contenders import CONTENDERS, Contender, Load
from bench.plots import draw
from bench.report import Summary, console, decode_rate, machine, notes, write_json
from bench.server import serving
from bench.tokens import Tokens, fewest
from bench.workloads import WORKLOADS, Play, Workload

N_SLOTS = 8
_BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Run:
    """One play of a workload against one contender; times in seconds."""

    workload: str
    contender: str
    repeat: int
    ttft: list[float]
    """Of each measured request, in the order in which they were asked."""
    gaps: list[float]
    """Between neighbouring chunks of the measured streams."""
    wall: float
    """From the first measured request to the end of the last."""
    decode_rate: float
    """Tokens per second of the measured streams together, while all of them decode; 0 where they do not overlap."""
    n_output: int
    n_prompt: int
    n_computed: int | None
    """Prompt tokens that the server computed for all requests, as it counts them; None where it does not say."""
    n_fewest: int
    """The fewest that anyone could compute for these prompts and replies."""


@dataclass(frozen=True)
class Metric:
    """One figure of a run."""

    name: str
    of: Callable[[Run], float]
    unit: str = "ms"
    more_is_better: bool = False


TTFT_MEAN = Metric("TTFT mean", lambda run: 1e3 * statistics.fmean(run.ttft))
TTFT_P50 = Metric("TTFT p50", lambda run: 1e3 * statistics.median(run.ttft))
TTFT_P95 = Metric("TTFT p95", lambda run: 1e3 * float(np.percentile(run.ttft, 95)))
GAP_P50 = Metric("gap p50", lambda run: 1e3 * float(np.percentile(run.gaps, 50)))
GAP_P99 = Metric("gap p99", lambda run: 1e3 * float(np.percentile(run.gaps, 99)))
WALL = Metric("wall", lambda run: 1e3 * run.wall)
THROUGHPUT = Metric("output", lambda run: run.n_output / run.wall, "tokens/s", more_is_better=True)
DECODE = Metric("decode", lambda run: run.decode_rate, "tokens/s", more_is_better=True)
METRICS = (TTFT_MEAN, TTFT_P50, TTFT_P95, GAP_P50, GAP_P99, WALL, THROUGHPUT)

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
    "long prefill": ((GAP_P99, 0.7),),
}
"""What llamaslot is to reach, as ratios to the best llama-server: at most, or at least where more is better."""
MOST_COMPUTED = 1.05
"""Prompt tokens to compute at most, of the fewest possible."""


@dataclass(frozen=True)
class Ratio:
    """A figure of llamaslot over that of the best llama-server, by pairs of one repeat."""

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
    goal: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether the median is on the right side."""
        return self.median >= self.goal if self.at_least else self.median <= self.goal


def run(
    *,
    model: Path,
    title: str,
    repeats: int,
    scale: float,
    threads: int,
    only: Sequence[str],
    against: Sequence[str],
    folder: Path,
    more_flags: Sequence[str],
) -> None:
    """Measure, print a table for each workload and the ratios; write `peers.json`, `peers.md` and the plots."""
    facts = machine()
    notes.print(f"all run the same libraries: {facts['llama_system_info']}")
    workloads = [each for each in WORKLOADS if not only or each.name in only]
    contenders = [each for each in CONTENDERS if not against or each.name in against]
    bench = _Bench(Tokens(model), Load(model, N_SLOTS, threads, 0, tuple(more_flags)), scale, folder)
    runs = asyncio.run(bench.measure(workloads, contenders, repeats))
    tables = [table(each.name, runs, title) for each in workloads if any(r.workload == each.name for r in runs)]
    ratios = [ratio for each in workloads for ratio in compared(each.name, runs)]
    for each in (*tables, goals(ratios)):
        console.print(each)
    settings = {"model": title, "slots": N_SLOTS, "threads": threads, "repeats": repeats, "scale": scale}
    settings |= {"flags": " ".join(more_flags), "cannot": bench.cannot}
    content = {"benchmark": "peers", "settings": settings, "machine": facts}
    content |= {"ratios": [asdict(each) for each in ratios], "runs": [asdict(each) for each in runs]}
    write_json(folder / "peers.json", content)
    (folder / "peers.md").write_text(markdown(runs, ratios, title))
    draw(runs, folder, f"{title}, {facts['processor']}")


class _Bench:
    """Plays workloads; `cannot` keeps what a contender refused."""

    def __init__(self, tokens: Tokens, load: Load, scale: float, folder: Path) -> None:
        self._tokens = tokens
        self._load = load
        self._scale = scale
        self._folder = folder
        self.cannot: dict[str, str] = {}

    async def measure(
        self, workloads: Sequence[Workload], contenders: Sequence[Contender], repeats: int
    ) -> list[Run]:
        seed = secrets.token_hex(8)
        runs = []
        with Progress(console=notes) as progress:
            task = progress.add_task("comparing", total=repeats * len(workloads) * len(contenders))
            for repeat in range(repeats):
                for workload in workloads:
                    for contender in contenders if repeat % 2 == 0 else contenders[::-1]:
                        progress.update(task, description=f"{workload.name}: {contender.name}")
                        words = random.Random(f"{seed} {repeat} {workload.name}")
                        try:
                            runs.append(await self._play(workload, contender, repeat, words))
                        except BenchmarkError as error:
                            name = f"{contender.name}, {workload.name}"
                            if contender.kind == "llamaslot":
                                raise BenchmarkError(f"{name}: {error}") from None
                            self.cannot[name] = str(error).splitlines()[0]
                            notes.print(f"{name}: {self.cannot[name]}")
                        progress.advance(task)
        return runs

    async def _play(self, workload: Workload, contender: Contender, repeat: int, words: random.Random) -> Run:
        command = contender.command(replace(self._load, n_ctx=workload.n_ctx(N_SLOTS, self._scale)))
        async with serving(command, log=self._folder / "peers-server.log") as client:
            play = Play(client, self._tokens, words, self._scale)
            await play.ask({"role": "user", "content": play.text(8)}, n_reply=4, measured=False)
            await workload.script(play)
        return self._run_of(workload, contender, repeat, play)

    def _run_of(self, workload: Workload, contender: Contender, repeat: int, play: Play) -> Run:
        measured = [asked.answer for asked in play.asked if asked.measured]
        requests = [(self._tokens.prompt(a.messages), self._tokens.of(a.answer.text)) for a in play.asked]
        for asked, (prompt, _) in zip(play.asked, requests, strict=True):
            if asked.answer.prompt_tokens not in (0, len(prompt)):
                raise BenchmarkError(
                    f"a prompt of {len(prompt)} tokens has {asked.answer.prompt_tokens} by the server's count"
                )
        computed = [asked.answer.timings.get("prompt_n") for asked in play.asked]
        try:
            rate = decode_rate([answer.arrivals for answer in measured])
        except BenchmarkError:
            rate = 0.0
        return Run(
            workload=workload.name,
            contender=contender.name,
            repeat=repeat,
            ttft=[answer.ttft for answer in measured],
            gaps=[gap for answer in measured for gap in answer.gaps],
            wall=max(answer.ended for answer in measured) - min(answer.started for answer in measured),
            decode_rate=rate,
            n_output=sum(len(answer.arrivals) for answer in measured),
            n_prompt=sum(len(prompt) for prompt, _ in requests),
            n_computed=None if None in computed else sum(computed),
            n_fewest=fewest(requests),
        )


def compared(workload: str, runs: Sequence[Run]) -> list[Ratio]:
    """llamaslot's goals for a workload, each against the llama-server that is best at it."""
    peers = [each.name for each in CONTENDERS if each.is_peer]
    ratios = []
    for metric, goal in GOALS.get(workload, ()):
        figures: dict[str, dict[int, float]] = {}
        for each in runs:
            if each.workload == workload:
                figures.setdefault(each.contender, {})[each.repeat] = metric.of(each)
        own = figures.get("llamaslot", {})
        medians = {peer: statistics.median(figures[peer].values()) for peer in peers if peer in figures}
        if not own or not medians:
            continue
        best = (max if metric.more_is_better else min)(medians, key=lambda peer: medians[peer])
        pairs = [own[repeat] / figure for repeat, figure in figures[best].items() if repeat in own]
        summary = Summary.of(pairs)
        ratios.append(
            Ratio(
                workload=workload,
                metric=metric.name,
                peer=best,
                median=summary.median,
                low=summary.low,
                high=summary.high,
                interval=_interval(pairs),
                n_pairs=len(pairs),
                goal=goal,
                at_least=metric.more_is_better,
            )
        )
    return ratios


def _interval(pairs: Sequence[float]) -> tuple[float, float]:
    drawn = np.random.default_rng(1).choice(np.array(pairs), (_BOOTSTRAPS, len(pairs)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def table(workload: str, runs: Sequence[Run], title: str) -> Table:
    """A line for each contender: medians over the repeats."""
    result = Table(title=f"{workload}, {title}", caption="medians over the repeats; ms, tokens/s; x: of the fewest")
    for heading in ("", *(metric.name for metric in METRICS), "computed", "fewest", "x"):
        result.add_column(heading, justify="right" if heading else "left")
    for row in rows(workload, runs):
        result.add_row(*row)
    return result


def rows(workload: str, runs: Sequence[Run]) -> list[list[str]]:
    """The cells of `table`."""
    result = []
    for contender in CONTENDERS:
        chosen = [each for each in runs if (each.workload, each.contender) == (workload, contender.name)]
        if not chosen:
            continue
        cells = [contender.name]
        cells += [f"{statistics.median([metric.of(each) for each in chosen]):,.0f}" for metric in METRICS]
        least = statistics.median([each.n_fewest for each in chosen])
        if any(each.n_computed is None for each in chosen):
            cells += ["", f"{least:,.0f}", ""]
        else:
            computed = statistics.median([each.n_computed or 0 for each in chosen])
            share = statistics.median([(each.n_computed or 0) / each.n_fewest for each in chosen])
            cells += [f"{computed:,.0f}", f"{least:,.0f}", f"{share:.2f}"]
        result.append(cells)
    return result


def goals(ratios: Sequence[Ratio]) -> Table:
    """llamaslot over the best llama-server, beside what it is to reach."""
    result = Table(title="llamaslot over the best llama-server", caption="medians of pairs; 95%: by bootstrap")
    for heading in ("workload", "figure", "best llama-server", "ratio", "range", "95%", "pairs", "goal", ""):
        result.add_column(heading)
    for row in goal_rows(ratios):
        result.add_row(*row)
    return result


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
            "met" if each.is_met else "short",
        ]
        for each in ratios
    ]


def markdown(runs: Sequence[Run], ratios: Sequence[Ratio], title: str) -> str:
    """All tables, to paste into a document."""
    parts = [f"# llamaslot beside its peers: {title}", ""]
    heading = ["workload", "figure", "best llama-server", "ratio", "range", "95%", "pairs", "goal", ""]
    parts += [*_markdown_table(heading, goal_rows(ratios)), ""]
    for workload in dict.fromkeys(each.workload for each in runs):
        heading = ["", *(metric.name for metric in METRICS), "computed", "fewest", "x"]
        parts += [f"## {workload}", "", *_markdown_table(heading, rows(workload, runs)), ""]
    return "\n".join(parts)


def _markdown_table(heading: Sequence[str], content: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *content)]
