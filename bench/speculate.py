"""Tokens per second with drafts and without, here and in llama-server, of replies that repeat the prompt or do not.

All servers run at once, and take turns with the same prompts (A B B A), so that a machine whose speed changes
within minutes is equally fast for all. Each prompt is computed before its reply is measured: drafts are about
decoding. Prompts are token ids, and replies have fixed lengths. `bench.quoting` has the prompts, and says how the
replies of random weights come to repeat them.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from rich.table import Table

from bench import synthetic
from bench.client import BenchmarkError, Client, Completion
from bench.peers.baseline import revision
from bench.peers.goals import Ratio
from bench.peers.servers import OWN, CommonSettings, ServerSetup
from bench.peers.workloads import FEW, GREEDY, OVERHEAD, padded
from bench.progress import progress
from bench.quoting import CHAT, LONGEST, REWRITE, TOOLS, ChainPrompts, Prompt, Prompts, RealPrompts
from bench.report import ROOT, Summary, console, machine, model_file, new_table, notes, write_json
from bench.server import Server, serving
from bench.tokens import Tokens
from llamaslot.app.model_files import DEFAULT, resolve_model
from llamaslot.base.errors import ConfigError

REAL = DEFAULT
"""The trained model that is measured unless another one is named."""
STREAMS = (1, 4, 8)
MANY = 20
"""Pairs that are needed to judge a goal near 1."""
QUICK_SCALE = 0.25
AT_ONCE_S = 0.0005
"""Tokens that come within this time are of one step."""
SAMPLED: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
DRAFTING = ServerSetup(OWN, "llamaslot", ("--speculate", "auto"))
WITHOUT = ServerSetup("llamaslot, no drafts", "llamaslot", ("--speculate", "off"))
_SMALLER = ("--spec-ngram-map-k-size-n", "8", "--spec-ngram-map-k-size-m", "16")
PEERS = (
    ServerSetup("llama-server", "llama-server"),
    ServerSetup("llama-server ngram-mod", "llama-server", ("--spec-type", "ngram-mod")),
    ServerSetup("llama-server ngram-map-k", "llama-server", ("--spec-type", "ngram-map-k")),
    ServerSetup("llama-server ngram-map-k 8/16", "llama-server", ("--spec-type", "ngram-map-k", *_SMALLER)),
    ServerSetup("llama-server ngram-simple", "llama-server", ("--spec-type", "ngram-simple")),
    ServerSetup("llama-server ngram-map-k4v", "llama-server", ("--spec-type", "ngram-map-k4v")),
    ServerSetup("llama-server ngram-cache", "llama-server", ("--spec-type", "ngram-cache")),
)
"""Without drafts, and with each kind of drafts that needs no second model."""
FEW_PEERS = PEERS[:3]
"""For shapes, of which some are so large that not all servers fit into the memory at once."""


@dataclass(frozen=True)
class Workload:
    """Streams that start together, with prompts of these kinds in turn."""

    name: str
    kinds: tuple[str, ...]
    streams: tuple[int, ...] = STREAMS
    sampling: Mapping[str, float] = field(default_factory=lambda: GREEDY)
    n_pairs: int = FEW
    """Pairs of runs that are needed to judge its goals."""
    has_peers: bool = False


BESIDE = "chat beside rewrite"
WORKLOADS = (
    Workload(REWRITE, (REWRITE,), has_peers=True),
    Workload(TOOLS, (TOOLS,), has_peers=True),
    Workload(BESIDE, (CHAT, REWRITE), streams=(STREAMS[-1],)),
    Workload(CHAT, (CHAT,), n_pairs=MANY),
    Workload("sampled chat", (CHAT,), sampling=SAMPLED, n_pairs=MANY),
    Workload("sampled rewrite", (REWRITE,), sampling=SAMPLED, n_pairs=MANY),
)
NAMES = tuple(each.name for each in WORKLOADS)


@dataclass(frozen=True)
class Goal:
    """What is wanted of llamaslot, divided by itself without drafts or by the best llama-server."""

    workload: str
    streams: tuple[int, ...]
    value: float
    metric: str = "rate"
    beside_peer: bool = False

    @property
    def at_least(self) -> bool:
        """True if more is better."""
        return self.metric == "rate"


GOALS = (
    Goal(REWRITE, (1,), 2.5),
    Goal(REWRITE, (8,), 1.3),
    Goal(REWRITE, STREAMS, 1.3, beside_peer=True),
    Goal(TOOLS, STREAMS, 1.3, beside_peer=True),
    Goal(BESIDE, (8,), 1.1, metric="gap_p99"),
    *(Goal(name, STREAMS, 0.98) for name in (CHAT, "sampled chat", "sampled rewrite")),
)
UNITS = {"rate": "tokens/s", "gap_p99": "gap p99"}
NO_DRAFTS = "no drafts"
"""Verdict on a goal that only drafts can reach, where llamaslot drafts nothing."""


@dataclass(frozen=True)
class Run:
    """One run of a workload on a server; times in seconds."""

    workload: str
    n_streams: int
    repeat: int
    server: str
    rate: float
    """Tokens per second of all streams together, while all of them run."""
    stream_rate: float
    """Median over the streams."""
    ttft: float
    """Median over the streams; the prompts were computed before."""
    gap_p50: float
    """Between neighbouring arrivals of a stream; beside streams that rewrite, of the others only."""
    gap_p99: float
    n_tokens: int
    n_drafted: int
    n_accepted: int


def run(
    *,
    model: str,
    repeats: int | None,
    scale: float,
    threads: int,
    folder: Path,
    server_flags: Sequence[str],
    only: Sequence[str],
    against: Sequence[str] | None,
    streams: Sequence[int],
    time_limit_s: float,
) -> None:
    """Measure, print two tables, write `speculate.json` and the servers' logs.

    `repeats` and `against` are the workloads' own, and as many as the model allows, unless given.
    """
    facts, started = machine(), monotonic()
    path, title = model_of(model)
    prompts = prompts_for(path, model, scale)
    setups = [each for each in PEERS if each.name in against] if against is not None else peers_of(model)
    n_ctx = context(scale)
    common = CommonSettings(path, STREAMS[-1], threads, n_ctx, tuple(server_flags))
    workloads = [
        replace(each, streams=tuple(n for n in each.streams if n in streams))
        for each in WORKLOADS
        if each.name in (only or NAMES)
    ]
    bench = Bench(prompts, common, folder, [DRAFTING, WITHOUT, *setups])
    asyncio.run(bench.measure(workloads, repeats, time_limit_s))
    console.print(table(bench.runs, title))
    console.print(goals_table(ratios(bench.runs), bench.runs, title))
    settings = {"model": title, "flags": " ".join(server_flags), "threads": threads, "scale": scale}
    settings |= {"servers": {each.name: " ".join(each.flags) for each in bench.setups}, "n_ctx": n_ctx}
    content = {"benchmark": "speculate", "commit": revision(ROOT), "machine": facts, "settings": settings}
    content |= {"seconds": monotonic() - started, "failures": bench.failures}
    content["goals"] = [asdict(each) | {"verdict": verdict(each, bench.runs)} for each in ratios(bench.runs)]
    write_json(folder / "speculate.json", content | {"runs": [asdict(each) for each in bench.runs]})
    if bench.failures:
        raise BenchmarkError("; ".join(f"{name}: {reason}" for name, reason in bench.failures.items()))


def model_of(model: str) -> tuple[Path, str]:
    """Return the file and the title of a shape, whose weights are a chain, of a named model, or of a GGUF file."""
    if model in synthetic.SHAPES:
        return synthetic.ensure(model, is_chain=True), f"{model} shape (weights that continue a chain, Q8_0)"
    try:
        path = resolve_model(model) if model == REAL else model_file(model)
    except ConfigError as error:
        raise BenchmarkError(error.message) from None
    return path, path.name


def prompts_for(path: Path, model: str, scale: float) -> Prompts:
    """Return the prompts for a model: what a chain repeats is known."""
    tokens = Tokens(path)
    return ChainPrompts(tokens.n_vocab, scale) if model in synthetic.SHAPES else RealPrompts(tokens, scale)


def context(scale: float) -> int:
    """Return the cells of all slots together."""
    return STREAMS[-1] * padded(LONGEST * scale + 4 * OVERHEAD)


def peers_of(model: str) -> list[ServerSetup]:
    """Return the llama-servers that are measured unless some are named."""
    return list(FEW_PEERS if model in synthetic.SHAPES else PEERS)


class Bench:
    """Runs workloads on servers that all run at once; `failures` has the reason for each run that failed."""

    def __init__(
        self, prompts: Prompts, common: CommonSettings, folder: Path, setups: Sequence[ServerSetup]
    ) -> None:
        self.setups = list(setups)
        self.runs: list[Run] = []
        self.failures: dict[str, str] = {}
        self._prompts = prompts
        self._common = common
        self._folder = folder
        self._run_id = secrets.token_hex(8)

    async def measure(self, workloads: Sequence[Workload], repeats: int | None, time_limit_s: float) -> None:
        """Run pairs; one that would not end within the time limit is not begun."""
        began = monotonic()
        took: dict[tuple[str, int], float] = {}
        n_pairs = {each.name: repeats or each.n_pairs for each in workloads}
        pairs = [
            (repeat, workload, n)
            for repeat in range(max(n_pairs.values()))
            for workload in workloads
            if repeat < n_pairs[workload.name]
            for n in workload.streams
        ]
        async with AsyncExitStack() as running:
            clients = await self._start(running)
            with progress("pair", len(pairs)) as advance:
                for repeat, workload, n in pairs:
                    started = monotonic()
                    if started - began + took.get((workload.name, n), 0.0) > time_limit_s:
                        notes.print("stopped: the time limit is near")
                        break
                    chosen = [each for each in self.setups if each.name in clients]
                    chosen = [each for each in chosen if workload.has_peers or not each.is_peer]
                    for setup in chosen if repeat % 2 == 0 else chosen[::-1]:
                        await self.run(clients[setup.name], setup, workload, n, repeat)
                    took[workload.name, n] = monotonic() - started
                    advance(f"{workload.name}, {n} streams, pair {repeat + 1}: {monotonic() - started:.0f} s")

    async def _start(self, running: AsyncExitStack) -> dict[str, Client]:
        """Start all servers, one after another, so that llamaslot measures its costs alone."""
        clients: dict[str, Client] = {}
        for setup in self.setups:
            try:
                clients[setup.name] = (await running.enter_async_context(self.serving(setup))).client
            except BenchmarkError as error:
                if not setup.is_peer:
                    raise
                self.failures[setup.name] = str(error).splitlines()[0]
        return clients

    def serving(self, setup: ServerSetup) -> AbstractAsyncContextManager[Server]:
        """Serve the model."""
        log = self._folder / f"speculate-{setup.name.replace(' ', '-').replace('/', '-')}.log"
        return serving(setup.command(self._common), log=log)

    async def run(self, client: Client, setup: ServerSetup, workload: Workload, n: int, repeat: int) -> None:
        """Run a workload with `n` streams on a server."""
        # Each prompt has a namespace of its own, so that nothing is drafted from earlier ones, which are alike.
        kinds = [workload.kinds[i % len(workload.kinds)] for i in range(n)]
        names = [f"{self._run_id} {workload.name} {n} {i} {repeat}" for i in range(n)]
        prompts = [self._prompts.draw(kind, random.Random(name)) for kind, name in zip(kinds, names, strict=True)]
        try:
            replies = await _replies(
                client, dict(zip(names, prompts, strict=True)), workload.sampling, 1000 * repeat
            )
            quiet = [reply for reply, kind in zip(replies, kinds, strict=True) if kind == workload.kinds[0]]
            figures = measured(replies, quiet)
        except BenchmarkError as error:
            self.failures[f"{setup.name}, {workload.name}, {n} streams"] = str(error).splitlines()[0]
            notes.print(f"{setup.name}, {workload.name}: {error}")
            return
        self.runs.append(Run(workload.name, n, repeat, setup.name, **figures))


async def _replies(
    client: Client, prompts: Mapping[str, Prompt], sampling: Mapping[str, float], seed: int
) -> list[Completion]:
    """Compute the prompts, each in a slot of its own, and then generate the replies side by side.

    Of llamaslot, each has the namespace of its name. llama-server has none, and ignores the field.
    """
    for slot, (name, prompt) in enumerate(prompts.items()):
        await client.complete(prompt.ids, n_predict=1, id_slot=slot, cache_prompt=True, cache_salt=name, **GREEDY)
    return await asyncio.gather(
        *(
            client.complete(
                prompt.ids,
                n_predict=prompt.n_reply,
                id_slot=slot,
                cache_prompt=True,
                cache_salt=name,
                ignore_eos=True,
                seed=seed + slot,
                **sampling,
                **prompt.fields,
            )
            for slot, (name, prompt) in enumerate(prompts.items())
        )
    )


def measured(replies: Sequence[Completion], quiet: Sequence[Completion]) -> dict[str, Any]:
    """Return the figures of streams; gaps are those of the `quiet` ones, while all run."""
    start = max(each.arrivals[0] for each in replies)
    end = min(each.arrivals[-1] for each in replies)
    if end <= start:
        raise BenchmarkError("the streams did not decode side by side: one ended before another began")
    n_side_by_side = sum(
        count
        for each in replies
        for came, count in zip(each.arrivals, each.counts, strict=True)
        if start < came <= end
    )
    gaps = [gap for each in quiet for gap in _gaps([came for came in each.arrivals if start <= came <= end])]
    return {
        "rate": n_side_by_side / (end - start),
        "stream_rate": statistics.median(_stream_rate(each) for each in replies),
        "ttft": statistics.median(each.ttft for each in replies),
        "gap_p50": float(np.percentile(gaps, 50)) if gaps else 0.0,
        "gap_p99": float(np.percentile(gaps, 99)) if gaps else 0.0,
        "n_tokens": sum(len(each.tokens) for each in replies),
        "n_drafted": sum(each.timings.get("draft_n", 0) for each in replies),
        "n_accepted": sum(each.timings.get("draft_n_accepted", 0) for each in replies),
    }


def _gaps(arrivals: Sequence[float]) -> list[float]:
    """Return the times between arrivals; chunks that come at once, as those of a draft do, are one."""
    steps: list[float] = []
    for came in arrivals:
        if not steps or came - steps[-1] > AT_ONCE_S:
            steps.append(came)
    return [after - before for before, after in pairwise(steps)]


def _stream_rate(reply: Completion) -> float:
    seconds = reply.arrivals[-1] - reply.arrivals[0]
    return sum(reply.counts[1:]) / seconds if seconds else 0.0


def best_peer(runs: Sequence[Run], workload: str, n: int) -> str | None:
    """Return the llama-server with the highest median rate."""
    names = {each.name for each in PEERS}
    rates: dict[str, list[float]] = {}
    for each in runs:
        if (each.workload, each.n_streams) == (workload, n) and each.server in names:
            rates.setdefault(each.server, []).append(each.rate)
    return max(rates, key=lambda name: statistics.median(rates[name]), default=None)


def ratios(runs: Sequence[Run]) -> list[Ratio]:
    """Compare llamaslot's runs with those of the same repeat without drafts, and on the best llama-server."""
    found = []
    for goal in GOALS:
        [workload] = [each for each in WORKLOADS if each.name == goal.workload]
        for n in goal.streams:
            other = best_peer(runs, goal.workload, n) if goal.beside_peer else WITHOUT.name
            sides: dict[str, dict[int, float]] = {DRAFTING.name: {}, other or "": {}}
            for each in runs:
                if (each.workload, each.n_streams) == (goal.workload, n) and each.server in sides:
                    sides[each.server][each.repeat] = getattr(each, goal.metric)
            own, others = sides.values()
            pairs = [own[repeat] / others[repeat] for repeat in own if others.get(repeat)]
            if other and pairs:
                found.append(
                    Ratio.of(
                        f"{goal.workload} {n}",
                        UNITS[goal.metric],
                        other,
                        pairs=pairs,
                        goal=goal.value,
                        n_needed=workload.n_pairs,
                        at_least=goal.at_least,
                    )
                )
    return found


