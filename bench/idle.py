"""What idle prefixes cost: prefill beside them, whether their cells stay low as they come and go, and holes.

Attention scans the pool up to the highest used cell, so prompts are computed the slower the more idle prefixes lie
below. Both questions are asked of the real engine, by the time that a prompt of `PROMPT` fresh tokens takes. Idle
tokens that are reused need not be computed again: the last column says in how many fresh ones that has to happen
for keeping them to cost nothing. What holes between them cost is in `bench.holes`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench import holes
from bench.client import BenchmarkError
from bench.report import Summary, console, machine, notes, write_json
from llamaslot.app.config_reader import read_config
from llamaslot.app.flags import Parser, add_flags
from llamaslot.app.server import llama_settings
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.commands import Sampling, Submit, TokensPart
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import TERMINAL, Event, Finished
from llamaslot.engine.engine import Engine
from llamaslot.engine.worker import model_thread
from llamaslot.kvcache.shared import SharedLedger

PROMPT = 512
LONGEST = 2048
"""Tokens of an idle prefix at most: each takes a sequence id."""
LEVELS = (0, 2048, 4096, 8192, 16384)
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


class Asking:
    """An engine on a pool of its own, asked one request at a time."""

    def __init__(self, settings: LlamaSettings) -> None:
        self._thread = model_thread()
        self._backend = self._thread.submit(LlamaBackend, settings).result()
        self._engine = Engine(self._backend, self._receive, thread=self._thread)
        self._ends: dict[str, asyncio.Future[Event]] = {}
        self._random = np.random.default_rng(1)
        self._loop = asyncio.create_task(self._engine.run())
        self.n_asked = 0

    async def ask(self, prompt: tuple[int, ...], *, max_tokens: int = 1, cache_prompt: bool = True) -> Finished:
        """Run a request to its end."""
        self.n_asked += 1
        name = str(self.n_asked)
        end = self._ends[name] = asyncio.get_running_loop().create_future()
        submit = Submit(
            name, (TokensPart(prompt),), sampling=GREEDY, max_tokens=max_tokens, cache_prompt=cache_prompt
        )
        self._engine.send(submit)
        event = await end
        if not isinstance(event, Finished):
            raise BenchmarkError(f"a request did not come to its end: {event}")
        return event

    def fresh(self, n: int) -> tuple[int, ...]:
        """Tokens that nothing else shares."""
        return tuple(self._random.integers(0, self._backend.info.n_vocab, n).tolist())

    async def prefill(self) -> float:
        """Seconds that a fresh prompt takes, which leaves nothing behind."""
        end = await self.ask(self.fresh(PROMPT), cache_prompt=False)
        return end.progress.prompt_ms / 1e3

    async def fill(self, n_cells: int) -> None:
        """Compute fresh idle prefixes until so many cells are in use."""
        while (missing := n_cells - self.n_used) > 0:
            await self.ask(self.fresh(min(missing, LONGEST)))

    @property
    def n_used(self) -> int:
        """Cells in use."""
        return self._engine.scheduler.ledger.n_used

    @property
    def high_water(self) -> int:
        """The highest of them + 1."""
        ledger = self._engine.scheduler.ledger
        assert isinstance(ledger, SharedLedger)
        return ledger.cells.high_water

    async def close(self) -> None:
        """End the engine and free the model."""
        self._engine.stop()
        await self._loop
        self._backend.close()

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TERMINAL):
                self._ends[event.request_id].set_result(event)


async def beside_idle(settings: LlamaSettings, repeats: int) -> dict[int, Summary]:
    """Seconds of prefill by idle cells."""
    asking = Asking(settings)
    await asking.prefill()
    seconds = {}
    for level in LEVELS:
        if level > settings.n_ctx - PROMPT:
            break
        await asking.fill(level)
        seconds[level] = Summary.of([await asking.prefill() for _ in range(repeats)])
        notes.print(f"idle: {level:,} cells, {1e3 * seconds[level].median:,.0f} ms")
    await asking.close()
    return seconds


async def after_mixed_use(settings: LlamaSettings, n_requests: int, repeats: int) -> dict[str, Any]:
    """Seconds of prefill in a pool after many requests, and in one filled as far from the bottom up."""
    used = Asking(settings)
    chance = random.Random(1)
    heads = [used.fresh(n) for n in (40, 200, 400)]
    talks: list[tuple[int, ...]] = []
    for _ in range(n_requests):
        goes_on = talks and chance.random() < 0.5
        talk = talks.pop(chance.randrange(len(talks))) if goes_on else chance.choice(heads)
        talk += used.fresh(chance.randint(5, 300))
        await used.ask(talk, max_tokens=chance.randint(1, 20))
        if len(talk) < 1500:
            talks = [*talks, talk][-40:]
    compact = Asking(settings)
    await compact.fill(used.n_used)
    times: dict[str, list[float]] = {"used": [], "compact": []}
    for _ in range(repeats):
        times["used"].append(await used.prefill())
        times["compact"].append(await compact.prefill())
    ratios = [a / b for a, b in zip(times["used"], times["compact"], strict=True)]
    result = {
        "requests": n_requests,
        "cells_used": used.n_used,
        "high_water": {"used": used.high_water, "compact": compact.high_water},
        "seconds": {name: asdict(Summary.of(values)) for name, values in times.items()},
        "ratio": asdict(Summary.of(ratios)),
    }
    await used.close()
    await compact.close()
    return result


def run(
    *, model: Path, title: str, repeats: int, n_requests: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print and write all three; prefixes stay idle whatever they cost."""
    parser = Parser(prog="--server")
    add_flags(parser)
    flags = ["-c", str(LEVELS[-1] + 2048), "-np", "4", "-fa", "on", *server_flags, "--cache-idle-cells", "all"]
    try:
        settings = llama_settings(read_config(parser.parse(["-m", str(model), *flags]), {}), model)
    except ConfigError as error:
        raise BenchmarkError(str(error)) from None
    settings = replace(settings, measure_costs=False)
    levels = asyncio.run(beside_idle(settings, repeats))
    mixed = asyncio.run(after_mixed_use(settings, n_requests, repeats)) if n_requests else {}
    scattered = holes.among_holes(settings, repeats)
    table = Table(title=f"Prefill of {PROMPT} tokens beside idle prefixes, {title}")
    for column in ("idle cells", "median", "mean", "range (ms)", "to none", "pay if reused once in"):
        table.add_column(column, justify="right")
    for level, summary in levels.items():
        ratio = summary.median / levels[0].median
        pays = f"{level / (ratio - 1):,.0f} tokens" if ratio > 1 else ""
        table.add_row(f"{level:,}", *summary.milliseconds(), f"{ratio:.2f}x", pays)
    console.print(table)
    if mixed:
        ratio, used, mark = mixed["ratio"], mixed["cells_used"], mixed["high_water"]["used"]
        console.print(
            f"After {n_requests:,} mixed requests ({used:,} cells used, the highest {mark:,}) prefill takes "
            f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f}) what it takes in a compact pool."
        )
    console.print(holes.line(scattered))
    result = {
        "machine": machine(),
        "model": title,
        "beside_idle": {str(level): asdict(summary) for level, summary in levels.items()},
        "after_mixed_use": mixed,
        "among_holes": scattered,
    }
    write_json(folder / "idle.json", result)
