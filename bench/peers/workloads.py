"""The workloads: scripts that send requests through a `WorkloadRun` and do not know which server answers.

Lengths are in tokens. All text is drawn anew for each run, so that nothing carries over from one run to the next;
replies become part of the history, as in a real client. Requests that only prepare the server are sent with
`measured=False`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from bench.client import Answer, BenchmarkError, Message
from bench.peers.servers import FOLDER
from bench.server import Server
from bench.tokens import Tokens

REPLY = 16
OVERHEAD = 64
"""The most tokens that a chat template adds to a conversation of a few turns."""
PADDING = 256
"""llama.cpp rounds the cells of a pool, or of a slot's part of it, up to a multiple of this."""
FEW, SEVERAL, MANY = 4, 6, 12
"""Pairs of runs that are needed to judge a goal far from 1, one nearer to it, and one near it."""
GREEDY: Mapping[str, float] = {"temperature": 0}
SAMPLED: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0, "repeat_penalty": 1.1}
"""Ollama's defaults."""
RESTART_DELAY_S = 3.0
"""Time that a server has to write its cache to disk before it is killed."""


@dataclass(frozen=True)
class Request:
    """A request and its answer."""

    messages: tuple[Message, ...]
    answer: Answer
    n_reply: int
    measured: bool


@dataclass
class WorkloadRun:
    """One run of a script on one server; `scale` shortens the long prompts."""

    server: Server
    tokens: Tokens
    words: random.Random
    scale: float = 1.0
    saves_slots: bool = False
    """Save all slots before a restart and restore them afterwards."""
    answered: list[Request] = field(default_factory=list)
    """In the order in which answers were complete."""

    @property
    def requests(self) -> list[Request]:
        """All requests in the order in which they were sent."""
        return sorted(self.answered, key=lambda each: each.answer.started)

    def text(self, n_tokens: int) -> str:
        """Random text of `n_tokens` tokens."""
        return self.tokens.draw(self.words, n_tokens)

    def long(self, n_tokens: int) -> str:
        """Random text of `n_tokens` tokens times the scale."""
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
        self.answered.append(Request(messages, answer, n_reply, measured))
        return answer

    async def converse(
        self, history: list[Message], n_user: int, n_reply: int = REPLY, *, measured: bool = True
    ) -> None:
        """Run one more turn of a conversation and append it to `history`."""
        history.append(user(self.text(n_user)))
        answer = await self.ask(*history, n_reply=n_reply, measured=measured)
        history.append({"role": "assistant", "content": answer.text})

    async def restart(self) -> None:
        """Kill the server and start it again, outside of what is measured."""
        slots = [slot["id"] for slot in await self.server.client.get("/slots")] if self.saves_slots else []
        saved = [slot for slot in slots if (await self._slot(slot, "save"))["n_saved"]]
        await asyncio.sleep(RESTART_DELAY_S)
        await self.server.crash()
        await self.server.start()
        for slot in saved:
            await self._slot(slot, "restore")

    async def _slot(self, slot: int, action: str) -> Any:
        return await self.server.client.post(f"/slots/{slot}?action={action}", filename=f"{slot}.bin")


Script: TypeAlias = Callable[[WorkloadRun], Awaitable[None]]


@dataclass(frozen=True)
class Workload:
    """A script, and the size of the cache that it needs."""

    name: str
    script: Script
    longest: int
    """Tokens of the longest prompt with its answer, before scaling."""
    seconds: float
    """Typical time of a run with the server's start, on the 60m shape and 2 cores; only for estimates."""
    n_cells: int | None = None
    """Cells of the pool if it must be small; by default every slot can hold the longest prompt."""
    n_pairs: int = FEW
    """Pairs of runs that are needed to judge its goals."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further flags by kind of server."""
    n_slots: int = 8

    def n_ctx(self, scale: float) -> int:
        """Cells of all slots together, padded."""
        if self.n_cells is not None:
            return padded(self.n_cells * scale)
        return self.n_slots * padded(self.longest * scale + 4 * OVERHEAD)


