"""Run a soak: start a server, keep it busy, let it become idle now and then, and judge what was sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import statistics
from pathlib import Path
from time import perf_counter

import psutil
from rich.table import Table

from bench.client import BenchmarkError
from bench.report import console, machine, notes
from bench.server import llamaslot, serving
from bench.soak.agents import AGENTS
from bench.soak.clients import CLIENTS, KEYS, Client, Load, connected
from bench.soak.plot import draw
from bench.soak.samples import ENGINE, PROMPTS, Observer, Sample, processes
from bench.soak.verdict import Row, verdict

SAMPLE_S = 2.0
IDLE_EVERY_S = 60.0
DRAIN_S = 120.0
"""Requests that are not done by then are stuck."""
CLOSING_S = 3.0
"""Until the connections of earlier requests are closed, and invariants are checked."""
FAULT_EVERY_S = 45.0
MAX_SECONDS = 24 * 3600
FLAGS = (
    "-c", "8192", "-np", "4", "-t", "1", "--cache-ram", "128", "--cache-disk-size", "256", "--metrics",
    "--debug-invariants", "--log-format", "json", "--cache-salt-from-api-key",
)  # fmt: skip
ADMIN = "admin"
"""Key of the observer."""


class Soak:
    """One run; samples are appended to `data` as they are taken, so that those of an aborted run are there."""

    def __init__(self, observer: Observer, load: Load, pid: int, seconds: float, data: Path) -> None:
        self._observer = observer
        self._load = load
        self._pid = pid
        self._seconds = seconds
        self._data = data
        self._started = perf_counter()
        self.duration = 0.0
        """Seconds from the start to the end of the load."""
        self.samples: list[Sample] = []
        self.idle: list[Sample] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self._started

    async def run(self, *, faults: bool) -> None:
        """Keep the server busy for the time; raises what a client or sampler raises."""
        self._load.open.set()
        tasks = [asyncio.create_task(self._repeat(client)) for client in (*CLIENTS, *AGENTS)]
        tasks.append(asyncio.create_task(self._sample()))
        if faults:
            tasks.append(asyncio.create_task(self._kill()))
        main = asyncio.create_task(self._visit_idle_points())
        try:
            await asyncio.wait([main, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (main, *tasks):
                if task.done():
                    task.result()
        finally:
            self.duration = self.elapsed
            for task in (main, *tasks):
                task.cancel()
            await asyncio.gather(main, *tasks, return_exceptions=True)

    async def _repeat(self, client: Client) -> None:
        while True:
            await client(self._load)

    async def _visit_idle_points(self) -> None:
        every = min(IDLE_EVERY_S, self._seconds / 4)
        while True:
            await asyncio.sleep(min(every, max(self._seconds - self.elapsed, 0.1)))
            self._load.open.clear()
            await self._drain()
            self._add(await self._until_running(), self.idle, "idle")
            if self.elapsed >= self._seconds:
                # The clients stay shut out: an engine that is killed now would still be gone at the server's end.
                return
            self._load.open.set()

    async def _drain(self) -> None:
        """Wait until no request is at work and connections are closed."""
        deadline = perf_counter() + DRAIN_S
        while self._load.n_active:
            if perf_counter() > deadline:
                self._load.note("stuck", f"{self._load.n_active} requests were not done after {DRAIN_S:.0f} s")
                return
            await asyncio.sleep(0.05)
        await asyncio.sleep(CLOSING_S)

    async def _until_running(self) -> Sample:
        """A sample of a server whose engine is not restarting."""
        for _ in range(300):
            sample = await self._observer.sample()
            if "busy_slots" in sample and ENGINE in sample["processes"]:
                return sample
            await asyncio.sleep(0.2)
        raise BenchmarkError("the engine was not back within a minute")

    async def _sample(self) -> None:
        while True:
            sample = await self._observer.sample()
            gaps = sorted(self._load.take_gaps())
            if gaps:
                sample["gap_p50_s"] = statistics.median(gaps)
                sample["gap_p99_s"] = gaps[int(0.99 * (len(gaps) - 1))]
            self._add(sample, self.samples, "sample")
            await asyncio.sleep(SAMPLE_S)

    async def _kill(self) -> None:
        """Kill the engine or the prompt worker now and then, while requests run."""
        while True:
            await asyncio.sleep(min(FAULT_EVERY_S, self._seconds / 3))
            await self._load.open.wait()
            name = self._load.chance.choice((ENGINE, PROMPTS))
            with contextlib.suppress(psutil.Error, KeyError):
                processes(self._pid)[name].kill()
                self._load.note(f"killed the {name}")

    def _add(self, sample: Sample, to: list[Sample], kind: str) -> None:
        sample["t"] = self.elapsed
        to.append(sample)
        with self._data.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **sample, "outcomes": dict(self._load.outcomes)}) + "\n")


def run(*, minutes: float, faults: bool, folder: Path, seed: int) -> int:
    """Run a soak, write `soak.jsonl` and `soak.png` to the folder, print the verdicts; 1 if one is missed."""
    if not 0 < minutes * 60 <= MAX_SECONDS:
        raise BenchmarkError(f"--minutes must be above 0 and at most {MAX_SECONDS // 60}")
    seconds = 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    rows = asyncio.run(_run(seconds, faults, folder, seed))
    table = Table(title=f"Soak of {minutes:g} minutes{', with kills' if faults else ''}")
    for column in ("", "figure", "limit", "verdict"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.name, row.figure, row.limit, row.verdict)
    console.print(table)
    return int(any(row.met is False for row in rows))


async def _run(seconds: float, faults: bool, folder: Path, seed: int) -> list[Row]:
    data, log, cache = folder / "soak.jsonl", folder / "soak-server.log", folder / "soak-cache"
    data.write_text(json.dumps({"kind": "run", "seconds": seconds, "seed": seed, "machine": machine()}) + "\n")
    keys = folder / "soak-keys"
    keys.write_text("".join(f"{key} user\n" for key in KEYS) + f"{ADMIN} admin\n")
    shutil.rmtree(cache, ignore_errors=True)
    notes.print(f"soak: {seconds / 60:g} minutes, seed {seed}, data in {data}")
    async with (
        serving(
            llamaslot("demo", *FLAGS, "--cache-disk", str(cache), "--api-key-file", str(keys)), log=log
        ) as server,
        connected(server.url) as session,
        connected(server.url, ADMIN) as own,
    ):
        load = Load(session, random.Random(seed))
        soak = Soak(Observer(server.pid, own), load, server.pid, seconds, data)
        await soak.run(faults=faults)
    notes.print(f"soak: {dict(load.outcomes)}")
    shutil.rmtree(cache, ignore_errors=True)
    problems = [*load.unexpected, *_errors(log, faults)]
    for problem in problems:
        notes.print(f"soak: {problem}")
    draw(soak.samples, soak.idle, soak.duration, folder / "soak.png", _title(seconds, faults))
    notes.print(f"plot: {folder / 'soak.png'}")
    return verdict(soak.samples, soak.idle, soak.duration, len(problems))


def _title(seconds: float, faults: bool) -> str:
    kind = "kills of engine and prompt worker" if faults else "no restarts"
    return f"llamaslot, {seconds / 60:g} minutes of mixed requests, {kind}; green: where growth is measured"


def _errors(log: Path, faults: bool) -> list[str]:
    """The server's errors, such as broken invariants; without those that kills bring."""
    lines = [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    expected = ("engine.ended", "prompt_worker.ended") if faults else ()
    errors = [each for each in lines if each["level"] in ("error", "critical") and each["event"] not in expected]
    return [f"the server's log: {str(each)[:500]}" for each in errors[:20]]
