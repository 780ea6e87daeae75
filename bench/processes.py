"""Cost of other clients' load for streams.

Inter-token latency of 8 streams while `/health` and `/metrics` are polled and large requests are sent, divided by
that of the same streams while the same load goes to another server of this machine, which only reads it. So what
the load itself takes from the cores does not count.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import secrets
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from rich.progress import Progress
from rich.table import Table

from bench.client import BenchmarkError, Client
from bench.decode import CONTEXT, STREAMS, streamed
from bench.report import Summary, console, machine, notes, write_json
from bench.server import free_port, llamaslot, serving
from bench.tokens import Tokens

POLLS_PER_SECOND = 100
POSTS_PER_SECOND = 2
BODY_BYTES = 2**20
LOAD_SECONDS = 600.0
"""Time after which a load ends by itself."""
_PERCENTILE = 99


def run(
    *, model: Path, title: str, pairs: int, tokens: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print the table, write `processes.json` and the servers' logs."""
    facts = machine()
    flags = ["-np", str(max(STREAMS)), "-c", str(CONTEXT), "-t", str(threads), "--metrics", *server_flags]
    with _process(_listen) as (_, port):
        measured = asyncio.run(
            _measure(model, flags, folder, f"http://127.0.0.1:{port}", pairs=pairs, tokens=tokens)
        )
    console.print(_table(measured))
    write_json(
        folder / "processes.json",
        {
            "benchmark": "processes",
            "settings": {"model": title, "flags": " ".join(flags), "pairs": pairs, "tokens": tokens},
            "machine": facts,
            "ratios": {name: asdict(Summary.of(_ratios(runs))) for name, runs in measured.items()},
            "runs": measured,
        },
    )


Runs = dict[str, list[tuple[float, float]]]
"""Pairs by what was measured, with the load here and with the load elsewhere."""


async def _measure(
    model: Path, flags: Sequence[str], folder: Path, elsewhere: str, *, pairs: int, tokens: int
) -> Runs:
    text, words = Tokens(model), random.Random(secrets.token_hex(8))
    measured: Runs = {"p99 gap": [], "p50 gap": []}
    with Progress(console=notes) as progress:
        task = progress.add_task("measuring", total=pairs)
        async with serving(llamaslot(model, *flags), log=folder / "processes.log") as own:
            await streamed(own.client, text, words, max(STREAMS), tokens)
            for pair in range(pairs):
                (p50, p99), (p50_else, p99_else) = await _in_turn(
                    pair, [own.url, elsewhere], lambda url: _gaps(own.client, text, words, tokens, url)
                )
                measured["p99 gap"].append((p99, p99_else))
                measured["p50 gap"].append((p50, p50_else))
                progress.advance(task)
    return measured


async def _in_turn(pair: int, sides: Sequence[Any], measure: Any) -> tuple[Any, Any]:
    """Measure both sides, in ABBA order; return the results in the order of the sides."""
    order = (0, 1) if pair % 2 == 0 else (1, 0)
    found = {side: await measure(sides[side]) for side in order}
    return found[0], found[1]


async def _gaps(client: Client, text: Tokens, words: random.Random, tokens: int, url: str) -> tuple[float, float]:
    """Return the median and the 99th percentile of the inter-token latency under a load on `url`, in seconds."""
    with _process(_load, url) as (load, _):
        answers = await streamed(client, text, words, max(STREAMS), tokens)
        if not load.is_alive():
            raise BenchmarkError("the load ended before the streams did")
    gaps = [gap for answer in answers for gap in answer.gaps]
    return statistics.median(gaps), float(np.percentile(gaps, _PERCENTILE))


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[tuple[multiprocessing.process.BaseProcess, int]]:
    """Run a function in a process of its own, with a free port as its last argument, as soon as it is ready."""
    context = multiprocessing.get_context("spawn")
    port, is_ready = free_port(), context.Event()
    process = context.Process(target=target, args=(*arguments, port, is_ready), daemon=True)
    process.start()
    try:
        if not is_ready.wait(60):
            raise BenchmarkError("the other process did not begin")
        yield process, port
    finally:
        process.terminate()
        process.join()


def _listen(port: int, is_ready: Any) -> None:
    """Answer every request on `port` at once."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"status": "ok"})

    async def serve() -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        is_ready.set()
        await asyncio.Event().wait()

    asyncio.run(serve())


def _load(url: str, _port: int, is_ready: Any) -> None:
    """Poll, and post large requests, which are refused because they do not fit the context."""
    message = {"role": "user", "content": "some words " * (BODY_BYTES // 11)}

    async def every(session: aiohttp.ClientSession, seconds: float, paths: Sequence[str], body: Any) -> None:
        due = perf_counter()
        end = due + LOAD_SECONDS
        turn = 0
        while due < end:
            path = paths[turn % len(paths)]
            async with session.request("GET" if body is None else "POST", path, json=body) as reply:
                await reply.read()
            is_ready.set()
            turn += 1
            due += seconds
            await asyncio.sleep(max(0.0, due - perf_counter()))

    async def run_load() -> None:
        async with aiohttp.ClientSession(url) as session:
            await asyncio.gather(
                every(session, 2 / POLLS_PER_SECOND, ["/health"], None),
                every(session, 2 / POLLS_PER_SECOND, ["/metrics"], None),
                every(session, 1 / POSTS_PER_SECOND, ["/v1/chat/completions"], {"messages": [message]}),
            )

    asyncio.run(run_load())


def _ratios(runs: Sequence[tuple[float, float]]) -> list[float]:
    return [first / second for first, second in runs]


def _table(measured: Runs) -> Table:
    result = Table("measured", "first", "second", "ratio", "range")
    for name, runs in measured.items():
        ratio = Summary.of(_ratios(runs))
        shown = [f"{1000 * x:.1f} ms" for x in map(statistics.median, zip(*runs, strict=True))]
        result.add_row(
            f"{name}: load here / elsewhere", *shown, f"{ratio.median:.3f}", f"{ratio.low:.3f}-{ratio.high:.3f}"
        )
    return result
