"""Six ways in which prompts share tokens, run without a cache, with a flat block cache and with the radix tree.

The token shapes are those of an article on radix trees for prefix caches, and the same at 50 times the length.
Prompts are token ids in a fixed order, one request after another, through the engine on llama.cpp; each asks for
one token, which is sampled and never computed, so that only prompts are in the cache. All that is counted as
computed was counted in the batches that llama.cpp decoded.

The three caches take turns (A B C C B A), each time on an empty pool, so that a change of the machine's mood meets
all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from rich.progress import Progress
from rich.table import Table

from bench.client import BenchmarkError
from bench.flat import BLOCK, FlatLedger
from bench.report import Summary, console, machine, notes, write_json
from llamaslot.app.config_reader import read_config
from llamaslot.app.flags import Parser, add_flags
from llamaslot.app.server import llama_settings
from llamaslot.app.tiers import choose
from llamaslot.backend.llama import LlamaBackend
from llamaslot.base.backend import Backend
from llamaslot.base.commands import InspectEngine, Query, Sampling, Submit, TokensPart
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import TERMINAL, Event, Finished, Reply, Stopped
from llamaslot.base.kv_ops import Remove
from llamaslot.engine.engine import Engine
from llamaslot.engine.worker import model_thread
from llamaslot.kvcache.ledger import Ledger
from llamaslot.kvcache.shared import SharedLedger
from llamaslot.scheduler import scheduler

T = TypeVar("T")

LENGTHS = (1, 50)
CONTEXT = 16384
CACHE_SEQS = 48
"""More than any scenario has branches, so that ids decide nothing."""


@dataclass(frozen=True)
class Scenario:
    """Groups of requests; those of a group share the start of their prompts and nothing else."""

    name: str
    n_groups: int
    n_requests: int
    """Per group."""
    n_shared: int
    """Tokens that a group shares."""
    n_own: int
    """Tokens behind them that only one request has."""
    idle_cells: int | None = None
    in_turn: bool = False
    """Whether a request of each group comes before the second one of any."""
    in_short_only: bool = False
    """Whether there is nothing more to see in it with long prompts."""

    @property
    def n_prompt(self) -> int:
        """Prompt tokens of all requests."""
        return self.n_groups * self.n_requests * (self.n_shared + self.n_own)

    def scaled(self, length: int) -> Scenario:
        """The same with prompts so many times as long."""
        budget = self.idle_cells * length if self.idle_cells is not None else None
        return replace(self, n_shared=self.n_shared * length, n_own=self.n_own * length, idle_cells=budget)

    def prompts(self, n_vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
        """In the order of the requests. What must not be shared differs in its first token."""
        chance = np.random.default_rng(seed)

        def runs(n: int, length: int) -> list[tuple[int, ...]]:
            tokens = chance.integers(0, n_vocab, (n, length))
            if length:
                tokens[:, 0] = chance.permutation(n_vocab)[:n]
            return [tuple(run) for run in tokens.tolist()]

        heads = runs(self.n_groups, self.n_shared)
        groups = [[head + tail for tail in runs(self.n_requests, self.n_own)] for head in heads]
        if self.in_turn:
            return [group[i] for i in range(self.n_requests) for group in groups]
        return [prompt for group in groups for prompt in group]


SCENARIOS = (
    Scenario("shared_prefix_basic", 1, 8, 16, 8),
    Scenario("high_reuse_many_requests", 1, 24, 24, 4),
    Scenario("branching_conversation", 1, 8, 24, 8),
    Scenario("multi_prefix_groups", 4, 6, 16, 8, in_turn=True),
    Scenario("low_reuse_control", 1, 8, 0, 24),
    Scenario("eviction_pressure", 6, 4, 16, 8, idle_cells=8 * BLOCK),
    Scenario("eviction_pressure, in turn", 6, 4, 16, 8, idle_cells=8 * BLOCK, in_turn=True, in_short_only=True),
)
"""The article's six, and the last one in the order in which its flat cache found nothing."""


class Cache(StrEnum):
    """What is compared."""

    NONE = "none"
    FLAT = "flat"
    TREE = "tree"


@dataclass(frozen=True)
class Outcome:
    """One scenario run once."""

    scenario: str
    cache: Cache
    length: int
    repeat: int
    n_requests: int
    n_hits: int
    """Requests of whose prompt something was cached."""
    n_prompt: int
    n_cached: int
    n_prefilled: int
    """Prompt tokens that llama.cpp computed."""
    n_evicted: int
    """Tokens given up while the scenario ran."""
    n_entries: int
    """Nodes or blocks in the end."""
    seconds: float

    @property
    def rate(self) -> float:
        """Prompt tokens per second, cached ones included."""
        return self.n_prompt / self.seconds


