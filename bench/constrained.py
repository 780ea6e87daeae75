"""Decode rate of constrained replies as a fraction of that of free ones, with 8 streams over HTTP.

`text` is one long JSON string: a mask for each token, and nothing is forced. `records` is a list of objects, of
which names, quotes and choices are forced, hence computed without being sampled. All take turns on one server, so
that a change of the machine's speed affects all of them.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from bench.client import Answer, BenchmarkError, Client
from bench.report import Summary, console, machine, notes, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

STREAMS = 8
PROMPT_TOKENS = 16
CONTEXT = 8192
GOAL = 0.9
"""Of `text`."""

_RECORD = {
    "type": "object",
    "properties": {
        "first_name_of_the_customer": {"type": "string", "minLength": 4, "maxLength": 12},
        "preferred_language": {"enum": ["the English language", "the Spanish language"]},
        "number_of_orders_this_year": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["first_name_of_the_customer", "preferred_language", "number_of_orders_this_year"],
}
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "text": {"structured_outputs": {"json": {"type": "string", "minLength": 10**6}}},
    "records": {
        "structured_outputs": {
            "json": {"type": "array", "items": _RECORD, "minItems": 10**4},
            "disable_any_whitespace": True,
        }
    },
}
"""Request fields by kind; none of these replies ends before the limit of its tokens."""


def run(
    *, model: Path, title: str, repeats: int, tokens: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print the table, write `constrained.json` and the server's log."""
    facts = machine()
    flags = ["-c", str(CONTEXT), "-np", str(STREAMS), "-t", str(threads), "-fa", "on", *server_flags]
    command = llamaslot(model, *flags)
    rates = asyncio.run(_measure(command, Tokens(model), repeats, tokens, folder / "constrained-server.log"))
    console.print(table(rates))
    write_json(
        folder / "constrained.json",
        {
            "benchmark": "constrained",
            "settings": {"model": title, "flags": " ".join(flags), "repeats": repeats, "tokens": tokens},
            "machine": facts,
            "ratios": {kind: asdict(Summary.of(ratios(rates, kind))) for kind in KINDS},
            "runs": rates,
        },
    )


async def _measure(
    command: list[str], text: Tokens, repeats: int, tokens: int, log: Path
) -> dict[str, list[float]]:
    words = random.Random(secrets.token_hex(8))
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with Progress(console=notes) as progress:
        async with serving(command, log=log) as server:
            task = progress.add_task("decoding", total=repeats * len(KINDS))
            # The first constraint waits for llguidance's tokenizer.
            for kind in KINDS:
                await _rate(server.client, text, words, kind, tokens)
            for _ in range(repeats):
                for kind, measured in rates.items():
                    measured.append(await _rate(server.client, text, words, kind, tokens))
                    progress.advance(task)
    return rates


async def _rate(client: Client, text: Tokens, words: random.Random, kind: str, tokens: int) -> float:
    """Tokens per second of all streams together, from the first token of all to the last one."""
    prompts = [text.draw(words, PROMPT_TOKENS) for _ in range(STREAMS)]
    answers: list[Answer] = await asyncio.gather(
        *(
            client.chat(
                [{"role": "user", "content": prompt}],
                **{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **KINDS[kind]},
            )
            for prompt in prompts
        )
    )
    if any(answer.completion_tokens != tokens for answer in answers):
        raise BenchmarkError(f"replies of kind {kind} have {[a.completion_tokens for a in answers]} tokens")
    first = min(answer.arrivals[0] for answer in answers)
    return STREAMS * tokens / (max(answer.arrivals[-1] for answer in answers) - first)


def ratios(rates: dict[str, list[float]], kind: str) -> list[float]:
    """Return the rates of a kind divided by those of free replies just before."""
    return [rate / free for rate, free in zip(rates[kind], rates["free"], strict=True)]


def table(rates: dict[str, list[float]]) -> Table:
    """A line for each kind: median rate, and the ratio's median and range."""
    result = Table(
        title=f"Decoding with {STREAMS} streams", caption=f"ratio: to free replies; goal {GOAL:.2f} (text)"
    )
    for heading in ("reply", "tokens/s", "ratio", "range"):
        result.add_column(heading, justify="left" if heading == "reply" else "right")
    for kind, measured in rates.items():
        ratio = Summary.of(ratios(rates, kind))
        cells = f"{Summary.of(measured).median:,.0f}", f"{ratio.median:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}"
        result.add_row(kind, *cells)
    return result
