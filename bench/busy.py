"""Decode and prefill alone and beside busy processes, of llamaslot and llama-server.

The servers are started once and take turns: with as many threads as each chooses by itself, and with a fixed
number. Times are the servers' own, so a client that gets too little of the CPU makes no difference.
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
from bench.peers import build
from bench.peers.baseline import revision
from bench.report import console, machine, notes, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

OWN, PEER = "llamaslot", "llama-server"
GOALS = {2: 2.0, 8: 5.0}
"""By number of busy processes: how many times as fast as llama-server decode should be."""
PROMPT = 256
LIMIT_S = 900
"""Time after which a busy process ends by itself."""
_SPIN = f"import time; end = time.monotonic() + {LIMIT_S}\nwhile time.monotonic() < end: pass"

Rates = dict[str, list[float]]
"""Tokens per second by server."""


def run(
    *, model: Path, title: str, repeats: int, tokens: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print the table, write `busy.json` and the servers' logs. `threads` is the fixed number."""
    facts = machine()
    flags = ["-np", "1", "-c", "2048", *server_flags]
    own = llamaslot(model, *flags, "--speculate", "off")
    servers = {
        OWN: own,
        f"{OWN} -t {threads}": [*own, "-t", str(threads)],
        f"{OWN} -t 1": [*own, "-t", "1"],
        PEER: [str(build.llama_server()), "-m", str(model), *flags],
    }
    measured = asyncio.run(_measure(model, servers, folder, repeats=repeats, tokens=tokens))
    console.print(_table(measured, [*servers], title))
    settings = {"model": title, "flags": " ".join(flags), "repeats": repeats, "tokens": tokens, "busy": [*GOALS]}
    settings["commit"] = revision(Path(__file__).parents[1]) or "unknown"
    runs = [{"measured": kind, "busy": n, "rates": rates} for (kind, n), rates in measured.items()]
    write_json(folder / "busy.json", {"benchmark": "busy", "settings": settings, "machine": facts, "runs": runs})


async def _measure(
    model: Path, servers: dict[str, list[str]], folder: Path, *, repeats: int, tokens: int
) -> dict[tuple[str, int], Rates]:
    n_vocab, drawn = Tokens(model).n_vocab, np.random.default_rng(1)
    measured: dict[tuple[str, int], Rates] = {}
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for i, (name, command) in enumerate(servers.items()):
            server = await stack.enter_async_context(serving(command, log=folder / f"busy-{i}.log"))
            clients[name] = server.client
        for n_busy in (0, *GOALS):
            with _busy(n_busy):
                for repeat in range(repeats + 1):
                    # A B C C B A: slow changes of the machine's speed affect all of them alike.
                    for name, client in [*clients.items()][:: 1 if repeat % 2 else -1]:
                        prompt = drawn.integers(0, n_vocab, PROMPT).tolist()
                        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
                        answer = await client.post("/completion", **body, cache_prompt=False)
                        if not repeat:
                            continue
                        for kind, key in (("decode", "predicted"), ("prefill", "prompt")):
                            rate = float(answer["timings"][f"{key}_per_second"])
                            measured.setdefault((kind, n_busy), {}).setdefault(name, []).append(rate)
                    notes.print(f"beside {n_busy}: {repeat} of {repeats}")
    return measured


@contextmanager
def _busy(n: int) -> Iterator[None]:
    """Keep `n` CPUs busy meanwhile."""
    # In sessions of their own, as programs of other terminals: where Linux shares CPUs out by session (autogroup),
    # they would share the client's, and a server that starts one for its engine would get a larger part.
    command = [sys.executable, "-c", _SPIN]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _table(measured: dict[tuple[str, int], Rates], servers: Sequence[str], title: str) -> Table:
    result = Table(title=f"Tokens per second beside busy processes, {title}", caption="median (lowest to highest)")
    for heading in ("measured", "busy", *servers, f"{OWN} / {PEER}", "goal"):
        result.add_column(heading)
    for (kind, n_busy), rates in sorted(measured.items()):
        cells = [f"{statistics.median(rates[s]):.1f} ({min(rates[s]):.1f} to {max(rates[s]):.1f})" for s in servers]
        ratio = statistics.median(rates[OWN]) / statistics.median(rates[PEER])
        goal = f"{GOALS[n_busy]:g}" if kind == "decode" and n_busy else ""
        result.add_row(kind, str(n_busy), *cells, f"{ratio:.2f}", goal)
    return result
