"""The measurements of `python -m bench checkpoints`: each starts servers of its own and returns its figures.

All text is drawn by the seed and the number of the repeat, and replies have fixed lengths, so that prompts have the
same lengths whichever server and shape is measured.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.client import BenchmarkError, Message
from bench.families.kinds import StateSizes
from bench.families.oracle import needs
from bench.families.run import CHECKPOINTS, MIB, computed_tokens, self_test_ended
from bench.peers.servers import OWN, SERVERS, CommonSettings, ServerSetup
from bench.peers.workloads import OVERHEAD, WorkloadRun, padded, system, twenty
from bench.report import notes
from bench.server import Server, serving
from bench.tokens import Tokens

PEER = "llama-server -kvu"
RESUMED_TURNS, RESUMED_SYSTEM, RESUMED_REPLY = 4, 3500, 60
"""A conversation of 4,000 tokens, with the template's and those of `USER` in each turn."""
CONVERSATIONS, HELD = 8, 3
"""Conversations, and how many of them the pool, and RAM, have room for."""
TURNS, SYSTEM, USER = 4, 1500, 40
LONG_REPLY = 32
PAUSE_S = 0.4
"""Pause before each request of the eight: each user takes 3 s or more to reply, and the disk has that time."""
MEMORY_SLOTS, MEMORY_CONTEXT = 8, 32_768
QUIET_S = 2.0
"""Time after the last reply before memory is read: what idle servers still do is done then."""
_TEMPLATE = 8
"""The most prompt tokens that prompts of different text share: those of the template."""


@dataclass(frozen=True)
class Shape:
    """A model file, and the sizes of its state."""

    name: str
    model: Path
    tokens: Tokens
    sizes: StateSizes


@dataclass(frozen=True)
class Bench:
    """Settings that all measurements have in common."""

    threads: int
    scale: float
    """Factor for the long prompts."""
    seed: int
    log: Path
    """Log file of the server that ran last."""
    flags: tuple[str, ...] = ()
    """Further flags for all servers."""

    def command(self, server: str, shape: Shape, n_slots: int, n_ctx: int, *more: str) -> list[str]:
        """The command that starts a server with these flags."""
        common = CommonSettings(shape.model, n_slots, self.threads, n_ctx, (*more, *self.flags))
        return _setup(server).command(common)

    def run(self, server: Server, shape: Shape, what: str, repeat: int) -> WorkloadRun:
        """A run of a script, with text of its own."""
        return WorkloadRun(server, shape.tokens, random.Random(f"{self.seed} {repeat} {what}"), self.scale)


async def restart(bench: Bench, shape: Shape, repeat: int) -> dict[str, float]:
    """TTFT of a conversation's next turn after SIGTERM and a new start, and of other text of the same length.

    The next turn is the new process' first request, and so pays for all that a server does only once. The cold
    prompt comes after it.
    """
    turn = USER + RESUMED_REPLY + OVERHEAD
    n_ctx = 4 * padded(RESUMED_SYSTEM * bench.scale + (RESUMED_TURNS + 1) * turn)
    with tempfile.TemporaryDirectory() as folder:
        command = bench.command(OWN, shape, 2, n_ctx, "--cache-disk", folder)
        async with serving(command, log=bench.log) as server:
            await self_test_ended(server)
            run = bench.run(server, shape, "restart", repeat)
            history = [system(run.long(RESUMED_SYSTEM))]
            for _ in range(RESUMED_TURNS):
                await run.converse(history, USER, RESUMED_REPLY)
            await server.end()
            forget(Path(folder))
            await server.start()
            await self_test_ended(server)
            await run.converse(history, USER)
            resumed = run.answered[-1]
            cold = await run.ask(*_same_lengths(run, resumed.messages))
    if not resumed.answer.prompt_tokens == cold.prompt_tokens <= cold.computed + _TEMPLATE:
        raise BenchmarkError(
            f"the cold prompt has {cold.prompt_tokens} tokens, {cold.computed} of them computed; "
            f"the resumed one has {resumed.answer.prompt_tokens}"
        )
    return {
        "prompt": cold.prompt_tokens,
        "computed": resumed.answer.computed,
        "resumed_s": resumed.answer.ttft,
        "cold_s": cold.ttft,
    }


def forget(folder: Path) -> None:
    """Let the system drop the files of a folder from its page cache, as if the machine had been started again.

    macOS has no call for that: there they may be read from memory.
    """
    if not hasattr(os, "posix_fadvise"):
        notes.print("the disk tier stays in the page cache: the restart is warmer than that of a machine")
        return
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


