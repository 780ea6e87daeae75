"""The worker goes on alone while nothing is to be decided, and stops where somebody has to be asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from llamaslot.backend.fake import FakeBackend
from llamaslot.base.messages import (
    TERMINAL,
    Cancel,
    Cancelled,
    Event,
    Failed,
    Finished,
    Output,
    Sampling,
    Stopped,
    Submit,
    TextPart,
)
from llamaslot.core.backend import Decoded, Run
from llamaslot.core.step import StepPlan
from llamaslot.engine.engine import Engine
from tests.engine.harness import GREEDY, alone

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


class GatedBackend(FakeBackend):
    """Notes what it is given, and waits at the gate before each call of `decode` from the `n_free`th on."""

    n_free = 1_000_000

    def __init__(self, **shape: int | bool) -> None:
        super().__init__(**shape)
        self.n_decodes = 0
        self.gate = threading.Semaphore(0)

    def decode(self, runs: Sequence[Run]) -> Decoded:
        if self.n_decodes >= self.n_free:
            assert self.gate.acquire(timeout=10)
        self.n_decodes += 1
        return super().decode(runs)


class Threaded:
    """An engine with a real worker thread; `ends` and `texts` by request, and the number of plans."""

    def __init__(self, backend: FakeBackend) -> None:
        self.engine = Engine(backend, self._receive)
        self.ends: dict[str, asyncio.Future[object]] = {}
        self.texts: dict[str, str] = {}
        self.first = asyncio.Event()
        self.on_first: Callable[[], None] = lambda: None
        self.stopped = ""
        self.n_plans = 0
        plan = self.engine.scheduler.plan

        def counted() -> StepPlan:
            made = plan()
            self.n_plans += bool(made)
            return made

        self.engine.scheduler.plan = counted

    def submit(self, name: str, prompt: str, max_tokens: int = 200, **fields: object) -> asyncio.Future[object]:
        self.ends[name] = asyncio.get_running_loop().create_future()
        self.texts[name] = ""
        fields.setdefault("sampling", ENDLESS)
        self.engine.send(Submit(name, (TextPart(prompt),), max_tokens=max_tokens, **fields))
        return self.ends[name]

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Output | Finished):
                self.texts[event.request_id] += event.content
                if not self.first.is_set():
                    self.on_first()
                self.first.set()
            if isinstance(event, Stopped):
                self.stopped = event.reason
            elif isinstance(event, TERMINAL):
                self.ends[event.request_id].set_result(event)

    async def __aenter__(self) -> Threaded:
        """Start the engine."""
        self.task = asyncio.create_task(self.engine.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop it."""
        self.engine.stop()
        await self.task


async def test_a_stream_alone_needs_two_plans() -> None:
    backend = GatedBackend()
    async with Threaded(backend) as engine:
        await engine.submit("1", "hello")
        assert backend.n_decodes == 200
        assert engine.n_plans == 2
        assert engine.texts["1"] == await alone("hello", FakeBackend(), max_tokens=200, sampling=ENDLESS)


async def test_a_newcomer_is_let_in_after_the_step_that_runs() -> None:
    backend = GatedBackend()
    backend.n_free = 5
    async with Threaded(backend) as engine:
        first = engine.submit("1", "hello")
        await engine.first.wait()
        while backend.n_decodes < 5:
            await asyncio.sleep(0.001)
        second = engine.submit("2", "somebody else", max_tokens=1)
        while not engine.engine._inbox:
            await asyncio.sleep(0.001)
        backend.gate.release(2)
        await second
        assert backend.n_decodes == 7
        backend.gate.release(1000)
        await first
        for name, prompt, n in (("1", "hello", 200), ("2", "somebody else", 1)):
            assert engine.texts[name] == await alone(prompt, FakeBackend(), max_tokens=n, sampling=ENDLESS)


async def test_a_command_given_while_events_are_taken_is_not_overlooked() -> None:
    backend = GatedBackend()
    async with Threaded(backend) as engine:
        end = engine.submit("1", "hello")
        engine.on_first = lambda: engine.engine.send(Cancel("1"))
        assert isinstance(await end, Cancelled)
        assert backend.n_decodes < 20


async def test_streams_that_end_by_their_own_token_give_the_text_they_give_alone() -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    async with Threaded(FakeBackend(n_slots=3)) as engine:
        await asyncio.gather(*(engine.submit(p, p, max_tokens=60, sampling=GREEDY) for p in prompts))
        for prompt in prompts:
            assert engine.texts[prompt] == await alone(prompt, FakeBackend(), max_tokens=60)


async def test_a_stop_string_ends_a_stream_before_anything_more_is_computed() -> None:
    whole = await alone("hello", FakeBackend(), max_tokens=40, sampling=ENDLESS)
    backend = GatedBackend()
    async with Threaded(backend) as engine:
        end = await engine.submit("1", "hello", stop=(whole[9:12],))
        assert isinstance(end, Finished)
        assert (end.reason, backend.n_decodes) == ("word", end.progress.n_generated)


async def test_an_error_on_the_thread_ends_the_engine() -> None:
    class Breaking(GatedBackend):
        def decode(self, runs: Sequence[Run]) -> Decoded:
            if self.n_decodes == 9:
                raise ZeroDivisionError
            return super().decode(runs)

    engine = Threaded(Breaking())
    async with engine:
        engine.submit("1", "hello")
        await asyncio.wait_for(engine.task, 10)
    assert "ZeroDivisionError" in engine.stopped
    assert isinstance(engine.ends["1"].result(), Failed)
    assert len(engine.texts["1"]) > 0


@pytest.mark.parametrize("unified", [True, False])
async def test_room_is_never_overrun(unified: bool) -> None:
    prompts = [letter * 20 for letter in "abcdef"]
    shape = {"n_ctx": 128, "n_slots": 2, "unified": unified}
    async with Threaded(FakeBackend(**shape)) as engine:
        await asyncio.gather(*(engine.submit(p, p, max_tokens=38) for p in prompts))
        for prompt in prompts:
            expected = await alone(prompt, FakeBackend(**shape), max_tokens=38, sampling=ENDLESS)
            assert engine.texts[prompt] == expected
