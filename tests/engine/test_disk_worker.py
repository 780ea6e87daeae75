"""The engine with a disk: prefixes outlive the server, and no failure of the disk changes or delays a reply."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from structlog.testing import capture_logs

from llamaslot.backend.disk import DiskStore
from llamaslot.base.backend import Decoded, Draws, Run
from llamaslot.base.commands import CacheCleared, ClearCache, InspectCache
from llamaslot.base.events import Failed, Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import KvCost
from llamaslot.base.prompt_jobs import DropSession
from llamaslot.base.stats import DiskStats
from llamaslot.engine import disk_worker, engine
from llamaslot.kvcache.disk_io import CorruptSegmentError, SegmentMeta
from llamaslot.kvcache.tiers import pacing
from tests.engine.harness import Harness, alone, running
from tests.fake_backend import SEGMENT_SIZE, FakeBackend

KEY = b"k" * 32
Store = TypeVar("Store", bound=DiskStore)
HEAD = "You are a helpful assistant. " * 8
TURNS = [HEAD + "What is a slot? ", HEAD + "Who are you? ", "Something else entirely. " * 5]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.0)


def backend() -> FakeBackend:
    return FakeBackend(n_ctx=2048, n_reserved=4, n_ubatch=64)


def contents(folder: Path) -> bytes:
    """The contents of all files of a folder."""
    return b"".join(each.read_bytes() for each in folder.rglob("*") if each.is_file())


@asynccontextmanager
async def served(folder: Path, **settings: object) -> AsyncIterator[Harness]:
    store = DiskStore(folder)
    store.open(KEY, 10**7)
    try:
        async with running(backend(), disk=store, **{"ram_bytes": 10**6} | settings) as harness:
            yield harness
    finally:
        store.close()


async def written(harness: Harness) -> int:
    """Wait until everything is on disk, and return its number of tokens."""
    tiers, disk_tier = harness.engine.scheduler.cache._tiers, harness.engine.scheduler.cache._disk
    assert tiers is not None
    async with asyncio.timeout(10):
        while disk_tier.writing or tiers.disk.n_tokens < harness.engine.scheduler.cache._tree.n_tokens:
            await asyncio.sleep(0.005)
    return tiers.disk.n_tokens


async def test_prefixes_are_read_from_disk_after_a_restart(tmp_path: Path) -> None:
    texts = {}
    async with served(tmp_path) as harness:
        for i, turn in enumerate(TURNS):
            await harness.submit(str(i), turn)
            texts[turn] = harness.text(str(i))
        n_tokens = await written(harness)
    async with served(tmp_path) as harness:
        tiers = harness.engine.scheduler.cache._tiers
        assert tiers is not None
        assert tiers.disk.n_tokens == n_tokens
        for i, turn in enumerate(TURNS):
            end = await harness.submit(str(i), turn)
            assert isinstance(end, Finished)
            assert end.progress.n_prompt_computed == 1
            assert harness.text(str(i)) == texts[turn] == await alone(turn, backend())
            assert end.progress.n_read >= len(HEAD) or i > 0
        assert tiers.counters.read_tokens >= sum(map(len, TURNS)) - len(HEAD) - 3


async def test_the_tokens_of_a_corrupt_file_are_computed_again(tmp_path: Path) -> None:
    async with served(tmp_path) as harness:
        await harness.submit("a", TURNS[0])
        await written(harness)
    for path in (tmp_path / "segments").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    async with served(tmp_path) as harness:
        end = await harness.submit("a", TURNS[0])
        assert end.progress.n_cached == 0
        assert harness.text("a") == await alone(TURNS[0], backend())
        tiers = harness.engine.scheduler.cache._tiers
        assert tiers.counters.disk.corrupt_files == 1
        await written(harness)
    async with served(tmp_path) as harness:
        end = await harness.submit("a", TURNS[0])
        assert end.progress.n_prompt_computed == 1


class GatedDisk(DiskStore):
    """A disk whose reads wait for a gate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.n_reads = 0
        self.gate = threading.Event()

    def read(self, number: int) -> Kv | None:
        self.n_reads += 1
        self.gate.wait(10)
        return super().read(number)


