"""The decode rate of llamaslot as a fraction of that of `llama-batched-bench`, which only decodes.

Both take the same file, libraries, threads, context and flags, and take turns, so that a change of the machine's
speed affects both. llamaslot is measured over HTTP, and its engine alone in a process of its own: streams of greedy
answers side by side, and the tokens that came while all of them decoded. llama-batched-bench samples no tokens and
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
from typing import Any

from rich.progress import Progress
from rich.table import Table

from bench.client import Answer, BenchmarkError, Client
from bench.peers import build
from bench.report import Summary, console, decode_rate, machine, notes, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

STREAMS = (1, 8)
PROMPT_TOKENS = 16
CONTEXT = 4096
GOAL = 0.97


@dataclass(frozen=True)
class Commands:
    """The commands of each side; `peer` and `engine` take the number of streams as their last argument."""

    flags: list[str]
    """Flags of all sides."""
    peer: list[str]
    engine: list[str]
    server: list[str]

    @classmethod
    def of(cls, model: Path, *, tokens: int, threads: int, more: Sequence[str]) -> Commands:
        """The same file, threads and context for all, and `tokens` of each stream."""
        flags = ["-c", str(CONTEXT), "-t", str(threads), "-tb", str(threads), "-fa", "on", "--kv-unified", *more]
        lengths = ["-npp", str(PROMPT_TOKENS), "-ntg", str(tokens), "-npl"]
        own = ["-np", str(max(STREAMS)), *flags]
        engine = [sys.executable, "-m", "bench.engine", "-m", str(model), *own, "--tokens", str(tokens)]
        return cls(
            flags,
            peer=[str(build.batched_bench()), "-m", str(model), *flags, *lengths],
            engine=[*engine, "--prompt-tokens", str(PROMPT_TOKENS), "--streams"],
            server=llamaslot(model, *own, "--speculate", "off"),
        )

    def peer_rate(self, streams: int) -> float:
        """Tokens per second of llama-batched-bench."""
        return batched_bench_rate([*self.peer, str(streams)])

    def engine_rate(self, streams: int) -> float:
        """Tokens per second of the engine alone."""
        return engine_rate([*self.engine, str(streams)])


@dataclass(frozen=True)
class Comparison:
    """One measurement of each side, right after each other; rates in tokens per second over all streams."""

    streams: int
    batched_bench: float
    engine: float
    http: float

    @property
    def engine_ratio(self) -> float:
        """The engine's rate divided by that of llama-batched-bench."""
        return self.engine / self.batched_bench

    @property
    def http_ratio(self) -> float:
        """The rate over HTTP divided by that of llama-batched-bench."""
        return self.http / self.batched_bench


def run(
    *, model: Path, title: str, pairs: int, tokens: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print the table, write `decode.json` and the server's log."""
    facts = machine()
    commands = Commands.of(model, tokens=tokens, threads=threads, more=server_flags)
    log = folder / "decode-server.log"
    measured = asyncio.run(_measure(commands, Tokens(model), pairs, tokens, log))
    console.print(table(measured))
    settings = {"model": title, "flags": " ".join(commands.flags), "pairs": pairs, "tokens": tokens}
    write_json(
        folder / "decode.json",
        {
            "benchmark": "decode",
            "settings": settings,
            "machine": facts,
            "ratios": {
                n: {side: asdict(Summary.of(ratios)) for side, (_, ratios) in _sides(measured, n).items()}
                for n in STREAMS
            },
            "runs": [asdict(each) for each in measured],
        },
    )


async def _measure(commands: Commands, text: Tokens, pairs: int, tokens: int, log: Path) -> list[Comparison]:
    words = random.Random(secrets.token_hex(8))
    measured: list[Comparison] = []
    with Progress(console=notes) as progress:
        async with serving(commands.server, log=log) as server:
            client = server.client
            task = progress.add_task("decoding", total=pairs * len(STREAMS))
            await _streams_rate(client, text, words, max(STREAMS), tokens)
            for _ in range(pairs):
                for streams in STREAMS:
                    peer = await asyncio.to_thread(commands.peer_rate, streams)
                    http = await _streams_rate(client, text, words, streams, tokens)
                    engine = await asyncio.to_thread(commands.engine_rate, streams)
                    measured.append(Comparison(streams=streams, batched_bench=peer, engine=engine, http=http))
                    progress.advance(task)
    return measured


def batched_bench_rate(command: Sequence[str]) -> float:
    """The decode rate that llama-batched-bench prints; raises `BenchmarkError` with its output if it fails."""
    return float(batched_bench_figures(command)["speed_tg"])


def batched_bench_figures(command: Sequence[str]) -> dict[str, Any]:
    """The figures that llama-batched-bench prints; raises `BenchmarkError` with its output if it fails."""
    [figures] = batched_bench_runs(command, 1)
    return figures


def batched_bench_runs(command: Sequence[str], n: int) -> list[dict[str, Any]]:
    """The figures of `n` runs in one process, in the order of `-npl`."""
    done = subprocess.run([*command, "--output-format", "jsonl"], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(lines) != n:
        raise BenchmarkError(f"llama-batched-bench failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in lines]


def engine_rate(command: Sequence[str]) -> float:
    """The rate that `bench.engine` prints; raises `BenchmarkError` with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"the engine alone failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


async def _streams_rate(client: Client, text: Tokens, words: random.Random, streams: int, tokens: int) -> float:
    answers = await streamed(client, text, words, streams, tokens)
    return decode_rate([answer.arrivals for answer in answers])


async def streamed(client: Client, text: Tokens, words: random.Random, streams: int, tokens: int) -> list[Answer]:
    """Stream greedy answers of `tokens` tokens side by side, each token a chunk of its own."""
    prompts = [text.draw(words, PROMPT_TOKENS) for _ in range(streams)]
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
    return answers


def table(measured: Sequence[Comparison]) -> Table:
    """A line for each number of streams: median rates, and the ratios' medians and ranges."""
    result = Table(title="Decoding, tokens per second", caption=f"ratio: median of neighbours; goal {GOAL:.2f}")
    for heading in (
        "streams",
        "llama-batched-bench",
        *("engine alone", "ratio", "range"),
        *("HTTP", "ratio", "range"),
    ):
        result.add_column(heading, justify="right")
    for streams in STREAMS:
        peer = Summary.of([each.batched_bench for each in measured if each.streams == streams])
        cells = [str(streams), f"{peer.median:,.0f}"]
        for rates, ratios in _sides(measured, streams).values():
            ratio = Summary.of(ratios)
            cells += f"{Summary.of(rates).median:,.0f}", f"{ratio.median:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}"
        result.add_row(*cells)
    return result


def _sides(measured: Sequence[Comparison], streams: int) -> dict[str, tuple[list[float], list[float]]]:
    """The rates and ratios of the engine and over HTTP for a number of streams."""
    chosen = [each for each in measured if each.streams == streams]
    return {
        "engine": ([each.engine for each in chosen], [each.engine_ratio for each in chosen]),
        "http": ([each.http for each in chosen], [each.http_ratio for each in chosen]),
    }