def padded(n_cells: float) -> int:
    """Cells of a pool that has room for so many."""
    return -(-round(n_cells) // PADDING) * PADDING


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


async def chat(run: WorkloadRun) -> None:
    """Four turns behind a system prompt of 1,000 tokens."""
    history = [system(run.long(1000))]
    for _ in range(4):
        await run.converse(history, 40, 60)


async def fan_out(run: WorkloadRun, *, warm: bool) -> None:
    """Sixteen users at once on one system prompt of 1,600 tokens."""
    head = system(run.long(1600))
    if warm:
        await run.ask(head, user(run.text(20)), measured=False)
    await asyncio.gather(*(run.ask(head, user(run.text(20))) for _ in range(16)))


async def interleaved(run: WorkloadRun) -> None:
    """Six conversations in turn that have nothing in common."""
    talks: list[list[Message]] = [[] for _ in range(6)]
    for turn in range(3):
        for history in talks:
            await run.converse(history, 40 if turn else round(600 * run.scale))


async def twenty(run: WorkloadRun) -> None:
    """Twenty conversations at once on one system prompt of 1,000 tokens, three turns each."""
    head = system(run.long(1000))

    async def talk() -> None:
        history = [head]
        for _ in range(3):
            await run.converse(history, 40)

    await asyncio.gather(*(talk() for _ in range(20)))


async def branching(run: WorkloadRun) -> None:
    """Eight branches of a conversation of 1,200 tokens at once, each continued by two turns."""
    trunk = [user(run.long(1200))]
    trunk.append({"role": "assistant", "content": (await run.ask(*trunk)).text})

    async def branch() -> None:
        history = list(trunk)
        for _ in range(2):
            await run.converse(history, 60)

    await asyncio.gather(*(branch() for _ in range(8)))


async def groups(run: WorkloadRun) -> None:
    """Four groups at once, each of six prompts that share 800 tokens."""
    heads = [system(run.long(800)) for _ in range(4)]
    await asyncio.gather(*(run.ask(head, user(run.text(40))) for _ in range(6) for head in heads))


async def agent(run: WorkloadRun) -> None:
    """A main agent with 10,000 tokens of tools, sub-agents that share half of it, short title requests between."""
    half = run.long(5000)
    main = [system(half + run.long(5000))]
    for _ in range(4):
        await run.converse(main, 60, 40)
        sub = [system(half), user(run.text(120))]
        await asyncio.gather(run.ask(*sub), run.ask(system(half), user(run.text(120))))
        await run.ask(system(run.text(60)), user(run.text(30)))


async def pressure(run: WorkloadRun) -> None:
    """Eight prefixes of 1,500 tokens in turn, three times; the pool holds a quarter of them."""
    heads = [system(run.long(1500)) for _ in range(8)]
    for _ in range(3):
        for head in heads:
            await run.ask(head, user(run.text(20)))


async def low_reuse(run: WorkloadRun) -> None:
    """Ten prompts of 1,000 tokens that share nothing."""
    for _ in range(10):
        await run.ask(user(run.long(1000)))


async def conversations(run: WorkloadRun, *, measured: int) -> None:
    """Eight conversations that share nothing, of which one turn is `measured`.

    First turns of 1,500 tokens with replies of 300, all at once; second turns of 300 tokens, one after the other;
    third turns of 300 tokens, all at once.
    """
    talks: list[list[Message]] = [[] for _ in range(8)]

    async def turn(number: int, history: list[Message], n_user: int, n_reply: int) -> None:
        await run.converse(history, round(n_user * run.scale), n_reply, measured=number == measured)

    await asyncio.gather(*(turn(1, history, 1500, 300) for history in talks))
    if measured > 1:
        for history in talks:
            await turn(2, history, 300, 30)
    if measured > 2:
        await asyncio.gather(*(turn(3, history, 300, 30) for history in talks))


async def first_turn(run: WorkloadRun) -> None:
    """A prompt of 700 tokens that shares nothing."""
    await run.ask(user(run.long(700)))


async def six_at_once(run: WorkloadRun) -> None:
    """First turns of six conversations at once: prompts of 700 tokens that share nothing, replies of 80."""
    await asyncio.gather(*(run.ask(user(run.long(700)), n_reply=80) for _ in range(6)))


async def decode(run: WorkloadRun, *, n_streams: int, sampling: Mapping[str, float] = GREEDY) -> None:
    """Short prompts side by side, 128 tokens each."""
    prompts = [user(run.text(16)) for _ in range(n_streams)]
    await asyncio.gather(*(run.ask(prompt, n_reply=128, sampling=sampling) for prompt in prompts))


async def long_prefill(run: WorkloadRun) -> None:
    """Four streams, and in the middle of them a prompt of 16,000 tokens, which asks for one token."""

    async def late() -> Answer:
        await asyncio.sleep(0.5)
        return await run.ask(user(run.long(16_000)), n_reply=1)

    streams = [run.ask(user(run.text(16)), n_reply=256) for _ in range(4)]
    prompt, *answers = await asyncio.gather(late(), *streams)
    if not all(answer.arrivals[0] < prompt.started < answer.arrivals[-1] for answer in answers):
        raise BenchmarkError("the long prompt did not come while the streams ran: measure a larger model")


async def restart(run: WorkloadRun) -> None:
    """Two users on a system prompt of 1,000 tokens; the server is killed after three turns of one, who goes on."""
    head = system(run.long(1000))
    await run.ask(head, user(run.text(40)), measured=False)
    history = [head]
    for _ in range(3):
        await run.converse(history, 40, 60, measured=False)
    await run.restart()
    await run.converse(history, 40)


WORKLOADS = (
    Workload("chat", chat, 1500, 10, n_pairs=MANY),
    Workload("fan-out cold", lambda run: fan_out(run, warm=False), 1700, 15),
    Workload("fan-out warm", lambda run: fan_out(run, warm=True), 1700, 12),
    Workload("interleaved", interleaved, 900, 9, n_pairs=MANY),
    Workload("twenty", twenty, 1300, 29),
    Workload("branching", branching, 1500, 13),
    Workload("groups", groups, 900, 13),
    Workload("agent", agent, 10_600, 70),
    Workload("pressure", pressure, 1600, 15, n_cells=2 * 1600, n_pairs=MANY),
    Workload("low reuse", low_reuse, 1100, 7, n_pairs=MANY),
    *(
        Workload(
            f"conversations {turn}",
            partial(conversations, measured=turn),
            2500,
            12 + 2 * turn,
            n_cells=32_768,
            n_pairs=SEVERAL,
        )
        for turn in (1, 2, 3)
    ),
    Workload("decode 1", lambda run: decode(run, n_streams=1), 256, 8, n_pairs=MANY),
    Workload("decode 4", lambda run: decode(run, n_streams=4), 256, 8, n_pairs=MANY),
    Workload("decode 8", lambda run: decode(run, n_streams=8), 256, 8, n_pairs=MANY),
    Workload("sampled 8", lambda run: decode(run, n_streams=8, sampling=SAMPLED), 256, 8, n_pairs=MANY),
    Workload("long prefill", long_prefill, 16_100, 15),
    Workload("restart", restart, 1500, 20, flags={"llamaslot": ("--cache-disk", FOLDER)}),
)
REAL = (
    Workload("SmolLM2, first turn", first_turn, 800, 6, n_pairs=MANY),
    Workload("SmolLM2, six at once", six_at_once, 900, 20, n_pairs=SEVERAL),
    Workload("SmolLM2, decode 1", lambda run: decode(run, n_streams=1), 256, 5, n_pairs=MANY),
    Workload("SmolLM2, decode 4", lambda run: decode(run, n_streams=4), 256, 8, n_pairs=MANY),
)
"""Workloads on real weights, SmolLM2-135M-Instruct in Q4_1: what users see first."""
EXTRA = (Workload("decode 32", lambda run: decode(run, n_streams=32), 256, 15, n_pairs=MANY, n_slots=32),)
"""Workloads that are run only if they are asked for: more streams than a CPU is used for."""
