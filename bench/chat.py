"""A chat of four turns, each request extending the last one, with the prompt cache and without.

Two conversations: one begins with a system prompt of 1,000 tokens, one has none. Each turn adds 40 user tokens
and an answer of exactly 60. Conversations with and without the cache alternate on one server with one slot, so that
both meet the same conditions; each has words of its own from its first message on, so nothing carries over.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.progress import Progress
from rich.table import Table

from bench.client import Answer, BenchmarkError, Client, Message
from bench.report import Summary, console, machine, notes, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

TURNS, USER_TOKENS, ANSWER_TOKENS = 4, 40, 60
SYSTEM_TOKENS = {"with a system prompt of 1,000 tokens": 1000, "without a system prompt": 0}
CONTEXT = 4096


@dataclass(frozen=True)
class Turn:
    """One measured request; times in seconds."""

    conversation: str
    cached: bool
    repeat: int
    number: int
    """From 1."""
    ttft: float
    total: float
    prompt_tokens: int
    new_tokens: int
    """Prompt tokens behind the previous turn's answer; in turn 1 the whole prompt."""
    computed_tokens: int
    cached_tokens: int


def run(*, model: Path, title: str, repeats: int, folder: Path, server_flags: Sequence[str]) -> None:
    """Measure, print a table for each conversation, write `chat.json`, `chat.png` and the server's log."""
    facts = machine()
    flags = ["-c", str(CONTEXT), "-np", "1", *server_flags]
    turns = asyncio.run(_measure(llamaslot(model, *flags), Tokens(model), repeats, folder / "chat-server.log"))
    for conversation in SYSTEM_TOKENS:
        console.print(table(conversation, turns))
    settings = {"model": title, "flags": " ".join(flags), "turns": TURNS, "repeats": repeats}
    settings |= {"user_tokens": USER_TOKENS, "answer_tokens": ANSWER_TOKENS}
    content = {"benchmark": "chat", "settings": settings, "machine": facts, "summary": summarize(turns)}
    write_json(folder / "chat.json", content | {"runs": [asdict(turn) for turn in turns]})
    _plot(turns, folder / "chat.png", f"Four-turn chat, {title}\n{facts['processor']}")


async def _measure(command: Sequence[str], tokens: Tokens, repeats: int, log: Path) -> list[Turn]:
    turns: list[Turn] = []
    run_id = secrets.token_hex(8)
    with Progress(console=notes) as progress:
        async with serving(command, log=log) as server:
            client = server.client
            await _converse(client, tokens, random.Random(f"{run_id} warm-up"), "", 100, cached=True, repeat=0)
            task = progress.add_task("chatting", total=repeats * len(SYSTEM_TOKENS) * 2)
            for repeat in range(1, repeats + 1):
                for conversation, system_tokens in SYSTEM_TOKENS.items():
                    for cached in (True, False):
                        words = random.Random(f"{run_id} {repeat} {conversation} {cached}")
                        turns += await _converse(
                            client, tokens, words, conversation, system_tokens, cached=cached, repeat=repeat
                        )
                        progress.advance(task)
    return turns


async def _converse(
    client: Client,
    tokens: Tokens,
    words: random.Random,
    conversation: str,
    system_tokens: int,
    *,
    cached: bool,
    repeat: int,
) -> list[Turn]:
    messages: list[Message] = []
    if system_tokens:
        messages.append({"role": "system", "content": tokens.draw(words, system_tokens)})
    turns: list[Turn] = []
    known_tokens = 0
    for number in range(1, TURNS + 1):
        messages.append({"role": "user", "content": tokens.draw(words, USER_TOKENS)})
        answer = await client.chat(
            messages, cache_prompt=cached, temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True
        )
        _expect_full_length(answer)
        messages.append({"role": "assistant", "content": answer.text})
        turns.append(
            Turn(
                conversation=conversation,
                cached=cached,
                repeat=repeat,
                number=number,
                ttft=answer.ttft,
                total=answer.total,
                prompt_tokens=answer.prompt_tokens,
                new_tokens=answer.prompt_tokens - known_tokens,
                computed_tokens=answer.computed,
                cached_tokens=int(answer.timings["cache_n"]),
            )
        )
        known_tokens = answer.prompt_tokens + answer.completion_tokens
    return turns