def verdict(ratio: Ratio, runs: Sequence[Run]) -> str:
    """Return the verdict on a goal; `NO_DRAFTS` if only drafts could reach it, and there were none."""
    is_about_drafts = ratio.at_least and ratio.goal > 1
    own = [each for each in runs if each.server == DRAFTING.name]
    drafted = any(each.n_drafted for each in own if f"{each.workload} {each.n_streams}" == ratio.workload)
    return ratio.verdict if drafted or not is_about_drafts else NO_DRAFTS


def table(runs: Sequence[Run], title: str) -> Table:
    """A line for each workload, number of streams and server: medians over the pairs."""
    headings = ("workload", "streams", "server", "tokens/s", "each", "TTFT", "gap p50", "p99", "drafted", "right")
    caption = "medians of pairs; times in ms; drafted: of the generated tokens, right: of the drafted ones"
    found = new_table(f"Drafts: {title}", headings, ("workload", "server"), caption)
    for workload, n, server in dict.fromkeys((each.workload, each.n_streams, each.server) for each in runs):
        own = [each for each in runs if (each.workload, each.n_streams, each.server) == (workload, n, server)]

        def median(name: str, own: Sequence[Run] = own) -> float:
            return Summary.of([getattr(each, name) for each in own]).median

        times = [f"{1e3 * median(name):.1f}" for name in ("ttft", "gap_p50", "gap_p99")]
        rates = [f"{median(name):.1f}" for name in ("rate", "stream_rate")]
        found.add_row(workload, str(n), server, *rates, *times, *_drafts(own))
    return found


def _drafts(runs: Sequence[Run]) -> tuple[str, str]:
    n_drafted, n_accepted, n_tokens = (
        sum(getattr(each, name) for each in runs) for name in ("n_drafted", "n_accepted", "n_tokens")
    )
    return (f"{n_drafted / n_tokens:.0%}", f"{n_accepted / n_drafted:.0%}") if n_drafted else ("none", "")


def goals_table(found: Sequence[Ratio], runs: Sequence[Run], title: str) -> Table:
    """A line for each goal."""
    headings = ("workload, streams", "figure", "beside", "median", "95%", "pairs", "goal", "verdict")
    made = new_table(f"llamaslot with drafts / others: {title}", headings, (*headings[:3], "verdict"))
    for each in found:
        low, high = each.interval
        goal = f"at {'least' if each.at_least else 'most'} {each.goal:.2f}"
        cells = (f"{each.median:.2f}", f"{low:.2f}-{high:.2f}", str(each.n_pairs), goal, verdict(each, runs))
        made.add_row(each.workload, each.metric, each.peer, *cells)
    return made
