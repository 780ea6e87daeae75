"""The cost of idle prefixes: prefill beside them, and prefill after many requests have come and gone.

llama.cpp's attention reads the pool up to the highest used cell, so prompts are computed more slowly the more idle
prefixes there are. Prefill is measured by the server's own time for a prompt of `PROMPT` fresh tokens. Reused
tokens need not be computed again: the last column says in how many fresh tokens all idle ones have to be reused
once to make up for that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.client import Client
from bench.report import Summary, console, machine, notes, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

PROMPT = 512
LONGEST = 2048
"""Most tokens of an idle prefix: each takes a sequence id."""
LEVELS = (0, 2048, 4096, 8192, 16384)


class Pool:
    """A server, asked one request at a time with token ids."""

    def __init__(self, client: Client, n_vocab: int) -> None:
        self._client = client
        self._n_vocab = n_vocab
        self._random = np.random.default_rng(1)

    async def ask(self, prompt: Sequence[int], *, n_predict: int = 1, cache_prompt: bool = True) -> float:
        """Run a request: the seconds that its prompt took."""
        body = {"prompt": list(prompt), "n_predict": n_predict, "temperature": 0, "ignore_eos": True}
        answer = await self._client.post("/completion", **body, cache_prompt=cache_prompt)
        return float(answer["timings"]["prompt_ms"]) / 1e3

    def fresh(self, n: int) -> tuple[int, ...]:
        """Random tokens, which share nothing with others."""
        return tuple(self._random.integers(0, self._n_vocab, n).tolist())

    async def prefill(self) -> float:
        """Seconds that a fresh prompt takes, of which nothing is kept."""
        return await self.ask(self.fresh(PROMPT), cache_prompt=False)

    async def n_used(self) -> int:
        """Cells in use."""
        return int((await self._client.get("/cache"))["cells"]["used"])

    async def fill(self, n_cells: int) -> None:
        """Compute fresh idle prefixes until so many cells are in use."""
        while (missing := n_cells - await self.n_used()) > 0:
            await self.ask(self.fresh(min(missing, LONGEST)))


async def beside_idle(pool: Pool, repeats: int, levels: Sequence[int] = LEVELS) -> dict[int, Summary]:
    """Seconds of prefill by idle cells."""
    await pool.prefill()
    seconds = {}
    for level in levels:
        await pool.fill(level)
        seconds[level] = Summary.of([await pool.prefill() for _ in range(repeats)])
        notes.print(f"idle: {level:,} cells, {1e3 * seconds[level].median:,.0f} ms")
    return seconds


async def after_mixed_use(used: Pool, compact: Pool, n_requests: int, repeats: int) -> dict[str, Any]:
    """Seconds of prefill after many requests, and on a server that was filled with as many cells in a row."""
    chance = random.Random(1)
    heads = [used.fresh(n) for n in (40, 200, 400)]
    talks: list[tuple[int, ...]] = []
    for i in range(n_requests):
        goes_on = talks and chance.random() < 0.5
        talk = talks.pop(chance.randrange(len(talks))) if goes_on else chance.choice(heads)
        talk += used.fresh(chance.randint(5, 300))
        await used.ask(talk, n_predict=chance.randint(1, 20))
        if len(talk) < 1500:
            talks = [*talks, talk][-40:]
        if (i + 1) % 100 == 0:
            notes.print(f"idle: {i + 1:,} of {n_requests:,} mixed requests")
    n_used = await used.n_used()
    await compact.fill(n_used)
    times: dict[str, list[float]] = {"used": [], "compact": []}
    for _ in range(repeats):
        times["used"].append(await used.prefill())
        times["compact"].append(await compact.prefill())
    ratios = [a / b for a, b in zip(times["used"], times["compact"], strict=True)]
    return {
        "requests": n_requests,
        "cells_used": n_used,
        "seconds": {name: asdict(Summary.of(values)) for name, values in times.items()},
        "ratio": asdict(Summary.of(ratios)),
    }


def run(
    *, model: Path, title: str, repeats: int, n_requests: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print and write both parts."""
    flags = ["-c", str(LEVELS[-1] + 2048), "-np", "4", "-fa", "on", *server_flags]
    levels, mixed = asyncio.run(_measure(model, flags, repeats, n_requests, folder))
    table = Table(title=f"Prefill of {PROMPT} tokens beside idle prefixes, {title}")
    for column in ("idle cells", "median", "mean", "range (ms)", "to none", "pay if reused once in"):
        table.add_column(column, justify="right")
    for level, summary in levels.items():
        ratio = summary.median / levels[0].median
        pays = f"{level / (ratio - 1):,.0f} tokens" if ratio > 1 else ""
        table.add_row(f"{level:,}", *summary.milliseconds(), f"{ratio:.2f}x", pays)
    console.print(table)
    if mixed:
        ratio = mixed["ratio"]
        console.print(
            f"After {n_requests:,} mixed requests ({mixed['cells_used']:,} cells used) prefill takes "
            f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f}) as long as in a compact pool."
        )
    result = {
        "benchmark": "idle",
        "settings": {"model": title, "flags": " ".join(flags), "repeats": repeats},
        "machine": machine(),
        "beside_idle": {str(level): asdict(summary) for level, summary in levels.items()},
        "after_mixed_use": mixed,
    }
    write_json(folder / "idle.json", result)


async def _measure(
    model: Path, flags: Sequence[str], repeats: int, n_requests: int, folder: Path
) -> tuple[dict[int, Summary], dict[str, Any]]:
    n_vocab = Tokens(model).n_vocab
    # Idle prefixes stay in the pool whatever they cost.
    command = llamaslot(model, *flags, "--cache-idle-cells", "all", "--cache-ram", "0")

    @asynccontextmanager
    async def pool(name: str) -> AsyncIterator[Pool]:
        async with serving(command, log=folder / f"idle-{name}-server.log") as server:
            yield Pool(server.client, n_vocab)

    async with pool("levels") as levels:
        seconds = await beside_idle(levels, repeats)
    if not n_requests:
        return seconds, {}
    async with AsyncExitStack() as stack:
        used, compact = [await stack.enter_async_context(pool(name)) for name in ("used", "compact")]
        return seconds, await after_mixed_use(used, compact, n_requests, repeats)
