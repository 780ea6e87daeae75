"""Time to the first token of turns whose prompt was computed ahead, and what that costs other requests.

A grammar gives the reasoning and the answer of each turn, so that they have the wanted lengths, and are generated
quickly. The client sends back the answer alone, and Qwen3's template leaves out the reasoning of earlier turns: so
a turn computes the answer before it, unless that was done while the user read it (`--warm-ahead`).

Two servers run at once, with and without it, and take turns: a user on each, and then, on each, a user and another
client that sends short requests at random times, the same ones. The second part has a smaller model, so that
servers keep up with the other client.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from bench import synthetic
from bench.client import Answer, Client, Message
from bench.peers import build
from bench.progress import progress
from bench.report import Summary, console, machine, new_table, write_json
from bench.server import llamaslot, serving
from bench.tokens import Tokens

SHAPE, SMALL_SHAPE = "0.6b-qwen3", "60m-qwen3"
TEMPLATE = "Qwen-Qwen3-0.6B"
TURNS = 6
QUESTION_TOKENS, OTHER_TOKENS, OTHER_NEW = 40, 200, 8
CONTEXT = 16_384
REASONING_TOKENS, ANSWER_TOKENS = 400, 300
CONVERSATIONS_BESIDE = 4
"""For each conversation of the first part, those of the second, which take a fraction of the time."""
PAUSE_S = 4.0
"""Time in which the user reads an answer."""
OTHER_EVERY_S = 1.0
"""Mean time between two requests of the other client."""
SIDES = {"off": ("--warm-ahead", "off"), "on": ("--warm-ahead", "1000000")}


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation; times in seconds."""

    side: str
    repeat: int
    number: int
    prompt_tokens: int
    computed_tokens: int
    new_tokens: int
    ttft: float


def run(
    *, model: Path | None, title: str, repeats: int, threads: int, folder: Path, server_flags: Sequence[str]
) -> None:
    """Measure, print two tables, write `ahead.json` and the servers' logs."""
    facts = machine()
    small, of_small, template = model, title, []
    if model is None:
        model, small = (
            synthetic.ensure(shape, vocabulary=build.vocabulary("qwen2")) for shape in (SHAPE, SMALL_SHAPE)
        )
        of_small = title.replace(SHAPE, SMALL_SHAPE)
        template = ["--chat-template-file", str(build.chat_template(TEMPLATE))]
    assert small is not None, "given with the other"
    flags = ["-np", "2", "-c", str(CONTEXT), "-t", str(threads), *template, *server_flags]
    turns = asyncio.run(_alone(model, flags, repeats, folder))
    others = asyncio.run(_beside_others(small, flags, CONVERSATIONS_BESIDE * repeats, folder))
    console.print(_turns_table(turns, title))
    console.print(_others_table(others, of_small))
    settings = {
        "models": [title, of_small],
        "flags": " ".join(flags),
        "repeats": repeats,
        "turns": TURNS,
        "pause_s": PAUSE_S,
    }
    content = {"benchmark": "ahead", "settings": settings, "machine": facts, "others": others}
    write_json(folder / "ahead.json", content | {"turns": [asdict(turn) for turn in turns]})


async def _alone(model: Path, flags: Sequence[str], repeats: int, folder: Path) -> list[Turn]:
    """Return the turns of conversations beside which nothing else is asked for."""
    turns: list[Turn] = []
    tokens, run_id = Tokens(model), secrets.token_hex(8)
    order = random.Random(run_id)
    async with AsyncExitStack() as running:
        clients = await _both(running, model, flags, folder, tokens)
        with progress("turns", repeats * TURNS * len(SIDES)) as advance:
            for repeat in range(repeats):
                talks = {
                    side: _Conversation(client, tokens, f"{run_id} {repeat}") for side, client in clients.items()
                }
                for number in range(1, TURNS + 1):
                    for side in order.sample(list(SIDES), len(SIDES)):
                        answer = await talks[side].turn()
                        turns.append(_turn(answer, side, repeat, number))
                        await asyncio.sleep(PAUSE_S)
                        advance(f"turn {number}")
    return turns


async def _beside_others(model: Path, flags: Sequence[str], repeats: int, folder: Path) -> dict[str, list[float]]:
    """Return the times to the first token of another client's requests."""
    others: dict[str, list[float]] = {side: [] for side in SIDES}
    tokens, run_id = Tokens(model), secrets.token_hex(8)
    order = random.Random(run_id)
    async with AsyncExitStack() as running:
        clients = await _both(running, model, flags, folder, tokens)
        with progress("conversations", repeats * len(SIDES)) as advance:
            for repeat in range(repeats):
                for side in order.sample(list(SIDES), len(SIDES)):
                    words = f"{run_id} {repeat}"
                    talk = _Conversation(clients[side], tokens, words)
                    others[side] += await _beside(talk, clients[side], tokens, words)
                    advance("beside others")
    return others


