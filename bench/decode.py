"""How fast llamaslot decodes, as a fraction of `llama-batched-bench`, which does nothing but decode.

Both take the same file, libraries, threads, context and flags, and take turns, so that a change of the machine's
mood meets both. llamaslot is measured over HTTP, and its engine alone in a process of its own: streams of greedy
answers side by side, and the tokens that came while all of them decoded. llama-batched-bench chooses no tokens and
writes no text: 1.00 is out of reach.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from bench import peers
from bench.client import BenchmarkError, Client
from bench.report import Summary, console, decode_rate, machine, notes, write_json
from bench.server import llamaslot, serving

STREAMS = (1, 8)
PROMPT_TOKENS = 16
CONTEXT = 4096
GOAL = 0.85


@dataclass(frozen=True)
class Commands:
    """How each side is started; the first two take the number of streams as their last words."""

    peer: list[str]
    engine: list[str]
    server: list[str]


@dataclass(frozen=True)
class Pair:
    """One measurement of each side, right after each other; rates in tokens per second over all streams."""

    streams: int
    batched_bench: float
    engine: float
    llamaslot: float

    @property
    def ratio(self) -> float:
        """What llamaslot reaches of llama-batched-bench's rate."""
        return self.llamaslot / self.batched_bench


def run(
    *, model: Path, title: str, pairs: int, tokens: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print the table, write `decode.json` and the server's log."""
    facts = machine()
    common = [
        "-c",
        str(CONTEXT),
        "-t",
        str(threads),
        "-tb",
        str(threads),
        "-fa",
        "on",
        "--kv-unified",
        *server_flags,
    ]
    peer = [str(peers.batched_bench()), "-m", str(model), *common, "-npp", str(PROMPT_TOKENS), "-ntg", str(tokens)]
    flags = ["-np", str(max(STREAMS)), *common]
    engine = [sys.executable, "-m", "bench.engine", "-m", str(model), *flags, "--tokens", str(tokens), "--streams"]
    commands = Commands(peer, engine, llamaslot(model, *flags))
    log = folder / "decode-server.log"
    measured = asyncio.run(_measure(commands, pairs, tokens, log))
    console.print(table(measured))
    settings = {"model": title, "flags": " ".join(common), "pairs": pairs, "tokens": tokens}
    results = [asdict(pair) | {"ratio": pair.ratio} for pair in measured]
    write_json(
        folder / "decode.json",
        {
            "benchmark": "decode",
            "settings": settings,
            "machine": facts,
            "summary": {n: asdict(Summary.of(_ratios(measured, n))) for n in STREAMS},
            "runs": results,
        },
    )


async def _measure(commands: Commands, pairs: int, tokens: int, log: Path) -> list[Pair]:
    words = random.Random(secrets.token_hex(8))
    measured: list[Pair] = []
    with Progress(console=notes) as progress:
        async with serving(commands.server, log=log) as client:
            task = progress.add_task("decoding", total=pairs * len(STREAMS))
            await _streams_rate(client, words, max(STREAMS), tokens)
            for _ in range(pairs):
                for streams in STREAMS:
                    theirs = await asyncio.to_thread(_peer_rate, [*commands.peer, "-npl", str(streams)])
                    ours = await _streams_rate(client, words, streams, tokens)
                    alone = await asyncio.to_thread(_engine_rate, [*commands.engine, str(streams)])
                    measured.append(Pair(streams=streams, batched_bench=theirs, engine=alone, llamaslot=ours))
                    progress.advance(task)
    return measured


def _peer_rate(command: Sequence[str]) -> float:
    done = subprocess.run([*command, "--output-format", "jsonl"], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(lines) != 1:
        raise BenchmarkError(f"llama-batched-bench failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return float(json.loads(lines[0])["speed_tg"])


def _engine_rate(command: Sequence[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"the engine alone failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return float(done.stdout)


async def _streams_rate(client: Client, words: random.Random, streams: int, tokens: int) -> float:
    prompts = [await client.draw_text(words, PROMPT_TOKENS) for _ in range(streams)]
    answers = await asyncio.gather(
        *(
            client.chat([{"role": "user", "content": prompt}], temperature=0, max_tokens=tokens, ignore_eos=True)
            for prompt in prompts
        )
    )
    for answer in answers:
        if not len(answer.arrivals) == answer.completion_tokens == tokens:
            raise BenchmarkError(
                f"an answer of {answer.completion_tokens} tokens came in {len(answer.arrivals)} chunks, not "
                f"{tokens} in as many: measure a model whose tokens are whole characters, such as --model 60m"
            )
    return decode_rate([answer.arrivals for answer in answers])


def table(pairs: Sequence[Pair]) -> Table:
    """A line for each number of streams: median rates, and the ratio's median and range over the pairs."""
    result = Table(title="Decoding, tokens per second", caption=f"ratio: median of the pairs; goal {GOAL:.2f}")
    for heading in (
        "streams",
        "llama-batched-bench",
        "engine alone",
        "ratio",
        "range",
        "over HTTP",
        "ratio",
        "range",
    ):
        result.add_column(heading, justify="right")
    for streams in STREAMS:
        chosen = [pair for pair in pairs if pair.streams == streams]
        theirs = Summary.of([pair.batched_bench for pair in chosen])
        cells = [str(streams), f"{theirs.median:,.0f}"]
        for rates in ([pair.engine for pair in chosen], [pair.llamaslot for pair in chosen]):
            ratio = Summary.of([rate / pair.batched_bench for rate, pair in zip(rates, chosen, strict=True)])
            cells += f"{Summary.of(rates).median:,.0f}", f"{ratio.median:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}"
        result.add_row(*cells)
    return result


def _ratios(pairs: Sequence[Pair], streams: int) -> list[float]:
    return [pair.ratio for pair in pairs if pair.streams == streams]
