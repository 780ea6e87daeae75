"""`python -m bench one-shot`: bytes that are not written because one-shot prompts are evicted earlier.

Each workload runs on llamaslot twice, one request after another: with `--cache-one-shot` 0 and 16.
The figures are counts: prompt tokens that were computed, and bytes of KV that went to RAM and to disk. Workloads
are the coding agent of `bench.peers` and, if a folder is given, recorded sessions with title requests between them,
which the recordings do not have.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from bench.client import BenchmarkError
from bench.peers.workloads import OVERHEAD, WorkloadRun, agent
from bench.progress import progress
from bench.report import console, machine, write_json
from bench.server import Server, llamaslot, serving
from bench.tokens import Tokens, fewest
from bench.traces.recording import Planned, Recorded
from bench.traces.replay import BlockTokens, Replay
from bench.traces.run import Settings, chosen, written

SIDES = {"off": ("--cache-one-shot", "0"), "on": ("--cache-one-shot", "16")}
AGENT_TOKENS = 10_600
"""Tokens of the agent's longest prompt with its reply."""
TITLE_BLOCKS = 40, 240
"""Fewest and most blocks of a title request's prompt: 60 to 360 tokens."""
TITLE_REPLY_BLOCKS = 10.0


@dataclass(frozen=True)
class Counted:
    """One workload on one side."""

    workload: str
    side: str
    n_requests: int
    n_prompt: int
    n_computed: int
    n_fewest: int
    ram_bytes: int
    disk_bytes: int

    @property
    def share_of_hits(self) -> float:
        """Reused prompt tokens, divided by the most that can be reused."""
        return (self.n_prompt - self.n_computed) / max(self.n_prompt - self.n_fewest, 1)


Workload = Callable[[Server], Awaitable[list[tuple[Sequence[int], Sequence[int], int]]]]
"""Sends requests; returns prompt, reply and computed tokens of each."""


def with_titles(planned: Sequence[Planned], every: int, seed: int) -> list[Planned]:
    """Insert the title request of a new session after every so many requests; they have no session id."""
    chance = random.Random(seed)
    result: list[Planned] = []
    number: dict[int, int] = {}
    for i, each in enumerate(planned):
        number[i] = len(result)
        result.append(each.renumbered(number))
        if (i + 1) % every == 0:
            name = f"title {i}"
            request = Recorded(0.0, 0.0, TITLE_REPLY_BLOCKS, tuple(range(chance.randint(*TITLE_BLOCKS))))
            result.append(Planned(each.at_s, name, name, request, None, (), has_session=False))
    return result


def run(
    *,
    settings: Settings | None,
    titles_every: int,
    scale: float,
    repeats: int,
    model: Path,
    title: str,
    folder: Path,
    server_flags: Sequence[str],
) -> None:
    """Measure, print the table, write `one-shot.json`."""
    tokens = Tokens(model)
    counted: list[Counted] = []
    for seed in range(repeats):
        n_agent = 2 * round(AGENT_TOKENS * scale + 4 * OVERHEAD)
        workloads: dict[str, tuple[int, int, Workload]] = {"agent": (2, n_agent, _agent(tokens, scale, seed))}
        if settings is not None:
            of = replace(settings, seed=settings.seed + seed)
            replay = _replay(with_titles(chosen(of), titles_every, of.seed), tokens.n_vocab, of.seed)
            workloads["traces"] = of.n_slots, of.n_slots * of.n_ctx_slot, replay
        for name, (n_slots, n_ctx, workload) in workloads.items():
            for side, flags in SIDES.items():
                command = llamaslot(model, "-np", str(n_slots), "-c", str(n_ctx), *flags, *server_flags)
                log = folder / "one-shot-server.log"
                counted.append(asyncio.run(_count(name, side, command, workload, log)))
    console.print(table(counted, title))
    content = {"benchmark": "one-shot", "machine": machine(), "runs": [asdict(each) for each in counted]}
    content["settings"] = {"model": title, "flags": " ".join(server_flags), "scale": scale} | (
        asdict(settings) | {"directory": settings.directory.name, "titles_every": titles_every} if settings else {}
    )
    write_json(folder / "one-shot.json", content)


async def _count(name: str, side: str, command: Sequence[str], workload: Workload, log: Path) -> Counted:
    with tempfile.TemporaryDirectory() as disk:
        async with serving([*command, "--cache-disk", disk], log=log) as server:
            sent = await workload(server)
            ram_bytes, disk_bytes = await written(server.client)
    if ram_bytes is None or disk_bytes is None:
        raise BenchmarkError("this llamaslot does not count the bytes that it saves")
    return Counted(
        workload=name,
        side=side,
        n_requests=len(sent),
        n_prompt=sum(len(prompt) for prompt, _, _ in sent),
        n_computed=sum(n for _, _, n in sent),
        n_fewest=fewest([(prompt, reply) for prompt, reply, _ in sent]),
        ram_bytes=ram_bytes,
        disk_bytes=disk_bytes,
    )


def _agent(tokens: Tokens, scale: float, seed: int) -> Workload:
    async def send(server: Server) -> list[tuple[Sequence[int], Sequence[int], int]]:
        run = WorkloadRun(server, tokens, random.Random(seed), scale)
        await agent(run)
        return [
            (tokens.prompt(each.messages), tokens.of(each.answer.text), each.answer.computed)
            for each in run.requests
        ]

    return send


def _replay(planned: Sequence[Planned], n_vocab: int, seed: int) -> Workload:
    async def send(server: Server) -> list[tuple[Sequence[int], Sequence[int], int]]:
        replay = Replay(server.client, BlockTokens(n_vocab, seed), planned, time_scale=0.0)
        with progress("replayed", len(planned), interval_s=10.0) as advance:
            await replay.in_turn(advance)
        return [(each.prompt, each.reply.tokens, each.reply.computed) for each in replay.sent]

    return send


def table(counted: Sequence[Counted], title: str) -> Table:
    """Two lines for each workload."""
    result = Table(
        title=f"One-shot prompts, {title}",
        caption="hits: reused tokens / the most that can be reused; MiB of KV saved to RAM and written to disk",
    )
    for name in ("workload", "one-shot"):
        result.add_column(name)
    for name in ("requests", "prompt", "computed", "fewest", "hits", "RAM", "disk"):
        result.add_column(name, justify="right")
    for each in counted:
        counts = (each.n_requests, each.n_prompt, each.n_computed, each.n_fewest)
        cells = [each.workload, each.side, *(f"{n:,}" for n in counts), f"{each.share_of_hits:.1%}"]
        result.add_row(*cells, *(f"{n / 2**20:,.2f}" for n in (each.ram_bytes, each.disk_bytes)))
    return result
