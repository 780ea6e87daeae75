"""The next turn of a conversation whose model had made room for another one, on a server with room for one.

Each pair is a conversation of its own: a first turn, computed; a request for the other model; and the next turn,
for which the model is loaded again. What unloading and loading took is in the server's log, and is taken off:
what is left is compared with the first turn. The models are two files of the same shape.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.client import BenchmarkError
from bench.report import Summary, console, machine, notes, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

N_PROMPT = 4000
N_REPLY, N_QUESTION = 32, 50
GOAL = 0.1
"""Most that the next turn may take without the loading, as a fraction of the first."""
_SETTINGS = {"temperature": 0, "ignore_eos": True, "cache_prompt": True}


def run(*, model: Path, title: str, repeats: int, folder: Path, server_flags: Sequence[str]) -> None:
    """Measure, print and write the pairs."""
    flags = ["-c", str(2 * (N_PROMPT + 1000)), "-np", "2", "-fa", "on", "--models-max", "1", *server_flags]
    pairs = asyncio.run(_measure(model, flags, repeats, folder))
    rows = {name: Summary.of([pair[name] for pair in pairs]) for name in pairs[0]}
    table = Table(title=f"Next turn after {N_PROMPT:,} tokens, with the model swapped out between, {title}")
    for column in ("", "median", "mean", "range (ms)"):
        table.add_column(column, justify="right")
    for name, text in (
        ("cold", "first turn, computed"),
        ("total", "next turn, in all"),
        ("swap", "of that, unloading and loading"),
        ("warm", "next turn without these"),
    ):
        table.add_row(text, *rows[name].milliseconds())
    console.print(table)
    ratio = rows["ratio"].median
    verdict = "reached" if ratio <= GOAL else "missed"
    console.print(f"Without the loading, the next turn takes {ratio:.2f}x of the first (goal {GOAL}: {verdict}).")
    console.print(f"Prompt tokens reused: {rows['reused'].median:.1%}.")
    result = {
        "benchmark": "swap",
        "settings": {"model": title, "flags": " ".join(flags), "repeats": repeats},
        "machine": machine(),
        "pairs": pairs,
        "summaries": {name: asdict(summary) for name, summary in rows.items()},
    }
    write_json(folder / "swap.json", result)


async def _measure(model: Path, flags: Sequence[str], repeats: int, folder: Path) -> list[dict[str, float]]:
    tokens, chance, log = Tokens(model), np.random.default_rng(1), folder / "swap-server.log"
    with _two_of(model, folder) as models:
        command = llamaslot(None, "--models-dir", models, *flags, "--log-format", "json")
        async with serving(command, log=log, needs_costs=False) as server:
            # Costs are measured while a model is idle, and none is idle for long later.
            for name in ("a", "b"):
                n_before = log.stat().st_size
                await server.client.complete([1], model=name, n_predict=1, **_SETTINGS)
                await server.measured(n_before)
            pairs = []
            for i in range(1, repeats + 1):
                await server.client.complete([1], model="a", n_predict=1, **_SETTINGS)
                prompt = chance.integers(0, tokens.n_vocab, N_PROMPT).tolist()
                question = chance.integers(0, tokens.n_vocab, N_QUESTION).tolist()
                first = await server.client.complete(prompt, model="a", n_predict=N_REPLY, **_SETTINGS)
                await server.client.complete([1, 2, 3], model="b", n_predict=1, **_SETTINGS)
                n_before = log.stat().st_size
                prompt += [*first.tokens, *question]
                turn = await server.client.complete(prompt, model="a", n_predict=1, **_SETTINGS)
                swap = _swapped_s(log, n_before)
                pairs.append(
                    {
                        "cold": first.ttft,
                        "total": turn.ttft,
                        "swap": swap,
                        "warm": turn.ttft - swap,
                        "ratio": (turn.ttft - swap) / first.ttft,
                        "reused": 1 - turn.computed / len(prompt),
                    }
                )
                notes.print(f"swap: {i} of {repeats}, {pairs[-1]['ratio']:.2f}x")
            return pairs


@contextmanager
def _two_of(model: Path, folder: Path) -> Iterator[str]:
    """A folder in which a model has two names."""
    with tempfile.TemporaryDirectory(dir=folder) as models:
        for name in ("a", "b"):
            (Path(models) / f"{name}.gguf").symlink_to(model.resolve())
        yield models


def _swapped_s(log: Path, n_before: int) -> float:
    """Return what the log says that unloading and loading took, in its lines after so many bytes."""
    lines = log.read_bytes()[n_before:].decode().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
    seconds = [each["seconds"] for each in events if each["event"] in ("model.unloaded", "model.loaded")]
    if len(seconds) != 2:
        raise BenchmarkError(f"the log has {len(seconds)} lines about unloading and loading, and not two")
    return float(sum(seconds))