class HungDisk(DiskStore):
    """A disk whose writes do not return before its gate is opened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_writing = threading.Event()
        self.gate = threading.Event()

    def write(self, meta: SegmentMeta, kv: Kv) -> bool:
        self.is_writing.set()
        self.gate.wait(30)
        return super().write(meta, kv)


@asynccontextmanager
async def restarted(folder: Path, kind: type[Store], prompt: str = HEAD) -> AsyncIterator[tuple[Harness, Store]]:
    """A server that finds the KV of a prompt on a disk of this class."""
    async with served(folder) as harness:
        await harness.submit("a", prompt)
        await written(harness)
    store = kind(folder)
    store.open(KEY, 10**7)
    async with running(backend(), disk=store, ram_bytes=10**6) as harness:
        yield harness, store
    store.close()


async def test_a_turn_is_on_disk_soon_and_read_whole_although_the_first_read_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, 512 of 1,266 tokens came from disk: the first read, which is cold, was slower than computing."""

    class ColdDisk(DiskStore):
        n_reads = 0

        def read(self, number: int) -> Kv | None:
            self.n_reads += 1
            time.sleep(5.0 if self.n_reads == 1 else 0)
            return super().read(number)

    def model() -> FakeBackend:
        made = FakeBackend(n_ctx=4096, n_reserved=4, n_ubatch=512)
        # A segment takes 2 s to compute, longer than a read on a busy machine.
        cost = KvCost(0, 1.0, prefill_us=4000.0, save_us=0.1, first_save_us=0.1, load_us=0.1)
        made.info = msgspec.structs.replace(made.info, kv_cost=cost)
        return made

    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 1.0)
    prompt = "".join(chr(97 + i * i % 26) for i in range(1266))
    for kind in (DiskStore, ColdDisk):
        store = kind(tmp_path)
        store.open(KEY, 10**7)
        async with running(model(), disk=store, ram_bytes=10**6) as harness:
            if kind is ColdDisk:
                # It is read at the start, without a request.
                async with asyncio.timeout(10):
                    while harness.engine.scheduler.cache._tiers.counters.read_tokens == 0:
                        await asyncio.sleep(0.005)
            end = await harness.submit("a", prompt)
            if kind is DiskStore:
                assert await written(harness) >= len(prompt)
        store.close()
    assert (end.progress.n_prompt_computed, end.progress.n_read) == (1, len(prompt))


async def test_two_requests_wait_for_one_read_while_others_run(tmp_path: Path) -> None:
    async with restarted(tmp_path, GatedDisk) as (harness, store):
        waiting = [harness.submit(name, HEAD + name) for name in "xy"]
        end = await harness.submit("other", "Something else.", max_tokens=30)
        assert isinstance(end, Finished)
        assert store.n_reads == 1
        assert not any(each.done() for each in waiting)
        store.gate.set()
        ends = await asyncio.gather(*waiting)
        assert [each.progress.n_prompt_computed for each in ends] == [1, 1]
        assert store.n_reads == 1
        for name in "xy":
            assert harness.text(name) == await alone(HEAD + name, backend())


async def test_a_request_that_waits_for_the_disk_can_be_cancelled(tmp_path: Path) -> None:
    async with restarted(tmp_path, GatedDisk) as (harness, store):
        first, second = harness.submit("x", HEAD + "x"), harness.submit("y", HEAD + "y")
        await harness.submit("other", "Something else.")
        harness.cancel("x")
        await first
        assert not second.done()
        store.gate.set()
        await second


async def test_the_server_stops_while_a_request_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_CLOSE_TIMEOUT_S", 0.5)
    async with restarted(tmp_path, GatedDisk) as (harness, store):
        waiting = harness.submit("x", HEAD + "x")
        await harness.submit("other", "Something else.")
        started = time.monotonic()
    assert time.monotonic() - started < 3.5
    assert isinstance(waiting.result(), Failed)
    store.gate.set()


async def test_a_request_is_computed_after_a_read_has_failed_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(DiskStore):
        def read(self, number: int) -> Kv | None:
            time.sleep(0.1)
            return None

    monkeypatch.setattr(pacing, "RETRY_DELAY_S", 0.05)
    async with restarted(tmp_path, Broken) as (harness, _):
        end = await harness.submit("x", HEAD + "x")
        assert end.progress.n_cached == 0


async def test_no_request_waits_for_an_unresponsive_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "READ_TIMEOUT_S", 0.1)
    async with restarted(tmp_path, GatedDisk) as (harness, store):
        for name in "xyz":
            end = await harness.submit(name, HEAD + name)
            assert isinstance(end, Finished)
            assert harness.text(name) == await alone(HEAD + name, backend())
        disk_tier = harness.engine.scheduler.cache._disk
        assert disk_tier.is_unresponsive
        store.gate.set()
        async with asyncio.timeout(10):
            while disk_tier.is_unresponsive:
                await asyncio.sleep(0.005)
        monkeypatch.undo()
        await harness.ask(ClearCache())


