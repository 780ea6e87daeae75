"""`python -m bench traces`: recorded agent sessions on llamaslot and on llama-server.

Sessions run side by side, with their recorded pauses shortened, or, to count rather than to time, one request after
another in the order of the recording. The oracle is a server that never forgets anything: it computes the fewest
possible prompt tokens of the requests in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.table import Table

from bench.client import BenchmarkError, Client
from bench.peers.servers import FOLDER, OWN, SERVERS, CommonSettings, ServerSetup
from bench.progress import progress
from bench.report import console, machine, notes, write_json
from bench.server import serving
from bench.tokens import Tokens, fewest
from bench.traces.recording import MAX_DELAY_S, Context, Planned, fitting, plan, read, requests_of
from bench.traces.replay import BlockTokens, Replay, Replayed, fits

SETUPS = (
    *(each for each in SERVERS if each.kind != "llama-cpp-python" and not each.workloads),
    ServerSetup("llamaslot, with a disk", "llamaslot", ("--cache-disk", FOLDER)),
)
"""Servers that complete token ids."""
NAMES = tuple(each.name for each in SETUPS)
USUAL = "llama-server", "llama-server -kvu", OWN
WRITES_POLL_S = 3.0
"""Interval after which a server that has written nothing more has nothing more to write: partial segments wait for
a second.
"""


@dataclass(frozen=True)
class Settings:
    """The recordings of a replay, and its parameters."""

    directory: Path
    """Folder of the recorded sessions."""
    n_sessions: int
    n_requests: int
    """Of all sessions together."""
    n_slots: int
    n_ctx_slot: int
    """Tokens that a slot can hold; a session ends at its first longer request."""
    time_scale: float
    in_turn: bool
    """One request after another, without pauses."""
    seed: int


@dataclass(frozen=True)
class TraceRun:
    """One replay on one server; times in seconds."""

    server: str
    repeat: int
    n_prompt: int
    n_computed: int
    n_fewest: int
    ttft: list[float]
    """Of each request, in the order in which they were sent; so are the other lists."""
    wall: float
    contexts: list[str]
    prompt_tokens: list[int]
    computed_tokens: list[int]
    ram_bytes: int | None
    """KV saved to RAM and written to disk; None where the server does not say."""
    disk_bytes: int | None
    model_cpu: float
    """CPU time of the process that computes the model, from the first request to the last reply."""

    @property
    def share_of_hits(self) -> float:
        """Reused prompt tokens, divided by those that the oracle reuses."""
        possible = self.n_prompt - self.n_fewest
        return (self.n_prompt - self.n_computed) / possible if possible else 1.0


def run(
    *,
    settings: Settings,
    model: Path,
    title: str,
    repeats: int,
    threads: int,
    against: Sequence[str],
    folder: Path,
    server_flags: Sequence[str],
) -> None:
    """Replay, print the table, write `traces.json` and the log of the server that ran last."""
    facts = machine()
    planned = chosen(settings)
    servers = [each for each in SETUPS if each.name in (against or USUAL)]
    n_ctx = settings.n_slots * settings.n_ctx_slot
    common = CommonSettings(model, settings.n_slots, threads, n_ctx, tuple(server_flags))
    replays = _Replays(settings, planned, Tokens(model).n_vocab, common, folder)
    runs: list[TraceRun] = []
    for repeat in range(repeats):
        # A B B A: slow changes of the machine's speed affect all of them alike.
        for server in servers if repeat % 2 == 0 else servers[::-1]:
            runs.append(asyncio.run(replays.on(server, repeat)))
    console.print(table(runs, title, settings))
    content: dict[str, Any] = {"benchmark": "traces", "machine": facts}
    content |= {
        "settings": {"model": title, "threads": threads, "repeats": repeats, "flags": " ".join(server_flags)}
    }
    content["settings"] |= asdict(replace(settings, directory=Path(settings.directory.name))) | {
        "directory": settings.directory.name
    }
    write_json(folder / "traces.json", content | {"runs": [asdict(each) for each in runs]})


def chosen(settings: Settings) -> list[Planned]:
    """Choose sessions that fit, and plan their requests; the same for the same seed and folder."""
    files = sorted(settings.directory.glob("*.json"))
    if not files:
        raise BenchmarkError(f"--dir {settings.directory}: there are no recorded sessions (*.json)")
    chance = random.Random(settings.seed)
    chance.shuffle(files)
    sessions: list[tuple[float, Context]] = []
    n_read = 0
    for file in files:
        if len(sessions) == settings.n_sessions:
            break
        n_read += 1
        session = fitting(read(file), lambda request: fits(request, settings.n_ctx_slot))
        if any(True for _ in requests_of(session)):
            sessions.append((chance.uniform(0, MAX_DELAY_S), session))
    planned = plan(sessions, settings.n_requests)
    if not planned:
        raise BenchmarkError(
            f"no session of {settings.directory} has a prompt that fits {settings.n_ctx_slot} tokens"
        )
    n_contexts = len({each.context for each in planned})
    notes.print(
        f"{len(planned)} requests of {len(sessions)} sessions, {n_contexts} agents and sub-agents; "
        f"{n_read - len(sessions)} sessions do not fit a slot"
    )
    return planned


@dataclass(frozen=True)
class _Replays:
    """Replays of one plan, each on a new server process."""

    settings: Settings
    plan: Sequence[Planned]
    n_vocab: int
    common: CommonSettings
    folder: Path

    async def on(self, server: ServerSetup, repeat: int) -> TraceRun:
        """Replay the plan on a server."""
        settings, is_own = self.settings, server.kind == "llamaslot"
        with tempfile.TemporaryDirectory() as disk:
            command = server.command(self.common, (), Path(disk))
            async with serving(command, log=self.folder / "traces-server.log") as process:
                tokens = BlockTokens(self.n_vocab, settings.seed)
                cpu_before = model_cpu(process.pid)
                replay = Replay(process.client, tokens, self.plan, settings.time_scale)
                with progress(f"{server.name}, repeat {repeat + 1}:", len(self.plan), interval_s=5.0) as advance:
                    await (replay.in_turn(advance) if settings.in_turn else replay.side_by_side(advance))
                cpu = model_cpu(process.pid) - cpu_before
                n_bytes = await written(process.client) if is_own else (None, None)
        return result(server.name, repeat, replay.sent, n_bytes, cpu)


def model_cpu(pid: int) -> float:
    """CPU time so far of a server's process, or of the one it started that has taken most."""
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return max(float(each.user + each.system) for each in times)


