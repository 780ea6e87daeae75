"""Decode and prefill alone and beside busy processes, by how long idle threads of OpenMP spin (`GOMP_SPINCOUNT`).

Three servers take turns, with libgomp's own spin count, with llamaslot's, and with passive waiting: alone, and
beside processes that use a CPU each. Times are the server's own. Only where llama.cpp is built with libgomp, as on
Linux.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import numpy as np
from rich.table import Table

from bench.client import Client
from bench.report import console, machine, notes, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

SIDES = {
    "300,000 (libgomp's)": "GOMP_SPINCOUNT=300000",
    "30,000 (llamaslot's)": "GOMP_SPINCOUNT=30000",
    "0 (passive)": "OMP_WAIT_POLICY=passive",
}
PROMPT = 512
LIMIT_S = 600
"""Time after which a busy process ends by itself."""
_SPIN = f"import time; end = time.monotonic() + {LIMIT_S}\nwhile time.monotonic() < end: pass"

Rates = dict[str, list[float]]
"""Tokens per second by side."""


def run(
    *,
    model: Path,
    title: str,
    repeats: int,
    tokens: int,
    threads: int,
    n_busy: int,
    folder: Path,
    server_flags: Sequence[str],
) -> None:
    """Measure, print the table, write `busy.json` and the servers' logs."""
    facts = machine()
    flags = ["-np", "1", "-c", "2048", "-t", str(threads), *server_flags]
    measured = asyncio.run(_measure(model, flags, folder, repeats=repeats, tokens=tokens, n_busy=n_busy))
    console.print(_table(measured, title))
    settings = {"model": title, "flags": " ".join(flags), "repeats": repeats, "tokens": tokens, "busy": n_busy}
    write_json(
        folder / "busy.json", {"benchmark": "busy", "settings": settings, "machine": facts, "runs": measured}
    )


async def _measure(
    model: Path, flags: Sequence[str], folder: Path, *, repeats: int, tokens: int, n_busy: int
) -> dict[str, Rates]:
    n_vocab, drawn = Tokens(model).n_vocab, np.random.default_rng(1)
    measured: dict[str, Rates] = {}
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for i, (side, variable) in enumerate(SIDES.items()):
            command = ["env", variable, *llamaslot(model, *flags)]
            server = await stack.enter_async_context(serving(command, log=folder / f"busy-{i}.log"))
            clients[side] = server.client
        for beside in (0, n_busy):
            with _busy(beside):
                for repeat in range(repeats + 1):
                    # A B C C B A: slow changes of the machine's speed affect all of them alike.
                    for side, client in [*clients.items()][:: 1 if repeat % 2 else -1]:
                        prompt = drawn.integers(0, n_vocab, PROMPT).tolist()
                        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
                        answer = await client.post("/completion", **body, cache_prompt=False)
                        if not repeat:
                            continue
                        for kind in ("prompt", "predicted"):
                            name = f"{'prefill' if kind == 'prompt' else 'decode'} beside {beside} busy processes"
                            rate = float(answer["timings"][f"{kind}_per_second"])
                            measured.setdefault(name, {}).setdefault(side, []).append(rate)
                    notes.print(f"beside {beside}: {repeat} of {repeats}")
    return measured


@contextmanager
def _busy(n: int) -> Iterator[None]:
    """Keep `n` CPUs busy meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _table(measured: dict[str, Rates], title: str) -> Table:
    result = Table(title=f"Tokens per second by GOMP_SPINCOUNT, {title}", caption="median (lowest to highest)")
    for heading in ("measured", *SIDES):
        result.add_column(heading)
    for name, rates in measured.items():
        cells = [
            f"{statistics.median(r):.1f} ({min(r):.1f} to {max(r):.1f})" for r in map(rates.__getitem__, SIDES)
        ]
        result.add_row(name, *cells)
    return result
