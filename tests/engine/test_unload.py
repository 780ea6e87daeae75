"""An engine whose model is unloaded while nobody uses it: prefixes go to RAM, and the next request uses them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from llamaslot.base.commands import (
    CacheCleared,
    ClearCache,
    EngineCommand,
    InspectCache,
    InspectEngine,
    Load,
    Unload,
)
from llamaslot.base.errors import UnavailableError
from llamaslot.base.events import Failed, Finished, Output
from llamaslot.base.stats import CacheState, EngineState
from tests.engine.harness import Harness, Threaded, alone, running
from tests.engine.test_layout import COST
from tests.fake_backend import FakeBackend

RAM = {"ram_bytes": 10**6}
PROMPT = "a" * 60


class SlowFake(FakeBackend):
    """Is loaded again when `may_load` is set."""

    def __init__(self, **shape: int) -> None:
        super().__init__(**shape)
        self.may_load = threading.Event()

    def reload(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        assert self.may_load.wait(10)
        super().reload(should_stop)


async def settled(engine: Harness, command: EngineCommand) -> bool:
    """Send a command, and return whether the model is loaded once it was taken."""
    engine.engine.send(command)
    assert isinstance(await engine.ask(InspectEngine()), EngineState)
    # The answer is sent before the step in which the model is unloaded.
    await asyncio.sleep(0.01)
    assert isinstance(engine.backend, FakeBackend)
    assert engine.backend.is_loaded == engine.local.service.is_loaded
    return engine.backend.is_loaded


async def answer(engine: Harness, name: str, prompt: str) -> Finished:
    """The end of a request, whose text was compared with that of an engine of its own."""
    end = await engine.submit(name, prompt)
    assert isinstance(end, Finished), end
    assert engine.text(name) == await alone(prompt, FakeBackend())
    return end


@pytest.fixture
async def engine() -> AsyncIterator[Harness]:
    async with running(FakeBackend(n_reserved=2), debug_invariants=True, **RAM) as engine:
        yield engine


async def test_the_next_request_continues_from_what_was_in_the_pool(engine: Harness) -> None:
    await answer(engine, "a", PROMPT)
    for i in range(3):
        assert not await settled(engine, Unload())
        assert await settled(engine, Load())
        end = await answer(engine, f"b{i}", PROMPT + "bcd"[i] * 20)
        assert end.progress.n_cached >= len(PROMPT)
        assert end.progress.n_loaded >= len(PROMPT)


async def test_each_command_is_answered_also_where_there_is_nothing_to_do(engine: Harness) -> None:
    assert await settled(engine, Load())
    assert not await settled(engine, Unload())
    assert not await settled(engine, Unload())
    assert await settled(engine, Load())


async def test_what_only_reads_does_not_load_it(engine: Harness) -> None:
    await answer(engine, "a", PROMPT)
    await settled(engine, Unload())
    state = await engine.ask(InspectCache(5, text=True))
    assert isinstance(state, CacheState)
    assert PROMPT[:9] in str(state)
    cleared = await engine.ask(ClearCache())
    assert isinstance(cleared, CacheCleared)
    assert cleared.cleared_ram_tokens >= len(PROMPT)
    assert isinstance(engine.backend, FakeBackend)
    assert not engine.backend.is_loaded
    assert not engine.backend.segments, "RAM is given back meanwhile"
    assert await settled(engine, Load())
    assert (await answer(engine, "b", PROMPT)).progress.n_cached == 0


async def test_it_stays_loaded_while_a_request_runs(engine: Harness) -> None:
    end = engine.submit("a", PROMPT, max_tokens=30)
    await engine.wait_for("a", Output)
    assert await settled(engine, Unload())
    assert isinstance(await end, Finished)
    assert not await settled(engine, Unload())


async def test_requests_fail_while_it_cannot_be_loaded(engine: Harness) -> None:
    """The engine and what is in RAM outlive that."""
    backend, service = engine.backend, engine.local.service
    assert isinstance(backend, FakeBackend)
    await answer(engine, "a", PROMPT)
    assert await service.unload()
    backend.load_error = "not enough memory"
    for _ in range(2):
        with pytest.raises(UnavailableError, match="could not be loaded again: not enough memory"):
            await service.load()
        assert not service.is_loaded
    failed = await engine.submit("b", PROMPT)
    assert isinstance(failed, Failed)
    assert failed.error.type == "unavailable_error"
    backend.load_error = ""
    await service.load()
    assert (await answer(engine, "d", PROMPT)).progress.n_cached >= len(PROMPT) - 1


async def test_while_it_is_loaded_queries_are_answered() -> None:
    backend = SlowFake(n_reserved=2)
    async with running(backend, kind=Threaded, **RAM) as engine:
        service = engine.local.service
        await engine.submit("a", PROMPT)
        assert await service.unload()
        loading = asyncio.create_task(service.load())
        await asyncio.sleep(0.01)
        assert isinstance(await engine.ask(InspectEngine()), EngineState)
        assert not backend.is_loaded
        backend.may_load.set()
        await loading
        assert isinstance(await engine.submit("c", PROMPT), Finished)


async def test_a_measurement_that_is_due_keeps_it_loaded_unless_another_model_needs_the_room() -> None:
    backend = FakeBackend(n_reserved=2)
    backend.info = msgspec.structs.replace(backend.info, costs_pending="not measured yet")
    async with running(backend, **RAM) as engine:
        await answer(engine, "a", PROMPT)
        await asyncio.sleep(0.05)
        assert await settled(engine, Unload())
        assert not await settled(engine, Unload(is_urgent=True))


async def test_it_ends_while_the_model_is_unloaded(engine: Harness) -> None:
    await answer(engine, "a", PROMPT)
    await settled(engine, Unload())


async def test_the_layout_stays_while_it_is_unloaded() -> None:
    backend = FakeBackend(may_partition=True)
    backend.info = msgspec.structs.replace(backend.info, kv_cost=COST)
    async with running(backend, **RAM) as engine:
        await asyncio.gather(*(engine.submit(letter, letter * 40) for letter in "abc"))
        assert not backend.info.unified
        assert not await settled(engine, Unload())
        # Nothing runs, which asks for another layout after a while.
        engine.engine.scheduler.wants_unified = lambda _now: True  # type: ignore[method-assign]
        assert isinstance(await engine.ask(InspectEngine()), EngineState)
        assert not backend.info.unified
        assert await settled(engine, Load())
        assert (await answer(engine, "d", "a" * 40 + "d")).progress.n_cached >= 40
        assert backend.info.unified


async def test_a_crash_while_it_is_loaded_again_is_told() -> None:
    backend = SlowFake(n_reserved=2)
    async with running(backend, kind=Threaded, **RAM) as engine:
        service = engine.local.service
        assert await service.unload()
        loading = asyncio.create_task(service.load())
        await asyncio.sleep(0.01)
        service.engine_lost(True)
        with pytest.raises(UnavailableError, match="restarting"):
            await loading
        assert not service._suspects
        backend.may_load.set()


async def test_it_is_stopped_while_the_model_is_loaded() -> None:
    backend = SlowFake(n_reserved=2)
    async with running(backend, kind=Threaded, **RAM) as engine:
        service = engine.local.service
        assert await service.unload()
        loading = asyncio.create_task(service.load())
        await asyncio.sleep(0.01)
        engine.engine.stop()
        await asyncio.sleep(0.01)
        backend.may_load.set()
        with pytest.raises(UnavailableError, match="shutting down"):
            await loading


async def test_without_ram_the_prefixes_are_lost() -> None:
    async with running(FakeBackend(), ram_bytes=0) as engine:
        await answer(engine, "a", PROMPT)
        assert not await settled(engine, Unload())
        assert await settled(engine, Load())
        assert (await answer(engine, "b", PROMPT)).progress.n_cached == 0