async def eight(bench: Bench, shape: Shape, repeat: int) -> dict[str, float]:
    """Prompt tokens that eight conversations in turn compute with pool and RAM for three, and the fewest possible.

    RAM for three is that of their KV, and of a checkpoint for each turn and one more.
    """
    longest = SYSTEM * bench.scale + TURNS * (USER + LONG_REPLY) + OVERHEAD
    ram = max(1, int(HELD * longest * shape.sizes.kv_bytes / MIB))
    flags = ["--metrics", "--cache-ram", str(ram)]
    if shape.sizes.checkpoint_bytes:
        mib = math.ceil(HELD * (TURNS + 1) * shape.sizes.checkpoint_bytes / MIB)
        flags += ["--checkpoint-ram", str(mib)]
    with tempfile.TemporaryDirectory() as folder:
        command = bench.command(OWN, shape, 2, padded(HELD * longest), *flags, "--cache-disk", folder)
        async with serving(command, log=bench.log) as server:
            await self_test_ended(server)
            run = bench.run(server, shape, "eight", repeat)
            talks = [[system(run.long(SYSTEM))] for _ in range(CONVERSATIONS)]
            for _ in range(TURNS):
                for history in talks:
                    await asyncio.sleep(PAUSE_S)
                    await run.converse(history, USER, LONG_REPLY)
            # Raises an error unless the engine's own counters say the same.
            computed = await computed_tokens(server, run, is_own=True)
            cache = await server.client.get("/cache?top=1")
    requests = [(shape.tokens.prompt(each.messages), shape.tokens.of(each.answer.text)) for each in run.requests]
    return {
        "prompt": sum(len(prompt) for prompt, _ in requests),
        "computed": sum(computed),
        "fewest": sum(need.fewest for need in needs(requests)),
        "ram_mib": ram,
        "disk_tokens": cache["disk"]["tokens"],
        "read_tokens": cache["read_tokens"],
    }


async def memory(bench: Bench, shape: Shape, repeat: int, peer: str | None) -> dict[str, float]:
    """Resident bytes of all processes of llamaslot, and of llama-server, after the workload `twenty`.

    Both may keep the same bytes of checkpoints; the order of the servers alternates. A start before it keeps what
    llamaslot measures of a model that it has not served before: that start has more in memory.
    """
    measured: dict[str, float] = {}
    names = [OWN, *([peer] if peer else [])]
    for name in names if repeat % 2 == 0 else names[::-1]:
        is_own = name == OWN
        command = bench.command(
            name, shape, MEMORY_SLOTS, MEMORY_CONTEXT, "--cache-ram", "0", *_equal_bytes(shape, is_own=is_own)
        )
        if is_own:
            async with serving(command, log=bench.log) as server:
                await self_test_ended(server)
        async with serving(command, log=bench.log) as server:
            if is_own:
                await self_test_ended(server)
            await twenty(bench.run(server, shape, "memory", repeat))
            await asyncio.sleep(QUIET_S)
            if is_own:
                measured["own_checkpoints"] = (await server.client.get("/cache?top=1"))["checkpoints"]["used_bytes"]
            side = "own" if is_own else "peer"
            measured |= {f"{side}_{kind}": n for kind, n in resident_bytes(server.pid).items()}
    return measured


def resident_bytes(pid: int) -> dict[str, int]:
    """Bytes that a process and its descendants have in memory, as `rss` and as `pss`.

    RSS counts a page once for each process that maps it. PSS gives each an equal share, so the sum counts it once.
    """
    parent = psutil.Process(pid)
    total = {"rss": 0, "pss": 0}
    for process in (parent, *parent.children(recursive=True)):
        path = Path(f"/proc/{process.pid}/smaps_rollup")
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError as error:
            raise BenchmarkError(f"{path} is not there: memory is measured on Linux only") from error
        for name, value in (line.split()[:2] for line in lines[1:]):
            if (kind := name.removesuffix(":").lower()) in total:
                total[kind] += int(value) * 1024
    return total


def _setup(name: str) -> ServerSetup:
    return next(each for each in SERVERS if each.name == name)


def _equal_bytes(shape: Shape, *, is_own: bool) -> list[str]:
    """The flags with which checkpoints may take the same bytes in both servers."""
    n_bytes = shape.sizes.checkpoint_bytes
    if not n_bytes:
        return []
    if not is_own:
        return ["--ctx-checkpoints", str(CHECKPOINTS)]
    return ["--checkpoint-ram", str(math.ceil(MEMORY_SLOTS * CHECKPOINTS * n_bytes / MIB))]


def _same_lengths(run: WorkloadRun, messages: Sequence[Message]) -> list[Message]:
    """Messages of the same roles and lengths, with other text."""
    return [each | {"content": run.text(len(run.tokens.of(each["content"])))} for each in messages]
