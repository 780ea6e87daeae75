"""Setups to compare: one large server, and fleets with their gateways; the settings that all of them share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.fleet.processes import FleetProcess, running
from bench.fleet.traffic import Api, Lengths
from bench.report import notes

ONE = "one large server"
SETUPS = {ONE: "", "smg, by cached prefix": "smg", "nginx, by session": "nginx", "round robin": "roundrobin"}
"""A server or fleet to measure, and the fleet's gateway."""
N_SYSTEMS = 4
LENGTHS = Lengths(system=1000, user=60, reply=32)
MODEL = "fleet"
APIS: tuple[Api, ...] = ("chat", "messages", "responses")
PARTS = ("compare", "kill", "rolling")


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark, which all setups share."""

    model: Path
    title: str
    parts: Sequence[str] = PARTS
    setups: Sequence[str] = tuple(SETUPS)
    apis: Sequence[Api] = APIS
    n_workers: int = 3
    n_conversations: int = 24
    n_turns: int = 6
    lengths: Lengths = LENGTHS
    slots: int = 4
    """Slots of each worker."""
    threads: int = 2
    """Threads of the one large server; each worker has an equal part of as many."""
    pause_s: float = 1.0
    """Mean time between an answer and the next turn."""
    seed: int = 1
    flags: tuple[str, ...] = ()
    """Further flags of all servers."""
    fleet_flags: tuple[str, ...] = ()
    """Further flags of `fleet.py up`, such as `--cache-remote URL`."""
    nginx: str = ""
    """Path of the program, if it is not in PATH."""

    @property
    def worker_threads(self) -> int:
        """Threads of each worker."""
        return max(1, self.threads // self.n_workers)

    @property
    def cells(self) -> int:
        """Cells of each worker: all conversations fit into those of all workers together."""
        needed = self.n_conversations * self.lengths.longest(self.n_turns) // self.n_workers
        return -(-needed // 256) * 256

    def server_flags(self, n_workers: int = 1) -> list[str]:
        """Return the flags of a server with the slots and cells of so many workers."""
        threads = str(self.worker_threads if n_workers == 1 else self.threads)
        flags = ["-np", str(n_workers * self.slots), "-c", str(n_workers * self.cells), "-t", threads]
        # The APIs have no field by which all replies would get the same length.
        return [*flags, "-tb", threads, "--alias", MODEL, "--ignore-eos", "--temp", "0", *self.flags]


def shortened(settings: Settings) -> Settings:
    """The same with few short conversations: a look, not a measurement."""
    return replace(
        settings, n_conversations=8, n_turns=3, lengths=Lengths(system=200, user=20, reply=8), pause_s=0.1
    )


def available(wanted: Sequence[str], nginx: str) -> list[str]:
    """Return the setups that are asked for, or all but nginx's where there is no nginx."""
    if wanted:
        return list(wanted)
    has_nginx = bool(nginx or shutil.which("nginx") or shutil.which("/usr/sbin/nginx"))
    if not has_nginx:
        notes.print("nginx was not found (--nginx FILE): its setup is left out")
    return [name for name, gateway in SETUPS.items() if has_nginx or gateway != "nginx"]


@asynccontextmanager
async def fleet(settings: Settings, setup: str, *more: str) -> AsyncIterator[FleetProcess]:
    """Run a fleet in an empty folder; `more` are flags of `fleet.py up`."""
    gateway = SETUPS[setup]
    flags = ["--gateway", gateway, "-m", str(settings.model), "--workers", str(settings.n_workers)]
    if gateway == "nginx" and settings.nginx:
        flags += ["--gateway-program", settings.nginx]
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        flags += [*settings.fleet_flags, *more]
        async with running(Path(folder), flags, settings.server_flags()) as process:
            yield process


def ttft_cells(ttft: Sequence[float]) -> tuple[str, str]:
    """Return mean and 95th percentile of TTFTs as cells of a table; empty without any."""
    if not ttft:
        return "", ""
    return milliseconds(float(np.mean(ttft))), milliseconds(float(np.percentile(ttft, 95)))


def median_cell(times: Sequence[float]) -> str:
    """Return the median of times as a cell of a table; empty without any."""
    return milliseconds(float(np.median(times))) if times else ""


def milliseconds(seconds: float) -> str:
    """Return a time as text for a table."""
    return f"{1000 * seconds:,.0f} ms"
