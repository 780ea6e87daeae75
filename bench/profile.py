"""Where a step's time goes: CPU microseconds for each generated token, by part, while answers stream over HTTP.

The server runs in this process, its parts wrapped in clocks that count CPU time alone, so that other load on the
machine matters little; the client has a process of its own (`python -m bench.profile PORT MODEL`). Where the model
takes as many threads as there are cores, whatever is spent beside `decode` is taken from it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from time import process_time_ns, thread_time_ns
from typing import Any

import llama_cpp
import structlog
import uvloop
from rich.table import Table

from bench.client import BenchmarkError, connected
from bench.report import console, decode_rate, machine, write_json
from bench.server import free_port
from bench.tokens import Tokens
from llamaslot.api.sse import EventStream
from llamaslot.app.composition import serve
from llamaslot.app.config import Config
from llamaslot.app.config_reader import read_config
from llamaslot.app.flags import Parser, add_flags
from llamaslot.app.logs import configure_logging
from llamaslot.backend.llama.llama_backend import LlamaBackend
from llamaslot.base.errors import ConfigError
from llamaslot.engine import model_worker
from llamaslot.engine.engine import Engine
from llamaslot.scheduler.scheduler import Scheduler
from llamaslot.service.service import Service

STREAMS = (1, 4, 8)
PROMPT_TOKENS = 16
CONTEXT = 8192
FEW = 16
"""Tokens of an answer that is subtracted, so that what a request costs once is left out."""
PARTS: dict[str, list[tuple[Any, str]]] = {
    "fill": [(LlamaBackend, "decode")],
    "decode": [(llama_cpp, "llama_decode")],
    "sample": [(LlamaBackend, "sample")],
    "follow": [(model_worker, "apply"), (model_worker, "next_decode_step")],
    "plan": [(Scheduler, "plan")],
    "commit": [(Scheduler, "commit")],
    "detokenize": [(Engine, "_deliver")],
    "pass on": [(Service, "receive")],
    "send": [(EventStream, "write_now")],
}
"""Functions that are timed, in the order of a step. `sample` chooses the tokens, `follow` prepares the next step;
`send` writes the chunk and hands it to the event loop, whose own work, the writes to sockets among it, is `turns`.
"""
ON_MODEL_THREAD = ("fill", "decode", "sample", "follow")


class Clocks:
    """CPU nanoseconds by part; what one part spends inside another counts for the inner one alone."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inner = threading.local()
        self._own = 0
        """Measured time of a function that does nothing."""
        nothing = self.around("nothing", int)
        for _ in range(2000):
            nothing()
        self._own = self.spent.pop("nothing") // 2000

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._inner, "ns", 0)
            self._inner.ns = 0
            started = thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                taken = thread_time_ns() - started
                self.spent[part] += taken - self._inner.ns - self._own
                self._inner.ns = outer + taken

        return timed

    def install(self) -> None:
        """Put a clock around every part."""
        for part, places in PARTS.items():
            for owner, name in places:
                setattr(owner, name, self.around(part, getattr(owner, name)))


@dataclass(frozen=True)
class Measurement:
    """CPU microseconds per token of so many streams."""

    streams: int
    rate: float
    """Tokens per second, which the clocks themselves and other load reduce."""
    parts: dict[str, float]


def run(*, model: Path, title: str, tokens: int, threads: int, folder: Path, server_flags: Sequence[str]) -> None:
    """Measure, print the table, write `profile.json`."""
    facts = machine()
    port = free_port()
    flags = ["-c", str(CONTEXT), "-np", str(max(STREAMS)), "-t", str(threads), "-tb", str(threads), *server_flags]
    parser = Parser(prog="--server")
    add_flags(parser)
    try:
        config = read_config(parser.parse(["-m", str(model), "--port", str(port), *flags]), {})
    except ConfigError as error:
        raise BenchmarkError(str(error)) from None
    configure_logging("auto", "error")
    clocks = Clocks()
    clocks.install()
    measured = uvloop.run(_measure(config, clocks, [str(port), str(model)], tokens))
    console.print(table(measured))
    settings = {"model": title, "flags": " ".join(flags), "tokens": tokens}
    runs = [asdict(each) for each in measured]
    write_json(
        folder / "profile.json", {"benchmark": "profile", "settings": settings, "machine": facts, "runs": runs}
    )


async def _measure(config: Config, clocks: Clocks, client: list[str], tokens: int) -> list[Measurement]:
    serving = asyncio.create_task(serve(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.profile", *client), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    to_client, from_client = process.stdin, process.stdout
    assert to_client is not None
    assert from_client is not None

    async def spent(streams: int, tokens: int) -> tuple[Counter[str], float]:
        """CPU microseconds that answers of so many tokens take, by part, and their rate."""
        before = clocks.spent.copy()
        loop = thread_time_ns()
        to_client.write(f"{streams} {tokens}\n".encode())
        line = await from_client.readline()
        client, rate = json.loads(line)
        taken = clocks.spent - before
        on_loop = sum(taken[part] for part in PARTS if part not in ON_MODEL_THREAD)
        taken["turns"] = thread_time_ns() - loop - on_loop
        taken["client"] = client
        return taken, rate

    measured = []
    await from_client.readline()
    for streams in STREAMS:
        few, _ = await spent(streams, FEW)
        many, rate = await spent(streams, FEW + tokens)
        n = streams * tokens
        parts = {part: (many[part] - few[part]) / 1e3 / n for part in (*PARTS, "turns", "client")}
        measured.append(Measurement(streams, rate, parts))
    to_client.close()
    await process.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    return measured


async def _ask(port: str, model: str) -> None:
    """The client: for each line with streams and tokens, let them stream; print its CPU time and the rate."""
    text, words = Tokens(Path(model)), random.Random(secrets.token_hex(8))
    async with connected(f"http://127.0.0.1:{port}") as client:
        while not await client.healthy():
            await asyncio.sleep(0.1)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            streams, tokens = map(int, line.split())
            prompts = [text.draw(words, PROMPT_TOKENS) for _ in range(streams)]
            started = process_time_ns()
            answers = await asyncio.gather(
                *(
                    client.chat(
                        [{"role": "user", "content": prompt}], temperature=0, max_tokens=tokens, ignore_eos=True
                    )
                    for prompt in prompts
                )
            )
            rate = decode_rate([answer.arrivals for answer in answers])
            print(json.dumps([process_time_ns() - started, rate]), flush=True)


def table(measured: Sequence[Measurement]) -> Table:
    """A line for each part."""
    result = Table(title="CPU time for each token", caption="microseconds; decode: of the first thread alone")
    result.add_column("part")
    result.add_column("on")
    for each in measured:
        result.add_column(f"{each.streams} streams", justify="right")
    for part in measured[0].parts:
        place = "client" if part == "client" else "model thread" if part in ON_MODEL_THREAD else "event loop"
        result.add_row(part, place, *(f"{each.parts[part]:,.1f}" for each in measured))
    for place, chosen in {
        "model thread beside decode": [part for part in ON_MODEL_THREAD if part != "decode"],
        "event loop": [part for part in measured[0].parts if part not in (*ON_MODEL_THREAD, "client")],
    }.items():
        result.add_row(place, "", *(f"{sum(each.parts[part] for part in chosen):,.1f}" for each in measured))
    result.add_row("tokens per second", "", *(f"{each.rate:,.0f}" for each in measured))
    return result


if __name__ == "__main__":
    # llama.cpp's lines would be among the results on standard output.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(_ask(*sys.argv[1:]))
