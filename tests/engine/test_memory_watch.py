"""The RAM tier gives memory back while it is short; requests go on, and the pool keeps what it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from llamaslot.backend.disk import DiskStore
from llamaslot.base.commands import InspectCache
from llamaslot.base.events import Finished, Progress
from llamaslot.base.stats import RamStats
from llamaslot.engine import measurements
from llamaslot.kvcache.nodes import SegmentState
from llamaslot.kvcache.tiers import budget, pacing
from llamaslot.kvcache.tiers.budget import MemoryReading
from tests.engine.harness import Harness, alone, running
from tests.fake_backend import FakeBackend

PROMPTS = [f"{i} is where this one begins. " * 12 for i in range(3)]
AMPLE, CRITICAL = MemoryReading(9 * 10**6, 10**7), MemoryReading(10**5, 10**7)


class Memory:
    """Readings of the host's memory, set by the test."""

    def __init__(self) -> None:
        self.reading = AMPLE
        self.n_reads = 0

    def read(self) -> MemoryReading:
        """Return `reading`."""
        self.n_reads += 1
        return self.reading


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_MEMORY_INTERVAL_S", 0.001)
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)


def backend() -> FakeBackend:
    return FakeBackend(n_slots=2, n_ctx=768, n_reserved=2)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def ram(engine: Harness) -> RamStats:
    stats: RamStats = (await engine.ask(InspectCache(top=1, text=False))).ram
    return stats


def events(logs: list[dict[str, object]]) -> list[object]:
    return [each["event"] for each in logs if str(each["event"]).startswith("ram.")]


async def test_ram_is_emptied_while_memory_is_critical_and_used_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "CALM_S", 0.0)
    memory, pool = Memory(), backend()
    expected = [await alone(prompt, FakeBackend(n_slots=1, n_ctx=768)) for prompt in PROMPTS]
    with capture_logs() as logs:
        async with running(
            pool, debug_invariants=True, ram_bytes=10**5, ram_is_fixed=False, read_memory=memory.read
        ) as engine:

            async def run(turn: str) -> list[int]:
                computed = []
                for i, prompt in enumerate(PROMPTS):
                    end = await engine.submit(f"{turn}-{i}", prompt)
                    assert isinstance(end, Finished)
                    assert engine.text(f"{turn}-{i}") == expected[i]
                    computed.append(end.progress.n_prompt_computed)
                return computed

            await run("first")
            assert pool.segments, "the pool has no room for all three"
            memory.reading = CRITICAL
            await until(lambda: not pool.segments)
            stats = await ram(engine)
            assert (stats.total_bytes, stats.used_bytes, stats.max_bytes) == (0, 0, 10**5)
            assert (stats.state, stats.reason) == ("reduced", "little free memory")
            assert engine.engine.scheduler.cache.cells.idle > 0, "the pool lost what it had"
            again = await run("critical")
            assert not pool.segments
            assert max(again) > 200, "one of them was only in RAM"
            n_reads = memory.n_reads
            await until(lambda: memory.n_reads > n_reads + 20)
            assert events(logs) == ["ram.reduced"], "logged more than once"
            memory.reading = AMPLE
            await until(lambda: engine.engine.scheduler.cache.ram_budget.n_bytes == 10**5)
            await run("ample")
            assert await run("last") == [1, 1, 1]
            assert (await ram(engine)).reason == ""
    assert events(logs) == ["ram.reduced", "ram.growing", "ram.normal"]
    assert engine.stopped is not None
    assert not engine.stopped.reason


async def test_a_fixed_size_stays_and_the_log_tells_once() -> None:
    memory, pool = Memory(), backend()
    with capture_logs() as logs:
        async with running(pool, ram_bytes=10**5, read_memory=memory.read) as engine:
            for i, prompt in enumerate(PROMPTS):
                await engine.submit(str(i), prompt)
            n_segments = len(pool.segments)
            assert n_segments
            memory.reading = CRITICAL
            await until(lambda: memory.n_reads > 20)
            stats = await ram(engine)
            assert len(pool.segments) == n_segments
    assert (stats.total_bytes, stats.state, stats.reason) == (10**5, "reduced", "little free memory")
    assert events(logs) == ["ram.memory_short"]