class Threaded(Harness):
    """A harness whose backend runs on the model thread."""

    is_inline = False


class Parts(FakeBackend):
    """A partitioned pool whose steps take a moment."""

    def __init__(self) -> None:
        super().__init__(n_ctx=16_384, n_ubatch=64, unified=False, eos_every=10**9)

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        time.sleep(0.001)
        return super().decode(runs, draws)


async def test_in_a_partitioned_pool_too_no_request_waits_for_an_unresponsive_disk_while_another_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "READ_TIMEOUT_S", 0.1)
    async with served(tmp_path) as harness:
        await harness.submit("a", HEAD)
        await written(harness)
    store = GatedDisk(tmp_path)
    store.open(KEY, 10**7)
    async with running(Parts(), kind=Threaded, disk=store, ram_bytes=10**6) as harness:
        other = harness.submit("other", "Something else.", max_tokens=4000)
        async with asyncio.timeout(10):
            while not harness.text("other"):
                await asyncio.sleep(0.005)
        end = await harness.submit("x", HEAD + "x")
        assert isinstance(end, Finished)
        assert end.progress.n_prompt_computed == len(HEAD) + 1
        assert store.n_reads == 1
        assert not other.done()
        harness.local.cancel("other")
        await other
        store.gate.set()
    store.close()


class CorruptDisk(GatedDisk):
    """Finds that what it reads is corrupt."""

    def read(self, number: int) -> Kv | None:
        super().read(number)
        raise CorruptSegmentError


@pytest.mark.parametrize("kind", [GatedDisk, CorruptDisk])
async def test_the_log_says_when_the_disk_stops_and_starts_to_respond(
    kind: type[GatedDisk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "READ_TIMEOUT_S", 0.1)
    with capture_logs() as logs:
        async with restarted(tmp_path, kind) as (harness, store):
            await harness.submit("x", HEAD + "x")
            store.gate.set()
            disk_tier = harness.engine.scheduler.cache._disk
            async with asyncio.timeout(10):
                while disk_tier.is_unresponsive:
                    await asyncio.sleep(0.005)
    events = [each["event"] for each in logs if each["event"] in ("disk.unresponsive", "disk.responsive")]
    assert events == ["disk.unresponsive", "disk.responsive"]


async def test_pending_reads_of_an_unresponsive_disk_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "READ_TIMEOUT_S", 0.1)
    prompt = HEAD * 7
    async with restarted(tmp_path, GatedDisk, prompt) as (harness, store):
        await harness.submit("x", prompt + "x")
        tiers, disk_tier = harness.engine.scheduler.cache._tiers, harness.engine.scheduler.cache._disk
        assert tiers is not None
        assert len(tiers.disk) >= 3
        store.gate.set()
        async with asyncio.timeout(10):
            while disk_tier.is_unresponsive:
                await asyncio.sleep(0.005)
        monkeypatch.undo()
        await harness.submit("other", "Something else.")
        assert store.n_reads == 1


@pytest.mark.slow
async def test_a_slow_step_does_not_make_the_disk_unresponsive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(DiskStore):
        def read(self, number: int) -> Kv | None:
            time.sleep(0.1)
            return super().read(number)

    monkeypatch.setattr(pacing, "READ_TIMEOUT_S", 0.5)
    async with restarted(tmp_path, Slow) as (harness, _):
        decode = harness.backend.decode

        def slowly(runs: Sequence[Run], draws: Draws = ()) -> Decoded:
            time.sleep(0.6)
            return decode(runs, draws)

        monkeypatch.setattr(harness.backend, "decode", slowly)
        other = harness.submit("other", "Something else. " * 8, max_tokens=2)
        end = await harness.submit("x", HEAD + "x", max_tokens=1)
        assert isinstance(end, Finished)
        assert end.progress.n_prompt_computed == 1
        await other


async def test_prefixes_larger_than_ram_together_are_read_in_turn(tmp_path: Path) -> None:
    prompts = ["".join(f"{name}{i} " for i in range(600))[:1500] for name in "xyz"]
    n_bytes = 4 * SEGMENT_SIZE.of(512)
    texts = {}
    async with served(tmp_path, ram_bytes=n_bytes) as harness:
        tiers, disk_tier = harness.engine.scheduler.cache._tiers, harness.engine.scheduler.cache._disk
        for i, prompt in enumerate(prompts):
            await harness.submit(prompt, prompt)
            texts[prompt] = harness.text(prompt)
            async with asyncio.timeout(10):
                while tiers.disk.n_tokens < 1500 * (i + 1) or disk_tier.writing:
                    await asyncio.sleep(0.01)
    async with served(tmp_path, ram_bytes=n_bytes) as harness:
        for i in range(2):
            for prompt in prompts:
                end = await harness.submit(f"{i} {prompt}", prompt)
                assert harness.text(f"{i} {prompt}") == texts[prompt]
                assert end.progress.n_prompt_computed == 1
                assert end.progress.n_read >= 500 or i > 0