def _expect_full_length(answer: Answer) -> None:
    if answer.completion_tokens != ANSWER_TOKENS:
        raise BenchmarkError(
            f"an answer has {answer.completion_tokens} tokens ({answer.finish_reason}) instead of {ANSWER_TOKENS}: "
            "the server ignored ignore_eos or max_tokens"
        )


def summarize(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Per conversation and turn (0 stands for all of them): summaries with and without the cache, and ratios."""
    rows: list[dict[str, Any]] = []
    for conversation in dict.fromkeys(turn.conversation for turn in turns):
        for number in [*sorted({turn.number for turn in turns}), 0]:
            row: dict[str, Any] = {"conversation": conversation, "turn": number}
            for cached in (True, False):
                chosen = _choose(turns, conversation, number, cached)
                row["cached" if cached else "uncached"] = {
                    "ttft": asdict(Summary.of([turn.ttft for turn in chosen])),
                    "total": asdict(Summary.of([turn.total for turn in chosen])),
                    "new_tokens": _range([turn.new_tokens for turn in chosen]),
                    "computed_tokens": _range([turn.computed_tokens for turn in chosen]),
                }
            for time in ("ttft", "total"):
                row[f"{time}_ratio"] = row["uncached"][time]["median"] / row["cached"][time]["median"]
            rows.append(row)
    return rows


def table(conversation: str, turns: Sequence[Turn]) -> Table:
    """Two lines a turn, without the cache and with it; times in milliseconds, how many times faster behind."""
    result = Table(title=f"Conversation {conversation}", caption="ms; x: median without the cache / with it")
    for heading in ("turn", "cache", "new", "computed", "TTFT median", "mean", "range", "x"):
        result.add_column(heading, justify="right")
    for heading in ("total median", "mean", "range", "x"):
        result.add_column(heading, justify="right")
    for row in summarize([turn for turn in turns if turn.conversation == conversation]):
        for cache in ("uncached", "cached"):
            side = row[cache]
            cells = [str(row["turn"] or "all") if cache == "uncached" else "", "on" if cache == "cached" else "off"]
            cells += [side["new_tokens"], side["computed_tokens"]]
            for time in ("ttft", "total"):
                cells += Summary(**side[time]).milliseconds()
                cells.append(f"{row[f'{time}_ratio']:.2f}" if cache == "cached" else "")
            result.add_row(*cells, end_section=cache == "cached")
    return result


def _choose(turns: Sequence[Turn], conversation: str, number: int, cached: bool) -> list[Turn]:
    return [
        turn
        for turn in turns
        if (turn.conversation, turn.cached) == (conversation, cached) and number in (0, turn.number)
    ]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _plot(turns: Sequence[Turn], path: Path, title: str) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, len(SYSTEM_TOKENS))
    numbers = range(1, TURNS + 1)
    for axis, conversation in zip(axes, SYSTEM_TOKENS, strict=True):
        for cached, label, colour in ((False, "cache off", "tab:gray"), (True, "cache on", "tab:green")):
            sides = [Summary.of([t.ttft * 1000 for t in _choose(turns, conversation, n, cached)]) for n in numbers]
            medians = [side.median for side in sides]
            spread = [[s.median - s.low for s in sides], [s.high - s.median for s in sides]]
            axis.errorbar(numbers, medians, spread, marker="o", capsize=4, label=label, color=colour)
        axis.set(title=conversation, xlabel="turn", ylabel="time to first token, ms", xticks=numbers)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=144)
    notes.print(f"plot: {path}")