async def test_segments_that_are_on_disk_leave_ram_first(tmp_path: Path) -> None:
    memory = Memory()
    store = DiskStore(tmp_path)
    store.open(b"k" * 32, 10**7)
    settings = {"disk": store, "disk_bytes_per_day": 1, "ram_bytes": 10**5, "ram_is_fixed": False, "idle_cells": 0}
    async with running(backend(), read_memory=memory.read, **settings) as engine:
        tiers, disk_tier = engine.engine.scheduler.cache._tiers, engine.engine.scheduler.cache._disk
        await engine.submit("0", PROMPTS[0])
        await until(lambda: bool(tiers.disk.n_tokens) and not disk_tier.writing)
        for i in (1, 2):
            await engine.submit(str(i), PROMPTS[i])
        await engine.submit("again", PROMPTS[0])
        await until(lambda: tiers.ram.n_tokens >= 3 * len(PROMPTS[0]))
        newest = max(tiers.ram, key=lambda each: each.last_used)
        assert newest.state is SegmentState.CLEAN, "only the first was written, and it was used last"
        # 50 bytes are missing, less than a segment has.
        memory.reading = MemoryReading(950, 10_000)
        await until(lambda: newest.state is SegmentState.DISK)
        memory.reading = MemoryReading(1200, 10_000)
        assert tiers.ram.n_tokens >= 2 * len(PROMPTS[1]), "others were evicted before it"
    store.close()


async def test_what_only_the_disk_has_is_not_cached_while_ram_may_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are read into RAM. While they cannot be, requests compute the prefix once and share it."""
    monkeypatch.setattr(budget, "CALM_S", 0.0)
    memory = Memory()
    store = DiskStore(tmp_path)
    store.open(b"k" * 32, 10**7)
    settings = {"disk": store, "ram_bytes": 10**5, "ram_is_fixed": False, "idle_cells": 0}
    n = len(PROMPTS[0]) + 1  # with a BOS
    async with running(backend(), debug_invariants=True, read_memory=memory.read, **settings) as engine:
        cache = engine.engine.scheduler.cache

        async def ask(name: str) -> Progress:
            end = await engine.submit(name, PROMPTS[0], max_tokens=1)
            assert isinstance(end, Finished)
            return end.progress

        assert (await ask("cold")).n_prompt_computed == n
        await until(lambda: cache._tiers.disk.n_tokens == n and not cache._disk.writing)
        memory.reading = CRITICAL
        await until(lambda: cache._tiers.ram.capacity == 0)
        await engine.submit("other", PROMPTS[1], max_tokens=1)
        short = await asyncio.gather(ask("a"), ask("b"))
        assert engine.text("a") == engine.text("b") == engine.text("cold")
        assert sorted(each.n_prompt_computed for each in short) == [1, n], "computed twice"
        assert [each.miss for each in short if each.n_prompt_computed == n] == ["evicted"]
        memory.reading = AMPLE
        await until(lambda: cache._tiers.ram.capacity == 10**5)
        assert (await ask("ample")).n_read == n - 1
    store.close()


async def test_without_ram_nothing_is_watched_and_a_source_that_fails_ends_nothing() -> None:
    memory = Memory()
    async with running(backend(), read_memory=memory.read) as engine:
        assert isinstance(await engine.submit("r", PROMPTS[0]), Finished)
    assert memory.n_reads == 0

    def fail() -> MemoryReading:
        raise OSError("no such file")

    async with running(backend(), ram_bytes=10**5, read_memory=fail) as engine:
        for i, prompt in enumerate(PROMPTS):
            assert isinstance(await engine.submit(str(i), prompt), Finished)