async def test_a_finished_request_is_written_while_another_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 0.1)
    async with served(tmp_path) as harness:
        endless = harness.submit("b", "Go on.", max_tokens=-1, sampling=Sampling(temperature=0.0, ignore_eos=True))
        await harness.wait_for("b", Output, 1)
        await harness.submit("a", HEAD)
        tiers, disk_tier = harness.engine.scheduler.cache._tiers, harness.engine.scheduler.cache._disk
        async with asyncio.timeout(5):
            while tiers.disk.n_tokens < len(HEAD) or disk_tier.writing:
                await asyncio.sleep(0.01)
        assert not endless.done()
        harness.cancel("b")
        await endless


async def test_whole_segments_of_a_running_request_are_written(tmp_path: Path) -> None:
    prompt = "".join(f"{i} " for i in range(400))[:1100]
    async with served(tmp_path) as harness:
        endless = harness.submit("a", prompt, max_tokens=-1, sampling=Sampling(temperature=0.0, ignore_eos=True))
        tiers, disk_tier = harness.engine.scheduler.cache._tiers, harness.engine.scheduler.cache._disk
        async with asyncio.timeout(10):
            while tiers.disk.n_tokens < 1024 or disk_tier.writing:
                await asyncio.sleep(0.005)
        assert {segment.n_tokens for segment in tiers.disk} == {512}
        assert not endless.done()
        harness.cancel("a")
        await endless


async def test_a_restart_does_not_renew_the_budget_of_a_day(tmp_path: Path) -> None:
    async def stats(harness: Harness) -> DiskStats:
        found: DiskStats = (await harness.ask(InspectCache(top=1, text=False))).disk
        return found

    async with served(tmp_path, disk_bytes_per_day=100) as harness:
        await harness.submit("a", TURNS[0])
        disk = await until_written(harness, stats)
        assert 100 < disk.written_bytes == disk.total_written_bytes
    for i in range(2):
        async with served(tmp_path, disk_bytes_per_day=100) as harness:
            await harness.submit("b", TURNS[2] + str(i))
            assert (await stats(harness)).written_bytes == 0
            assert (await stats(harness)).total_written_bytes == disk.total_written_bytes
    async with served(tmp_path) as harness:
        await harness.submit("c", TURNS[2])
        more = await until_written(harness, stats)
        assert more.total_written_bytes == disk.total_written_bytes + more.written_bytes


async def until_written(harness: Harness, stats: Callable[[Harness], Awaitable[DiskStats]]) -> DiskStats:
    """Wait until the disk has something new."""
    async with asyncio.timeout(10):
        while not (found := await stats(harness)).written_bytes:
            await asyncio.sleep(0.005)
    return found


async def test_the_rest_is_written_at_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 1000.0)
    async with served(tmp_path) as harness:
        await harness.submit("a", HEAD)
        endless = harness.submit("b", HEAD + "b", max_tokens=-1)
        await harness.wait_for("b", Output, 3)
        assert harness.engine.scheduler.cache._tiers.disk.n_tokens == 0
    assert isinstance(await endless, Failed)
    async with served(tmp_path) as harness:
        assert (await harness.submit("a", HEAD)).progress.n_prompt_computed == 1
        assert (await harness.submit("b", HEAD + "b")).progress.n_prompt_computed == 1


async def test_what_is_queued_already_is_written_at_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "PARTIAL_DELAY_S", 1000.0)
    async with served(tmp_path) as harness:
        await harness.submit("a", HEAD)
        cache = harness.engine.scheduler.cache
        async with asyncio.timeout(5):
            while cache._tiers.ram.n_tokens < cache._tree.n_tokens:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert cache._tiers.disk.n_tokens == 0
    async with served(tmp_path) as harness:
        assert (await harness.submit("a", HEAD)).progress.n_prompt_computed == 1


async def test_files_are_deleted_before_a_clear_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path) as harness:
        await harness.submit("a", HEAD)
        n_tokens = await written(harness)
        cleared = await harness.ask(ClearCache())
        assert cleared.cleared_disk_tokens == n_tokens
        assert list((tmp_path / "segments").iterdir()) == []


