"""Samples of a server during a soak: memory, descriptors and threads of its processes, latency, hit rate, queue."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any, TypeAlias

import aiohttp
import psutil

from bench.client import BenchmarkError

Sample: TypeAlias = dict[str, Any]

PARENT, PROMPTS, ENGINE = "parent", "prompt worker", "engine"
_MODULES = {"llamaslot.app.runtime.prompt_main": PROMPTS, "llamaslot.app.runtime.engine_main": ENGINE}
MIB = 2**20


def processes(pid: int) -> dict[str, psutil.Process]:
    """The processes of a server, by their names here; children that are being started again are missing."""
    parent = psutil.Process(pid)
    found = {PARENT: parent}
    for child in parent.children():
        with contextlib.suppress(psutil.Error):
            line = child.cmdline()
            found |= {name: child for module, name in _MODULES.items() if module in line}
    return found


def measure_processes(pid: int) -> Sample:
    """Memory in bytes, descriptors and threads of each process, and its process id."""
    sample: Sample = {}
    for name, process in processes(pid).items():
        with contextlib.suppress(psutil.Error), process.oneshot():
            sample[name] = {
                "pid": process.pid,
                "rss": process.memory_info().rss,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
    return sample


class Observer:
    """Asks a server about itself; `session` is not the one of the load."""

    def __init__(self, pid: int, session: aiohttp.ClientSession) -> None:
        self._pid = pid
        self._session = session
        self._totals = (0, 0)

    async def sample(self) -> Sample:
        """One sample; the parts that ask the engine are missing while it is restarting."""
        result = {"processes": measure_processes(self._pid)}
        result["health_s"] = await self._health_seconds()
        result["restarts"] = await self._metric("llamaslot_restarts_total")
        cache, slots = await self._json("/cache?top=1"), await self._json("/slots")
        if cache is not None and slots is not None:
            result |= {
                "tier_bytes": cache["ram"]["used_bytes"],
                "remembered_bytes": sum(cache[each]["bytes"] for each in ("anchors", "sessions", "messages")),
                "disk_bytes": cache["disk"]["used_bytes"],
                "corrupt_files": cache["disk"]["corrupt_files"],
                "pinned_cells": cache["cells"]["pinned"],
                "hit_rate": self._hit_rate(cache["prompt_tokens"]),
                "busy_slots": sum(slot["is_processing"] for slot in slots),
                "queued": await self._metric("llamacpp:requests_deferred"),
            }
        return result

    def _hit_rate(self, prompt_tokens: dict[str, int]) -> float | None:
        """Share of prompt tokens that were reused since the last sample; an engine's counters begin at 0."""
        total, matched = prompt_tokens["total"], prompt_tokens["matched"]
        n_total, n_matched = total - self._totals[0], matched - self._totals[1]
        self._totals = (total, matched)
        return n_matched / n_total if n_total > 0 and n_matched >= 0 else None

    async def _health_seconds(self) -> float:
        started = perf_counter()
        async with self._session.get("/health") as response:
            await response.read()
        return perf_counter() - started

    async def _json(self, path: str) -> Any:
        async with self._session.get(path) as response:
            return await response.json() if response.status == 200 else None

    async def _metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        async with self._session.get("/metrics") as response:
            if response.status == 503:
                return 0.0
            lines = (await response.text()).splitlines()
        # A metric with labels is only announced until it counts something.
        if not any(line.startswith(f"# TYPE {name} ") for line in lines):
            raise BenchmarkError(f"the server has no metric {name}")
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(values)


def engine_less_tier(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Time and bytes of the engine without its RAM tier."""
    return [
        (sample["t"], sample["processes"][ENGINE]["rss"] - sample["tier_bytes"])
        for sample in samples
        if ENGINE in sample["processes"] and "tier_bytes" in sample
    ]


def parent_less_records(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Time and bytes of the parent without the replies and conversations that it remembers.

    It keeps a copy of them for a prompt worker that is started again, 34 MiB at most.
    """
    return [
        (sample["t"], sample["processes"][PARENT]["rss"] - sample["remembered_bytes"])
        for sample in samples
        if PARENT in sample["processes"] and "remembered_bytes" in sample
    ]


def memory_of(samples: Sequence[Sample], process: str) -> list[tuple[float, float]]:
    """Time and bytes of a process."""
    return [(s["t"], s["processes"][process]["rss"]) for s in samples if process in s["processes"]]