async def _both(
    running: AsyncExitStack, model: Path, flags: Sequence[str], folder: Path, tokens: Tokens
) -> dict[str, Client]:
    """Start a server for each side, and return their clients."""
    clients: dict[str, Client] = {}
    for side, own in SIDES.items():
        command = llamaslot(model, *flags, *own)
        server = await running.enter_async_context(serving(command, log=folder / f"ahead-{side}.log"))
        clients[side] = server.client
        # The first constraint waits for the grammar's tokenizer.
        await _Conversation(server.client, tokens, "warm-up").turn()
    return clients


async def _beside(talk: _Conversation, client: Client, tokens: Tokens, words: str) -> list[float]:
    """Return the times to the first token of short requests that come while a conversation goes on."""
    chance = random.Random(words)
    sent: list[asyncio.Task[Answer]] = []

    async def send() -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1 / OTHER_EVERY_S))
            question = {"role": "user", "content": tokens.draw(chance, OTHER_TOKENS)}
            asking = client.chat([question], max_tokens=OTHER_NEW, temperature=0.0, ignore_eos=True)
            sent.append(asyncio.create_task(asking))

    sending = asyncio.create_task(send())
    try:
        for _ in range(TURNS):
            await talk.turn()
            await asyncio.sleep(PAUSE_S)
    finally:
        sending.cancel()
    return [answer.ttft for answer in await asyncio.gather(*sent)]


class _Conversation:
    """A user whose client sends back answers without their reasoning; `words` is the seed of all texts."""

    def __init__(self, client: Client, tokens: Tokens, words: str) -> None:
        self._client = client
        self._tokens = tokens
        self._words = random.Random(words)
        self._messages: list[Message] = []

    async def turn(self) -> Answer:
        """Ask the next question, and add it and the answer to the conversation."""
        lengths = QUESTION_TOKENS, REASONING_TOKENS, ANSWER_TOKENS
        question, reasoning, answered = (self._tokens.draw(self._words, n).strip() for n in lengths)
        self._messages.append({"role": "user", "content": question})
        # Only after a choice are forced tokens computed, and only before one: so there is one at each end.
        rest = json.dumps(f" {reasoning}\n</think>\n\n{answered}")
        grammar = f'root ::= "<think>\\n" [a-z] {rest} [.!]'
        answer = await self._client.chat(self._messages, temperature=0.0, grammar=grammar)
        self._messages.append({"role": "assistant", "content": answer.content})
        return answer


def _turn(answer: Answer, side: str, repeat: int, number: int) -> Turn:
    return Turn(side, repeat, number, answer.prompt_tokens, answer.computed, answer.completion_tokens, answer.ttft)


def _turns_table(turns: Sequence[Turn], title: str) -> Table:
    """A line for each side: medians of the turns after the second, before which nothing is computed ahead."""
    later = {side: [turn for turn in turns if turn.side == side and turn.number > 2] for side in SIDES}
    without = {(turn.repeat, turn.number): turn.ttft for turn in later["off"]}
    ratio = Summary.of([turn.ttft / without[turn.repeat, turn.number] for turn in later["on"]])
    result = new_table(
        f"Turns 3 to {TURNS} of a conversation: {title}",
        ("--warm-ahead", "new tokens", "computed", "TTFT in ms"),
        left=("--warm-ahead",),
        caption=f"on / off, TTFT: {ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f}); medians (ranges)",
    )
    for side, own in later.items():
        new, computed = (
            Summary.of([getattr(turn, name) for turn in own]) for name in ("new_tokens", "computed_tokens")
        )
        median, _, spread = Summary.of([turn.ttft for turn in own]).milliseconds()
        result.add_row(side, f"{new.median:,.0f}", f"{computed.median:,.0f}", f"{median} ({spread})")
    return result


def _others_table(others: dict[str, list[float]], title: str) -> Table:
    """A line for each side: TTFT of the other client's requests."""
    p95 = {side: float(np.percentile(times, 95)) for side, times in others.items()}
    result = new_table(
        f"Requests of another client meanwhile: {title}",
        ("--warm-ahead", "requests", "TTFT in ms", "95%"),
        left=("--warm-ahead",),
        caption=f"on / off, 95%: {p95['on'] / p95['off']:.3f}",
    )
    for side, times in others.items():
        median, _, spread = Summary.of(times).milliseconds()
        result.add_row(side, str(len(times)), f"{median} ({spread})", f"{1000 * p95[side]:,.0f}")
    return result