async def written(client: Client) -> tuple[int | None, int | None]:
    """Bytes of KV that llamaslot has saved to RAM and written to disk, once it has nothing more to write."""
    before = None
    while True:
        state = await client.get("/cache")
        now = state["ram"].get("saved_bytes"), state["disk"]["written_bytes"]
        if now == before:
            return now
        before = now
        await asyncio.sleep(WRITES_POLL_S)


def result(
    server: str, repeat: int, sent: Sequence[Replayed], n_bytes: tuple[int | None, int | None], cpu: float
) -> TraceRun:
    """Return the figures of a replay."""
    replies = [each.reply for each in sent]
    return TraceRun(
        server=server,
        repeat=repeat,
        n_prompt=sum(len(each.prompt) for each in sent),
        n_computed=sum(reply.computed for reply in replies),
        n_fewest=fewest([(each.prompt, each.reply.tokens) for each in sent]),
        ttft=[reply.ttft for reply in replies],
        wall=max(reply.ended for reply in replies) - min(reply.started for reply in replies),
        contexts=[each.planned.context for each in sent],
        prompt_tokens=[len(each.prompt) for each in sent],
        computed_tokens=[reply.computed for reply in replies],
        ram_bytes=n_bytes[0],
        disk_bytes=n_bytes[1],
        model_cpu=cpu,
    )


def table(runs: Sequence[TraceRun], title: str, settings: Settings) -> Table:
    """A line for each server: medians over the repeats."""
    how = "one after another" if settings.in_turn else f"pauses x {settings.time_scale:g}"
    rendered = Table(
        title=f"{len(runs[0].ttft)} requests of recorded agent sessions, {title}, {how}",
        caption="medians over the repeats; hits: reused tokens / those the oracle reuses; x: computed / fewest "
        "possible; TTFT in ms; CPU: of the model's process; MiB of KV saved to RAM and written to disk",
    )
    names = (
        "prompt",
        "computed",
        "fewest",
        "x",
        "hits",
        "TTFT mean",
        "p50",
        "p95",
        "wall (s)",
        "CPU (s)",
        "RAM",
        "disk",
    )
    rendered.add_column("server")
    for name in names:
        rendered.add_column(name, justify="right")
    for server in dict.fromkeys(each.server for each in runs):
        of = [each for each in runs if each.server == server]
        rendered.add_row(server, *_cells(of))
    return rendered


def _cells(runs: Sequence[TraceRun]) -> list[str]:
    counts = [
        statistics.median(each)
        for each in zip(*((r.n_prompt, r.n_computed, r.n_fewest) for r in runs), strict=True)
    ]
    ttft = [
        1e3 * statistics.median(of)
        for of in zip(*((np.mean(r.ttft), *np.percentile(r.ttft, (50, 95))) for r in runs), strict=True)
    ]
    cells = [f"{count:,.0f}" for count in counts]
    cells.append(f"{statistics.median(r.n_computed / r.n_fewest for r in runs):.2f}")
    cells.append(f"{statistics.median(r.share_of_hits for r in runs):.1%}")
    cells += [f"{time:,.0f}" for time in ttft]
    cells.append(f"{statistics.median(r.wall for r in runs):,.1f}")
    cells.append(f"{statistics.median(r.model_cpu for r in runs):,.1f}")
    for n_bytes in ([r.ram_bytes for r in runs], [r.disk_bytes for r in runs]):
        known = [n for n in n_bytes if n is not None]
        cells.append(f"{statistics.median(known) / 2**20:,.1f}" if known else "")
    return cells
