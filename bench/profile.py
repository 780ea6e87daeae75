"""Where a step's time goes: CPU microseconds for each generated token, by part, while answers stream over HTTP.

The server runs as for a user, and `bench/clocks.py` counts the CPU time of its parts, so that other load on the
machine matters little. Where the model takes as many threads as there are cores, whatever is spent beside `decode`
is taken from it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time_ns
from typing import Any

from rich.table import Table

from bench import clocks
from bench.client import BenchmarkError, Client
from bench.clocks import ENGINE, PARTS, SERVER, WAIT
from bench.report import console, decode_rate, machine, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

STREAMS = (1, 8, 32)
PROMPT_TOKENS = 16
CONTEXT = 16384
FEW = 16
"""Tokens of an answer that is subtracted, so that what a request costs once is left out."""
_ON_MODEL_THREAD = ("fill", "decode", "sample", "follow")
_LOOKS, _LOOK_S = 1000, 0.01
"""Looks for the counts that a process was told to write, and the time before each."""
PLACES = dict.fromkeys(PARTS[ENGINE], "engine's loop") | dict.fromkeys(PARTS[SERVER], "parent's loop")
PLACES |= dict.fromkeys(_ON_MODEL_THREAD, "model thread")
PLACES |= {WAIT: "between its steps"}
PLACES |= {"engine's turns": "engine's loop", "parent's turns": "parent's loop", "client": "client"}
"""Where each part runs. `turns` is what an event loop does beside the parts, such as messages between the processes
and writes to sockets. `wait` is time of the clock, not of a CPU: how long the model thread did not run between two
steps, because it waited for a plan, the GIL or a CPU.
"""


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
    flags = ["-c", str(CONTEXT), "-np", str(max(STREAMS)), "-t", str(threads), "-tb", str(threads), *server_flags]
    folder.mkdir(parents=True, exist_ok=True)
    measured = asyncio.run(measure(model, flags, tokens, folder / "profile.log"))
    console.print(table(measured))
    settings = {"model": title, "flags": " ".join(flags), "tokens": tokens}
    runs = [asdict(each) for each in measured]
    write_json(
        folder / "profile.json", {"benchmark": "profile", "settings": settings, "machine": facts, "runs": runs}
    )


async def measure(
    model: Path, flags: Sequence[str], tokens: int, log: Path, streams: Sequence[int] = STREAMS
) -> list[Measurement]:
    """Measure answers of so many tokens in so many streams at once."""
    text, words = Tokens(model), random.Random(secrets.token_hex(8))
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        command = ["env", *clocks.environment(Path(folder)), *llamaslot(model, *flags, "--speculate", "off")]
        async with serving(command, log=log) as server:
            # What only the first requests take is not of interest.
            await _spent(server.client, Path(folder), [text.draw(words, PROMPT_TOKENS)] * max(streams), FEW)
            for n in streams:
                prompts = [text.draw(words, PROMPT_TOKENS) for _ in range(2 * n)]
                few, _ = await _spent(server.client, Path(folder), prompts[:n], FEW)
                many, arrivals = await _spent(server.client, Path(folder), prompts[n:], FEW + tokens)
                parts = {part: (many[part] - few[part]) / 1e3 / (n * tokens) for part in PLACES}
                measured.append(Measurement(n, decode_rate(arrivals), parts))
    return measured


async def _spent(
    client: Client, folder: Path, prompts: Sequence[str], tokens: int
) -> tuple[Counter[str], list[list[float]]]:
    """Return the CPU nanoseconds that answers of so many tokens take, by part, and when their tokens arrived."""
    before, own = await _counts(folder), process_time_ns()
    answers = await asyncio.gather(
        *(
            client.chat([{"role": "user", "content": prompt}], temperature=0, max_tokens=tokens, ignore_eos=True)
            for prompt in prompts
        )
    )
    own = process_time_ns() - own
    # The processes may still be at the end of the last answer.
    await asyncio.sleep(0.1)
    taken = await _counts(folder)
    taken.subtract(before)
    taken["client"] = own
    return taken, [answer.arrivals for answer in answers]


async def _counts(folder: Path) -> Counter[str]:
    """Return the CPU nanoseconds that both processes have spent, by part."""
    result: Counter[str] = Counter()
    for process, name in ((ENGINE, "engine's turns"), (SERVER, "parent's turns")):
        counts = await _written(clocks.counts_file(folder, process))
        result.update(counts["spent"])
        on_loop = sum(n for part, n in counts["spent"].items() if part not in (*_ON_MODEL_THREAD, WAIT))
        result[name] = counts["loop"] - on_loop
    return result


async def _written(file: Path) -> dict[str, Any]:
    """Have a process write its counts, and return them."""
    before = _read(file)
    os.kill(before["pid"], signal.SIGUSR2)
    for _ in range(_LOOKS):
        await asyncio.sleep(_LOOK_S)
        counts = _read(file)
        if counts["n"] > before["n"]:
            return counts
    raise BenchmarkError(f"process {before['pid']} did not write {file.name} in time")


def _read(file: Path) -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(file.read_text())
    return counts


def table(measured: Sequence[Measurement]) -> Table:
    """Return a line for each part."""
    result = Table(title="CPU time for each token", caption="microseconds; decode: of the first thread alone")
    result.add_column("part")
    result.add_column("on")
    for each in measured:
        result.add_column(f"{each.streams} streams", justify="right")
    for part, place in PLACES.items():
        result.add_row(part, place, *(f"{each.parts[part]:,.1f}" for each in measured))
    for place, title in (
        ("model thread", "model thread beside decode"),
        ("engine's loop", "engine's loop"),
        ("parent's loop", "parent's loop"),
    ):
        chosen = [part for part in PLACES if PLACES[part] == place and part != "decode"]
        result.add_row(title, "", *(f"{sum(each.parts[part] for part in chosen):,.1f}" for each in measured))
    result.add_row("tokens per second", "", *(f"{each.rate:,.0f}" for each in measured))
    return result
