"""What users do to a server, as scripts: each asks through a `Play` and knows no server.

Lengths are in tokens. All text is drawn anew for each play, so that nothing carries over from one to the next;
replies become part of the history, as in a real client. A script measures what a user waits for; what only prepares
is asked with `measured=False`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bench.client import Answer, BenchmarkError, Message
from bench.contenders import FOLDER
from bench.server import Server
from bench.tokens import Tokens

REPLY = 16
OVERHEAD = 64
"""Tokens that a template puts around a conversation of a few turns, at most."""
PADDING = 256
"""Cells that a pool, or a slot's part of it, grows by."""
FEW, MANY = 4, 20
"""Pairs that it takes to judge a bound far from 1, and one near it."""
GREEDY: Mapping[str, float] = {"temperature": 0}
SAMPLED: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0, "repeat_penalty": 1.1}
"""Ollama's defaults."""
PATIENCE = 3.0
"""Seconds after which a server may have written what it keeps over a restart."""


@dataclass(frozen=True)
class Asked:
    """A request and its answer."""

    messages: tuple[Message, ...]
    answer: Answer
    n_reply: int
    measured: bool


@dataclass
class Play:
    """One run of a script against one server; `scale` shortens prompts for a quick look."""

    server: Server
    tokens: Tokens
    words: random.Random
    scale: float = 1.0
    saves_slots: bool = False
    """Whether slots are saved before a restart and restored behind it, by hand."""
    answered: list[Asked] = field(default_factory=list)
    """In the order in which answers were complete."""

    @property
    def asked(self) -> list[Asked]:
        """In the order in which they were asked."""
        return sorted(self.answered, key=lambda each: each.answer.started)

    def text(self, n_tokens: int) -> str:
        """So many tokens that nobody has seen before."""
        return self.tokens.draw(self.words, n_tokens)

    def long(self, n_tokens: int) -> str:
        """The same, scaled."""
        return self.text(max(round(n_tokens * self.scale), 8))

    async def ask(
        self,
        *messages: Message,
        n_reply: int = REPLY,
        measured: bool = True,
        sampling: Mapping[str, float] = GREEDY,
    ) -> Answer:
        """Stream one answer of exactly `n_reply` tokens."""
        answer = await self.server.client.chat(messages, **sampling, max_tokens=n_reply, ignore_eos=True)
        if answer.completion_tokens not in (0, n_reply) or answer.finish_reason != "length":
            raise BenchmarkError(
                f"an answer of {n_reply} tokens ended as {answer.finish_reason or 'cut off'!r}, "
                f"after {answer.completion_tokens} tokens by the server's count"
            )
        self.answered.append(Asked(messages, answer, n_reply, measured))
        return answer

    async def converse(
        self, history: list[Message], n_user: int, n_reply: int = REPLY, *, measured: bool = True
    ) -> None:
        """One more turn of a conversation."""
        history.append(user(self.text(n_user)))
        answer = await self.ask(*history, n_reply=n_reply, measured=measured)
        history.append({"role": "assistant", "content": answer.text})

    async def restart(self) -> None:
        """Kill the server and start it again; nothing of this is measured."""
        slots = [slot["id"] for slot in await self.server.client.get("/slots")] if self.saves_slots else []
        saved = [slot for slot in slots if (await self._slot(slot, "save"))["n_saved"]]
        await asyncio.sleep(PATIENCE)
        await self.server.crash()
        await self.server.start()
        for slot in saved:
            await self._slot(slot, "restore")

    async def _slot(self, slot: int, action: str) -> Any:
        return await self.server.client.post(f"/slots/{slot}?action={action}", filename=f"{slot}.bin")


Script: TypeAlias = Callable[[Play], Awaitable[None]]


@dataclass(frozen=True)
class Workload:
    """A script, and what its servers need for it."""

    name: str
    script: Script
    longest: int
    """Tokens of the longest prompt with its answer, before scaling."""
    n_cells: int | None = None
    """Cells of the pool where it must be short; else every slot has room for the longest."""
    n_pairs: int = FEW
    """Repeats that it takes to judge llamaslot by it."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More flags, by kind of server."""
    weighs: bool = False
    """Whether it asks for the server's memory at the end."""

    def n_ctx(self, n_slots: int, scale: float) -> int:
        """Cells of all slots together, padded."""
        if self.n_cells is not None:
            return _padded(self.n_cells * scale)
        return n_slots * _padded(self.longest * scale + 4 * OVERHEAD)