class Bench:
    """A backend, and the thread that all engines compute on; each run leaves the pool as empty as it found it.

    `idle_cells` is the budget of scenarios that have none of their own. Nothing is stored off the pool.
    """

    def __init__(self, backend: Backend, thread: Executor, *, idle_cells: int | None = None) -> None:
        self.backend = backend
        self._thread = thread
        self._idle_cells = idle_cells

    async def measure(self, scenario: Scenario, cache: Cache, *, length: int = 1, repeat: int = 0) -> Outcome:
        """Run a scenario on an engine of its own; raises `BenchmarkError` where the figures do not add up."""
        scaled = scenario.scaled(length)
        prompts = scaled.prompts(self.backend.info.n_vocab, seed=repeat)
        idle_cells = scaled.idle_cells if scaled.idle_cells is not None else self._idle_cells
        answers: asyncio.Queue[Event] = asyncio.Queue()

        def receive(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, (*TERMINAL, Reply, Stopped)):
                    answers.put_nowait(event)

        with _ledger(FlatLedger if cache is Cache.FLAT else SharedLedger):
            engine = Engine(self.backend, receive, idle_cells=idle_cells, thread=_Lent(self._thread))
        running = asyncio.create_task(engine.run())
        running.add_done_callback(lambda _: answers.put_nowait(Stopped("it died before it could say so")))
        ends = []
        ledger = engine.scheduler.ledger
        try:
            started = perf_counter()
            for i, prompt in enumerate(prompts):
                engine.send(_submit(str(i), prompt, cached=cache is not Cache.NONE))
                ends.append(_expected(Finished, await answers.get()).progress)
                # What exceeds the budget is evicted before this is answered: no race with the next request decides.
                engine.send(Query("after", InspectEngine()))
                state = _expected(Reply, await answers.get()).body
            seconds = perf_counter() - started
        finally:
            engine.stop()
            await running
            await asyncio.get_running_loop().run_in_executor(self._thread, self._check_and_clear, ledger)
        outcome = Outcome(
            scenario=scenario.name,
            cache=cache,
            length=length,
            repeat=repeat,
            n_requests=len(prompts),
            n_hits=sum(end.n_cached > 0 for end in ends),
            n_prompt=sum(map(len, prompts)),
            n_cached=sum(end.n_cached for end in ends),
            n_prefilled=state.n_decoded_tokens,
            n_evicted=ledger.counts.n_lost_tokens,
            n_entries=len(ledger.blocks) if isinstance(ledger, FlatLedger) else ledger.tree.n_nodes,
            seconds=seconds,
        )
        if outcome.n_cached + outcome.n_prefilled != outcome.n_prompt:
            raise BenchmarkError(f"cached and computed tokens are not those of the prompts: {outcome}")
        return outcome

    def _check_and_clear(self, ledger: Ledger) -> None:
        try:
            ledger.check(self.backend.seq_range)
        finally:
            for seq in range(self.backend.n_seqs):
                self.backend.change(Remove(seq, 0))


def run(
    *, model: Path, title: str, repeats: int, folder: Path, server_flags: Sequence[str], only: str | None = None
) -> None:
    """Measure at each length and print a table for it, then write `scenarios.json`; `only` names one scenario."""
    facts = machine()
    flags = ["-c", str(CONTEXT), "--cache-seqs", str(CACHE_SEQS), "--cache-ram", "0", *server_flags]
    outcomes = asyncio.run(_measure_all(model, title, flags, repeats, only))
    settings = {"model": title, "flags": " ".join(flags), "repeats": repeats, "block": BLOCK}
    content = {"benchmark": "scenarios", "settings": settings, "machine": facts, "summary": summarize(outcomes)}
    write_json(folder / "scenarios.json", content | {"runs": [asdict(each) for each in outcomes]})


async def _measure_all(
    model: Path, title: str, flags: Sequence[str], repeats: int, only: str | None
) -> list[Outcome]:
    thread = model_thread()
    parser = Parser(prog="--server")
    add_flags(parser)
    try:
        config = read_config(parser.parse(["-m", str(model), *flags]), {})
        settings = llama_settings(config, model)
        backend = await asyncio.get_running_loop().run_in_executor(thread, LlamaBackend, settings)
    except ConfigError as error:
        raise BenchmarkError(str(error)) from None
    tiers = choose(config, backend.info, 0)
    notes.print(tiers.line)
    outcomes: list[Outcome] = []
    bench = Bench(backend, thread, idle_cells=tiers.idle_cells)
    for length in LENGTHS:
        measured = await _measure_length(bench, _scenarios(length, only), length, repeats)
        console.print(table(measured, title))
        outcomes += measured
    thread.submit(backend.close).result()
    thread.shutdown()
    return outcomes