async def test_private_prompts_and_salts_are_not_written(tmp_path: Path) -> None:
    async with served(tmp_path) as harness:
        await harness.submit("secret", "My word is Rumpelstiltskin.", cache_prompt=False)
        await harness.submit("salted", HEAD, cache_salt="of one tenant")
        await written(harness)
    everything = contents(tmp_path)
    assert "Rumpel".encode("utf-32-le") not in everything
    assert b"of one tenant" not in everything
    assert HEAD.encode("utf-32-le") in everything


async def test_a_longer_segment_replaces_the_partial_one_of_a_conversation(tmp_path: Path) -> None:
    async with served(tmp_path) as harness:
        prompt = HEAD
        for turn in range(4):
            await harness.submit(str(turn), prompt)
            prompt += harness.text(str(turn)) + " and then?"
            n_tokens = await written(harness)
        tiers = harness.engine.scheduler.cache._tiers
        assert tiers.disk.n_tokens == n_tokens
        async with asyncio.timeout(5):
            while len(list((tmp_path / "segments").iterdir())) > len(tiers.disk):
                await asyncio.sleep(0.01)
    async with served(tmp_path) as harness:
        assert harness.engine.scheduler.cache._tiers.disk.n_tokens == n_tokens


@asynccontextmanager
async def with_a_hung_write(folder: Path) -> AsyncIterator[Harness]:
    """An engine whose disk has begun a write that does not return, until the block and the engine have ended."""
    store = HungDisk(folder)
    store.open(KEY, 10**7)
    try:
        async with running(backend(), disk=store, ram_bytes=10**6) as harness:
            await harness.submit("a", HEAD, session_id="talk")
            assert await asyncio.to_thread(store.is_writing.wait, 10)
            yield harness
    finally:
        store.gate.set()
        store.close()


async def test_a_hung_write_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_FLUSH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(engine, "_CLOSE_TIMEOUT_S", 0.2)
    async with with_a_hung_write(tmp_path) as harness:
        end = harness.submit("b", "Something else.", max_tokens=10**6)
        await harness.wait_for("b", Output)
        stopped = time.monotonic()
        harness.engine.stop()
        assert isinstance(await end, Failed)
        assert time.monotonic() - stopped < 0.2, "terminal events come before the wait for the disk"
    assert time.monotonic() - stopped < 5
    assert harness.stopped is not None
    assert harness.engine.has_hung_thread


@pytest.mark.parametrize("query", [ClearCache(), DropSession("talk")])
async def test_a_query_that_waits_for_a_hung_write_is_answered_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: ClearCache | DropSession
) -> None:
    monkeypatch.setattr(engine, "_FLUSH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(engine, "_CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(disk_worker, "_WRITE_TIMEOUT_S", 0.1)
    async with with_a_hung_write(tmp_path) as harness:
        error = await harness.ask(query)
        assert error.type == "unavailable_error"
        assert "--cache-disk" in error.message
        end = await harness.submit("b", HEAD)
        assert end.progress.n_cached == 0, "what was in the pool and in RAM is cleared"


@pytest.mark.parametrize("query", [ClearCache(), DropSession("talk")])
async def test_a_query_is_answered_with_an_error_until_the_disk_can_delete(
    tmp_path: Path, query: ClearCache | DropSession
) -> None:
    store = DiskStore(tmp_path)
    store.open(KEY, 10**7)
    connection = store._index.database._connection
    async with running(backend(), disk=store, ram_bytes=10**6) as harness:
        await harness.submit("a", HEAD, session_id="talk")
        await written(harness)
        assert store.texts.records()
        connection.execute("PRAGMA query_only = 1")
        error = await harness.ask(query)
        assert error.type == "unavailable_error"
        assert "could not delete" in error.message
        assert (await harness.ask(query)).type == "unavailable_error"
        connection.execute("PRAGMA query_only = 0")
        answer = await harness.ask(query)
        assert isinstance(answer, CacheCleared) or answer.type == "not_found_error"
        assert not [each for each in store.texts.records() if each.kind == "session"]
    store.close()
    async with served(tmp_path) as harness:
        assert (await harness.submit("a", HEAD)).progress.n_cached == 0


async def test_a_hung_read_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_CLOSE_TIMEOUT_S", 0.2)
    async with restarted(tmp_path, GatedDisk) as (harness, store):
        end = harness.submit("x", HEAD + "x")
        while not store.n_reads:
            await asyncio.sleep(0.005)
        harness.engine.stop()
        assert isinstance(await end, Failed)
        while harness.stopped is None:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        store.gate.set()
    assert harness.engine.has_hung_thread
