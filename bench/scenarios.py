"""Six ways in which prompts share tokens, run without a cache and with the radix tree.

The token shapes are those of an article on radix trees for prefix caches, and the same at 50 times the length.
Prompts are token ids, one request after another, over HTTP; each asks for one token, which is sampled and never
computed, so that only prompts are in the cache. The counts of a flat block cache (`bench.flat`) stand beside them.

The two take turns (A B B A), each time on an empty cache, so that a change of the machine's speed affects both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.table import Table

from bench.client import BenchmarkError, Client
from bench.flat import BLOCK, BlockCache
from bench.progress import progress
from bench.report import Summary, console, machine, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

LENGTHS = (1, 50)
CONTEXT = 16_384
CACHE_SEQS = 48
"""More than any scenario has branches, so that no prefix is dropped for lack of sequence ids."""


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
    """Tokens after them that only one request has."""
    idle_cells: int | None = None
    """Most cells that idle prefixes may keep; None for the server's own limit."""
    in_turn: bool = False
    """Groups take turns: a request of each group comes before the second one of any."""
    in_short_only: bool = False
    """Long prompts would show nothing more."""

    @property
    def n_prompt(self) -> int:
        """Prompt tokens of all requests."""
        return self.n_groups * self.n_requests * (self.n_shared + self.n_own)

    def scaled(self, length: int) -> Scenario:
        """The same with prompts `length` times as long."""
        budget = self.idle_cells * length if self.idle_cells is not None else None
        return replace(self, n_shared=self.n_shared * length, n_own=self.n_own * length, idle_cells=budget)

    def prompts(self, n_vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
        """All prompts in the order of the requests. What must not be shared differs in its first token."""
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
    """The caches that are compared; the flat one is only counted."""

    NONE = "none"
    TREE = "tree"
    FLAT = "flat"


MEASURED = (Cache.NONE, Cache.TREE)


@dataclass(frozen=True)
class Outcome:
    """One scenario run once."""

    scenario: str
    cache: Cache
    length: int
    repeat: int
    n_requests: int
    n_hits: int
    """Requests with cached prompt tokens."""
    n_prompt: int
    n_cached: int
    seconds: float
    """0 if it was only counted."""

    @property
    def rate(self) -> float:
        """Prompt tokens per second, cached ones included."""
        return self.n_prompt / self.seconds if self.seconds else 0.0


def run(
    *, model: Path, title: str, repeats: int, folder: Path, server_flags: Sequence[str], only: str | None = None
) -> None:
    """Measure at each length and print a table for it, then write `scenarios.json`; `only` names one scenario."""
    facts = machine()
    flags = ["-c", str(CONTEXT), "--cache-seqs", str(CACHE_SEQS), "--cache-ram", "0", *server_flags]
    n_vocab = Tokens(model).n_vocab
    outcomes: list[Outcome] = []
    for length in LENGTHS:
        scenarios = [
            each for each in SCENARIOS if (length == 1 or not each.in_short_only) and only in (None, each.name)
        ]
        if scenarios:
            command = llamaslot(model, *flags)
            measured = asyncio.run(
                measure_all(command, scenarios, length=length, repeats=repeats, n_vocab=n_vocab, folder=folder)
            )
            console.print(table(measured, title))
            outcomes += measured
    settings = {"model": title, "flags": " ".join(flags), "repeats": repeats, "block": BLOCK}
    content = {"benchmark": "scenarios", "settings": settings, "machine": facts, "summary": summarize(outcomes)}
    write_json(folder / "scenarios.json", content | {"runs": [asdict(each) for each in outcomes]})


async def measure_all(
    command: Sequence[str],
    scenarios: Sequence[Scenario],
    *,
    length: int,
    repeats: int,
    n_vocab: int,
    folder: Path,
) -> list[Outcome]:
    """Run scenarios with both caches in turn, on one server for each limit of idle cells."""
    outcomes = []
    async with AsyncExitStack() as stack:
        clients: dict[int | None, Client] = {}
        for scenario in (each.scaled(length) for each in scenarios):
            if (limit := scenario.idle_cells) not in clients:
                flags = () if limit is None else ("--cache-idle-cells", str(limit))
                log = folder / f"scenarios-{limit}-server.log"
                clients[limit] = (await stack.enter_async_context(serving([*command, *flags], log=log))).client
        total = repeats * len(scenarios) * len(MEASURED)
        with progress(f"prompts x {length}", total) as advance:
            for repeat in range(repeats):
                for scenario in scenarios:
                    scaled = scenario.scaled(length)
                    prompts = scaled.prompts(n_vocab, seed=repeat)
                    of = {"length": length, "repeat": repeat}
                    for cache in MEASURED if repeat % 2 == 0 else MEASURED[::-1]:
                        n_cached, seconds = await _send(
                            clients[scaled.idle_cells], prompts, cached=cache is Cache.TREE
                        )
                        outcomes.append(_outcome(scenario, prompts, n_cached, seconds, cache=cache, **of))
                        advance(f"{scenario.name}, {cache}")
                    blocks = BlockCache(scaled.idle_cells)
                    counted = [blocks.request(prompt) for prompt in prompts]
                    outcomes.append(_outcome(scenario, prompts, counted, cache=Cache.FLAT, **of))
    return outcomes


async def _send(client: Client, prompts: Sequence[Sequence[int]], *, cached: bool) -> tuple[list[int], float]:
    """Send prompts one after another on an empty cache: the cached tokens of each, and the time of all."""
    await client.post("/cache/clear")
    counts = []
    started = perf_counter()
    for prompt in prompts:
        body = {"prompt": list(prompt), "n_predict": 1, "temperature": 0, "cache_prompt": cached}
        timings = (await client.post("/completion", **body))["timings"]
        if timings["cache_n"] + timings["prompt_n"] != len(prompt):
            raise BenchmarkError(f"cached and computed tokens do not add up to {len(prompt)}: {timings}")
        counts.append(int(timings["cache_n"]))
        # Idle prefixes beyond the limit are evicted before this is answered: no race with the next request.
        await client.get("/cache")
    return counts, perf_counter() - started


def _outcome(
    scenario: Scenario,
    prompts: Sequence[Sequence[int]],
    n_cached: Sequence[int],
    seconds: float = 0.0,
    **of: Any,
) -> Outcome:
    return Outcome(
        scenario=scenario.name,
        **of,
        n_requests=len(prompts),
        n_hits=sum(n > 0 for n in n_cached),
        n_prompt=sum(map(len, prompts)),
        n_cached=sum(n_cached),
        seconds=seconds,
    )


def summarize(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Per length, scenario and cache: the counts, and summaries of rates and of their ratios to no cache."""
    rows = []
    for length, name, cache in dict.fromkeys((each.length, each.scenario, each.cache) for each in outcomes):
        chosen = [each for each in outcomes if (each.length, each.scenario) == (length, name)]
        plain = {each.repeat: each.rate for each in chosen if each.cache is Cache.NONE}
        chosen = [each for each in chosen if each.cache is cache]
        counts = {(each.n_hits, each.n_cached) for each in chosen}
        if len(counts) != 1:
            raise BenchmarkError(f"{name}, {cache}: repeats have different counts: {counts}")
        first = chosen[0]
        row: dict[str, Any] = {"length": length, "scenario": name, "cache": str(cache)}
        row |= {"n_prompt": first.n_prompt, "n_cached": first.n_cached, "hit_rate": first.n_hits / first.n_requests}
        if cache in MEASURED:
            row["rate"] = asdict(Summary.of([each.rate for each in chosen]))
            row["ratio"] = asdict(Summary.of([each.rate / plain[each.repeat] for each in chosen]))
        rows.append(row)
    return rows


def table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Three lines per scenario, all of one length."""
    length = outcomes[0].length
    heading = "the article's prompts" if length == 1 else f"prompts {length} times as long"
    result = Table(
        title=f"Scenarios, {heading}, {title}",
        caption=f"flat: counts of a cache of blocks of {BLOCK} tokens; tokens/s: prompt tokens, median; x: ratio "
        "to no cache, median and range of pairs",
    )
    result.add_column("scenario")
    result.add_column("cache")
    for name in ("prompt", "cached", "prefilled", "hits", "tokens/s", "x", "range"):
        result.add_column(name, justify="right")
    for row in summarize(outcomes):
        cells = [row["scenario"] if row["cache"] == Cache.NONE else "", row["cache"]]
        n_prefilled = row["n_prompt"] - row["n_cached"]
        cells += [f"{n:,}" for n in (row["n_prompt"], row["n_cached"], n_prefilled)]
        cells.append(f"{row['hit_rate']:.1%}")
        cells.append(f"{row['rate']['median']:,.0f}" if "rate" in row else "")
        if row["cache"] == Cache.TREE:
            ratio = Summary(**row["ratio"])
            cells += [f"{ratio.median:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}"]
        result.add_row(*cells, end_section=row["cache"] == Cache.FLAT)
    return result