def _scenarios(length: int, only: str | None) -> list[Scenario]:
    return [each for each in SCENARIOS if (length == 1 or not each.in_short_only) and only in (None, each.name)]


async def _measure_length(bench: Bench, scenarios: list[Scenario], length: int, repeats: int) -> list[Outcome]:
    outcomes = []
    with Progress(console=notes) as progress:
        task = progress.add_task(f"length {length}", total=repeats * len(scenarios) * len(Cache))
        await bench.measure(SCENARIOS[0], Cache.NONE, length=length)
        for repeat in range(repeats):
            caches = list(Cache) if repeat % 2 == 0 else list(Cache)[::-1]
            for scenario in scenarios:
                for cache in caches:
                    outcomes.append(await bench.measure(scenario, cache, length=length, repeat=repeat))
                    progress.advance(task)
    return outcomes


def summarize(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Per length, scenario and cache: the counts, and summaries of rates and of their ratios to no cache."""
    rows = []
    for length, name, cache in dict.fromkeys((each.length, each.scenario, each.cache) for each in outcomes):
        chosen = [each for each in outcomes if (each.length, each.scenario) == (length, name)]
        plain = {each.repeat: each.rate for each in chosen if each.cache is Cache.NONE}
        chosen = [each for each in chosen if each.cache is cache]
        counts = {(e.n_hits, e.n_cached, e.n_prefilled, e.n_evicted, e.n_entries) for e in chosen}
        if len(counts) != 1:
            raise BenchmarkError(f"{name}, {cache}: repeats gave other counts: {counts}")
        first = chosen[0]
        row: dict[str, Any] = {"length": length, "scenario": name, "cache": str(cache)}
        row |= {"n_prompt": first.n_prompt, "n_cached": first.n_cached, "n_prefilled": first.n_prefilled}
        row |= {"hit_rate": first.n_hits / first.n_requests}
        row |= {"n_evicted": first.n_evicted, "n_entries": first.n_entries}
        row["rate"] = asdict(Summary.of([each.rate for each in chosen]))
        row["ratio"] = asdict(Summary.of([each.rate / plain[each.repeat] for each in chosen]))
        rows.append(row)
    return rows


def table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Three lines a scenario, all of one length."""
    length = outcomes[0].length
    heading = "the article's prompts" if length == 1 else f"prompts {length} times as long"
    result = Table(
        title=f"Scenarios, {heading}, {title}",
        caption=f"tokens; entries: nodes, or blocks of {BLOCK}; tokens/s: prompt tokens, median; x: over no cache, "
        "median and range of neighbours",
    )
    result.add_column("scenario")
    result.add_column("cache")
    for name in ("prompt", "cached", "prefilled", "hits", "evicted", "entries", "tokens/s", "x", "range"):
        result.add_column(name, justify="right")
    for row in summarize(outcomes):
        is_first, is_last = row["cache"] == Cache.NONE, row["cache"] == Cache.TREE
        ratio = Summary(**row["ratio"])
        cells = [row["scenario"] if is_first else "", row["cache"]]
        cells += [f"{row[count]:,}" for count in ("n_prompt", "n_cached", "n_prefilled")]
        cells += [f"{row['hit_rate']:.1%}", f"{row['n_evicted']:,}", f"{row['n_entries']:,}"]
        cells.append(f"{row['rate']['median']:,.0f}")
        cells += ["", ""] if is_first else [f"{ratio.median:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}"]
        result.add_row(*cells, end_section=is_last)
    return result


@contextmanager
def _ledger(kind: type[Ledger]) -> Iterator[None]:
    """A scheduler that is made meanwhile keeps account with this kind of ledger."""
    with patch.object(scheduler, "SharedLedger", kind):
        yield


class _Lent(Executor):
    """A thread that outlives the engines that compute on it, since OpenMP keeps a team for each thread."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn` there."""
        return self._thread.submit(fn, *args, **kwargs)


def _submit(request_id: str, prompt: tuple[int, ...], *, cached: bool) -> Submit:
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    return Submit(request_id, (TokensPart(prompt),), sampling=sampling, max_tokens=1, cache_prompt=cached)


def _expected(kind: type[T], event: Event) -> T:
    if not isinstance(event, kind):
        raise BenchmarkError(f"the engine answered {event}")
    return event
