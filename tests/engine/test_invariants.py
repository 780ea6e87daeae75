"""`debug_invariants`: the cache is compared with the pool whenever nothing runs, on the thread of the model."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from structlog.testing import capture_logs

from llamaslot.base.commands import CacheCleared, ClearCache, InspectCache, InspectEngine, TextPart
from llamaslot.base.events import Event, Finished, Reply, Stopped
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.stats import CacheState
from tests.engine.harness import LocalEngine
from tests.fake_backend import FakeBackend
from tests.prompt_threads import text_request


class Watched(FakeBackend):
    """Notes which threads ask for positions; lies by `error` tokens about one sequence."""

    error = 0

    def __init__(self) -> None:
        super().__init__(n_slots=2, n_reserved=2)
        self.askers: set[str] = set()

    def seq_range(self, seq: int) -> range:
        self.askers.add(threading.current_thread().name)
        return range(super().seq_range(seq).stop + (self.error if seq == 0 else 0))


class Run:
    """An engine with a thread of its own."""

    def __init__(self, backend: FakeBackend, *, debug_invariants: bool = True) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.local = LocalEngine(backend, self._receive, debug_invariants=debug_invariants)
        self.engine = self.local.engine
        self.task = asyncio.create_task(self.local.run())

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            self.events.put_nowait(event)

    async def until(self, kind: type[Event]) -> Event:
        async with asyncio.timeout(20):
            while not isinstance(event := await self.events.get(), kind):
                assert not isinstance(event, Stopped), event
            return event

    async def ask(self, name: str, body: Any) -> Any:
        self.local.ask(name, body)
        reply = await self.until(Reply)
        assert isinstance(reply, Reply)
        return reply.body

    async def complete(self, name: str, prompt: str) -> None:
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        self.local.send(text_request(name, (TextPart(prompt),), sampling=sampling, max_tokens=3))
        await self.until(Finished)

    async def stop(self) -> None:
        await self.local.stop()
        await self.task


async def test_it_is_checked_once_each_time_that_nothing_runs() -> None:
    backend = Watched()
    with capture_logs() as lines:
        run = Run(backend)
        for name in ("a", "b"):
            await run.complete(name, "the same prompt, " + name)
            for question in range(3):
                await run.ask(f"{name}{question}", InspectEngine())
        cleared = await run.ask("clear", ClearCache())
        state = await run.ask("cache", InspectCache(top=20))
        await run.stop()
    checks = [line for line in lines if line["event"] == "invariants.ok"]
    assert isinstance(cleared, CacheCleared)
    assert isinstance(state, CacheState)
    assert (cleared.cleared_tokens, state.tokens) == (checks[2]["cells_used"], 0)
    assert [check["cells_used"] > 0 for check in checks] == [False, True, True, False]
    assert all(name.startswith("llamaslot-model") for name in backend.askers)


async def test_it_ends_the_engine_where_they_differ() -> None:
    backend = Watched()
    run = Run(backend)
    await run.complete("a", "a prompt")
    backend.error = 1
    with capture_logs() as lines:
        run.local.send(text_request("b", (TextPart("another"),), id_slot=1, max_tokens=1))
        stopped = await run.until(Stopped)
        await run.task
    assert isinstance(stopped, Stopped)
    assert stopped.reason.startswith("AssertionError: sequence 0")
    assert [line["event"] for line in lines if line["event"] != "request.done"] == ["engine.died"]


async def test_it_is_not_checked_unless_asked_for() -> None:
    backend = Watched()
    backend.error = 1
    with capture_logs() as lines:
        run = Run(backend, debug_invariants=False)
        run.local.send(text_request("b", (TextPart("another"),), id_slot=1, max_tokens=1))
        await run.until(Finished)
        await run.ask("query", InspectEngine())
        await run.stop()
    assert {line["event"] for line in lines} == {"request.done"}
