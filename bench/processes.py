"""Cost of other clients' load, and of viewers of the page, for streams.

Inter-token latency of 8 streams while `/health` and `/metrics` are polled and large requests are sent, divided by
that of the same streams while the same load goes to another server of this machine, which only reads it. So what
the load itself takes from the cores does not count. And that latency while 20 clients read `/events` with a tree of
2,000 prefixes, divided by the one without them; what these clients take from the cores counts.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import secrets
import selectors
import socket
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

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
VIEWERS, PREFIXES = 20, 2000
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
"""Pairs by what was measured, with the load or the viewers here, and without."""
_GAPS = ("p99 gap: load here / elsewhere", "p50 gap: load here / elsewhere")
_VIEWED = f"mean gap: {VIEWERS} viewers / none"


async def _measure(
    model: Path, flags: Sequence[str], folder: Path, elsewhere: str, *, pairs: int, tokens: int
) -> Runs:
    text, words = Tokens(model), random.Random(secrets.token_hex(8))
    measured: Runs = {name: [] for name in (*_GAPS, _VIEWED)}
    with Progress(console=notes) as progress:
        task = progress.add_task("measuring", total=2 * pairs)
        async with serving(llamaslot(model, *flags), log=folder / "processes.log") as own:
            await streamed(own.client, text, words, max(STREAMS), tokens)
            for pair in range(pairs):
                here, there = await _in_turn(
                    pair, [own.url, elsewhere], lambda url: _gaps(own.client, text, words, tokens, (_load, url))
                )
                for name, percent in zip(_GAPS, (_PERCENTILE, 50), strict=True):
                    measured[name].append(
                        (float(np.percentile(here, percent)), float(np.percentile(there, percent)))
                    )
                progress.advance(task)
            await _fill(own.url)
            for pair in range(pairs):
                viewed, alone = await _in_turn(
                    pair, [(_view, own.url), None], lambda beside: _gaps(own.client, text, words, tokens, beside)
                )
                measured[_VIEWED].append((statistics.mean(viewed), statistics.mean(alone)))
                progress.advance(task)
    return measured


async def _in_turn(pair: int, sides: Sequence[Any], measure: Any) -> tuple[Any, Any]:
    """Measure both sides, in ABBA order; return the results in the order of the sides."""
    order = (0, 1) if pair % 2 == 0 else (1, 0)
    found = {side: await measure(sides[side]) for side in order}
    return found[0], found[1]


async def _gaps(
    client: Client, text: Tokens, words: random.Random, tokens: int, beside: tuple[Any, str] | None
) -> list[float]:
    """Return the inter-token latencies in seconds while a function runs beside the streams, on a URL."""
    with _process(*beside) if beside is not None else nullcontext((None, 0)) as (other, _):
        answers = await streamed(client, text, words, max(STREAMS), tokens)
        if other is not None and not other.is_alive():
            raise BenchmarkError("what ran beside the streams ended before they did")
    return [gap for answer in answers for gap in answer.gaps]


async def _fill(url: str) -> None:
    """Give the tree `PREFIXES` prefixes, of few tokens."""
    async with aiohttp.ClientSession(url) as session:

        async def compute(i: int) -> None:
            prompt = [100 + i // 25, *range(300, 330), 1000 + i % 25, *range(500, 503)]
            async with session.post("/completion", json={"prompt": prompt, "n_predict": 0}) as reply:
                reply.raise_for_status()
                await reply.read()

        for first in range(0, PREFIXES, max(STREAMS)):
            await asyncio.gather(*map(compute, range(first, min(first + max(STREAMS), PREFIXES))))


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


def _view(url: str, _port: int, is_ready: Any) -> None:
    """Read `/events` as so many clients, as cheaply as possible: this is not what is measured."""
    address = urlsplit(url)
    with selectors.DefaultSelector() as selector:
        for _ in range(VIEWERS):
            connection = socket.create_connection((address.hostname, address.port))
            connection.sendall(f"GET /events?top={PREFIXES} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
            selector.register(connection, selectors.EVENT_READ)
        is_ready.set()
        while True:
            for key, _ in selector.select():
                if not isinstance(key.fileobj, socket.socket) or not key.fileobj.recv(2**20):
                    return


def _ratios(runs: Sequence[tuple[float, float]]) -> list[float]:
    return [first / second for first, second in runs]


def _table(measured: Runs) -> Table:
    result = Table("measured", "first", "second", "ratio", "range")
    for name, runs in measured.items():
        ratio = Summary.of(_ratios(runs))
        shown = [f"{1000 * x:.1f} ms" for x in map(statistics.median, zip(*runs, strict=True))]
        result.add_row(name, *shown, f"{ratio.median:.3f}", f"{ratio.low:.3f}-{ratio.high:.3f}")
    return result
