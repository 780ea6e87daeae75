"""What it costs to switch between LoRA adapters: eight streams, of which half have one adapter and half another.

llama.cpp applies adapters to whole steps, so streams with different ones never share a step. Eight with two
adapters take at least as long as four with the first, and then four with the second. What they take beyond that is
the cost of switching.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from rich.table import Table

from bench.client import BenchmarkError, Client
from bench.lora_files import write_adapter
from bench.report import Summary, console, machine, notes, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

STREAMS = 8
PROMPT_TOKENS = 16
CONTEXT = 8192
GOAL = 1.05
"""Most that both adapters at once may take, as a fraction of one after the other."""
ROWS = {
    "one, 8 streams": "all streams with the same adapter",
    "two, one after the other": "four streams with the first, then four with the second",
    "two at once": "four streams with each, at the same time",
    "ratio": "two at once / one after the other",
}


def run(
    *, model: Path, title: str, repeats: int, tokens: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print the table, write `adapters.json` and the server's log."""
    facts = machine()
    flags = ["-c", str(CONTEXT), "-np", str(STREAMS), "-t", str(threads), "-fa", "on", *server_flags]
    with TemporaryDirectory() as temporary:
        files = [write_adapter(Path(temporary) / f"{i}.gguf", model, seed=i) for i in (1, 2)]
        command = llamaslot(model, "--lora", ",".join(map(str, files)), *flags)
        seconds = asyncio.run(_measure(command, Tokens(model), repeats, tokens, folder / "adapters-server.log"))
    rows = {name: Summary.of(values) for name, values in seconds.items()}
    console.print(table(rows))
    result = {
        "benchmark": "adapters",
        "settings": {"model": title, "flags": " ".join(flags), "repeats": repeats, "tokens": tokens},
        "machine": facts,
        "summaries": {name: asdict(row) for name, row in rows.items()},
        "runs": seconds,
    }
    write_json(folder / "adapters.json", result)


async def _measure(
    command: list[str], text: Tokens, repeats: int, tokens: int, log: Path
) -> dict[str, list[float]]:
    chance = np.random.default_rng(1)
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    async with serving(command, log=log) as server:

        async def seconds(*adapters: int) -> float:
            """Return how long streams with these adapters take, all at once."""
            prompts = chance.integers(0, text.n_vocab, (len(adapters), PROMPT_TOKENS)).tolist()
            return await _seconds(server.client, prompts, adapters, tokens)

        half = STREAMS // 2
        await seconds(*[0, 1] * half)
        for i in range(repeats):
            one = await seconds(*[0] * STREAMS)
            in_turn = await seconds(*[0] * half) + await seconds(*[1] * half)
            both = await seconds(*[0, 1] * half)
            for name, value in zip(ROWS, (one, in_turn, both, both / in_turn), strict=True):
                found[name].append(value)
            notes.print(f"adapters: {i + 1} of {repeats}, {both / in_turn:.2f}x")
    return found


async def _seconds(client: Client, prompts: Sequence[list[int]], adapters: Sequence[int], tokens: int) -> float:
    """Return how long replies to all prompts take, each with the adapter of its number."""
    fields: dict[str, Any] = {"n_predict": tokens, "temperature": 0, "ignore_eos": True, "speculate": False}
    started = perf_counter()
    replies = await asyncio.gather(
        *(
            client.complete(
                prompt, lora=[{"id": each, "scale": float(each == chosen)} for each in (0, 1)], **fields
            )
            for prompt, chosen in zip(prompts, adapters, strict=True)
        )
    )
    seconds = perf_counter() - started
    if any(len(reply.tokens) != tokens for reply in replies):
        raise BenchmarkError(f"replies have {[len(reply.tokens) for reply in replies]} tokens, not {tokens}")
    return seconds


def table(rows: dict[str, Summary]) -> Table:
    """Seconds for each way, and the ratio."""
    result = Table(title=f"{STREAMS} streams with LoRA adapters", caption=f"goal: ratio at most {GOAL:.2f}")
    for heading in ("adapters", "", "median", "range"):
        result.add_column(heading, justify="left" if heading in ("adapters", "") else "right")
    for name, row in rows.items():
        unit = "" if name == "ratio" else " s"
        result.add_row(name, ROWS[name], f"{row.median:.2f}{unit}", f"{row.low:.2f}-{row.high:.2f}")
    return result