def _padded(n_cells: float) -> int:
    return -(-round(n_cells) // PADDING) * PADDING


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


async def chat(play: Play) -> None:
    """Four turns behind a system prompt of 1,000 tokens."""
    history = [system(play.long(1000))]
    for _ in range(4):
        await play.converse(history, 40, 60)


async def fan_out(play: Play, *, warm: bool) -> None:
    """Sixteen users at once on one system prompt of 1,600 tokens."""
    head = system(play.long(1600))
    if warm:
        await play.ask(head, user(play.text(20)), measured=False)
    await asyncio.gather(*(play.ask(head, user(play.text(20))) for _ in range(16)))


async def interleaved(play: Play) -> None:
    """Six conversations in turn that have nothing in common."""
    talks: list[list[Message]] = [[] for _ in range(6)]
    for turn in range(3):
        for history in talks:
            await play.converse(history, 40 if turn else round(600 * play.scale))


async def twenty(play: Play) -> None:
    """Twenty conversations at once on one system prompt of 1,000 tokens, three turns each."""
    head = system(play.long(1000))

    async def talk() -> None:
        history = [head]
        for _ in range(3):
            await play.converse(history, 40)

    await asyncio.gather(*(talk() for _ in range(20)))


async def branching(play: Play) -> None:
    """Eight branches of a conversation of 1,200 tokens at once, each gone on with once."""
    trunk = [user(play.long(1200))]
    trunk.append({"role": "assistant", "content": (await play.ask(*trunk)).text})

    async def branch() -> None:
        history = list(trunk)
        for _ in range(2):
            await play.converse(history, 60)

    await asyncio.gather(*(branch() for _ in range(8)))


async def groups(play: Play) -> None:
    """Four groups at once, each of six prompts that share 800 tokens."""
    heads = [system(play.long(800)) for _ in range(4)]
    await asyncio.gather(*(play.ask(head, user(play.text(40))) for _ in range(6) for head in heads))


async def agent(play: Play) -> None:
    """A main agent with 10,000 tokens of tools, sub-agents that share half of it, short title requests between."""
    half = play.long(5000)
    main = [system(half + play.long(5000))]
    for _ in range(4):
        await play.converse(main, 60, 40)
        sub = [system(half), user(play.text(120))]
        await asyncio.gather(play.ask(*sub), play.ask(system(half), user(play.text(120))))
        await play.ask(system(play.text(60)), user(play.text(30)))


async def pressure(play: Play) -> None:
    """Eight prefixes of 1,500 tokens in turn, three times; the pool has room for a quarter of them."""
    heads = [system(play.long(1500)) for _ in range(8)]
    for _ in range(3):
        for head in heads:
            await play.ask(head, user(play.text(20)))


async def low_reuse(play: Play) -> None:
    """Ten prompts of 1,000 tokens that share nothing."""
    for _ in range(10):
        await play.ask(user(play.long(1000)))


async def decode(play: Play, *, n_streams: int, sampling: Mapping[str, float] = GREEDY) -> None:
    """Short prompts side by side, 128 tokens each."""
    prompts = [user(play.text(16)) for _ in range(n_streams)]
    await asyncio.gather(*(play.ask(prompt, n_reply=128, sampling=sampling) for prompt in prompts))


async def long_prefill(play: Play) -> None:
    """Four streams, and in the middle of them a prompt of 16,000 tokens, which asks for one token."""

    async def late() -> Answer:
        await asyncio.sleep(0.5)
        return await play.ask(user(play.long(16_000)), n_reply=1)

    streams = [play.ask(user(play.text(16)), n_reply=256) for _ in range(4)]
    prompt, *answers = await asyncio.gather(late(), *streams)
    if not all(answer.arrivals[0] < prompt.started < answer.arrivals[-1] for answer in answers):
        raise BenchmarkError("the long prompt did not come while the streams ran: measure a larger model")


async def restart(play: Play) -> None:
    """Two users on a system prompt of 1,000 tokens; behind three turns the server dies, then one goes on."""
    head = system(play.long(1000))
    await play.ask(head, user(play.text(40)), measured=False)
    history = [head]
    for _ in range(3):
        await play.converse(history, 40, 60, measured=False)
    await play.restart()
    await play.converse(history, 40)


async def memory(play: Play) -> None:
    """Eight conversations at once, three turns each."""

    async def talk() -> None:
        history: list[Message] = []
        for turn in range(3):
            await play.converse(history, 40 if turn else round(600 * play.scale))

    await asyncio.gather(*(talk() for _ in range(8)))


WORKLOADS = (
    Workload("chat", chat, 1500, n_pairs=MANY),
    Workload("fan-out cold", lambda play: fan_out(play, warm=False), 1700),
    Workload("fan-out warm", lambda play: fan_out(play, warm=True), 1700),
    Workload("interleaved", interleaved, 900, n_pairs=MANY),
    Workload("twenty", twenty, 1300),
    Workload("branching", branching, 1500),
    Workload("groups", groups, 900),
    Workload("agent", agent, 10_600),
    Workload("pressure", pressure, 1600, n_cells=2 * 1600, n_pairs=MANY),
    Workload("low reuse", low_reuse, 1100, n_pairs=MANY),
    Workload("decode 1", lambda play: decode(play, n_streams=1), 256, n_pairs=MANY),
    Workload("decode 4", lambda play: decode(play, n_streams=4), 256, n_pairs=MANY),
    Workload("decode 8", lambda play: decode(play, n_streams=8), 256, n_pairs=MANY),
    Workload("sampled 8", lambda play: decode(play, n_streams=8, sampling=SAMPLED), 256, n_pairs=MANY),
    Workload("long prefill", long_prefill, 16_100),
    Workload("restart", restart, 1500, flags={"llamaslot": ("--cache-disk", FOLDER)}),
    Workload("memory", memory, 900, flags={"llama-server": ("--cache-ram", "0")}, weighs=True),
)
