"""The worker continues alone while nothing has to be decided, and stops where the event loop must decide."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from llamaslot.base.backend import Decoded, Draws, Run, Status
from llamaslot.base.commands import InspectEngine, TextPart
from llamaslot.base.events import Cancelled, Event, Failed, Finished, Output, Reply, Stopped
from llamaslot.base.generation.sampling import Sampling
from llamaslot.scheduler.step import StepPlan
from tests.engine.harness import GREEDY, TERMINAL, LocalEngine, alone
from tests.fake_backend import FakeBackend
from tests.prompt_threads import text_request

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


class GatedBackend(FakeBackend):
    """Notes what it is given, and waits at the gate before each call of `decode` from the `n_free`th on."""

    n_free = 1_000_000

    def __init__(self, **shape: int | bool) -> None:
        super().__init__(**shape)
        self.n_decodes = 0
        self.gate = threading.Semaphore(0)

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        if self.n_decodes >= self.n_free:
            assert self.gate.acquire(timeout=10)
        self.n_decodes += 1
        return super().decode(runs, draws)

    async def reached(self, n_decodes: int) -> None:
        """Wait until so many steps were computed."""
        while self.n_decodes < n_decodes:
            await asyncio.sleep(0.001)


class Threaded:
    """An engine with a real worker thread; `ends` and `texts` by request, and the number of plans."""

    def __init__(self, backend: FakeBackend) -> None:
        self.local = LocalEngine(backend, self._receive)
        self.engine = self.local.engine
        self.ends: dict[str, asyncio.Future[object]] = {}
        self.texts: dict[str, str] = {}
        self.first = asyncio.Event()
        self.on_state: Callable[[], None] = lambda: None
        self.stopped = ""
        self.n_plans = 0
        plan = self.engine.scheduler.plan

        def counted(now: float) -> StepPlan:
            made = plan(now)
            self.n_plans += bool(made)
            return made

        self.engine.scheduler.plan = counted

    def submit(self, name: str, prompt: str, max_tokens: int = 200, **fields: object) -> asyncio.Future[object]:
        self.ends[name] = asyncio.get_running_loop().create_future()
        self.texts[name] = ""
        fields.setdefault("sampling", ENDLESS)
        self.local.send(text_request(name, (TextPart(prompt),), max_tokens=max_tokens, **fields))
        return self.ends[name]

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Output | Finished):
                self.texts[event.completion_id] += event.content
                self.first.set()
            if isinstance(event, Stopped):
                self.stopped = event.reason
            elif isinstance(event, Reply):
                self.on_state()
            elif isinstance(event, TERMINAL):
                self.ends[event.completion_id].set_result(event)

    async def __aenter__(self) -> Threaded:
        """Start the engine."""
        self.task = asyncio.create_task(self.local.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop it."""
        await self.local.stop()
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
        await backend.reached(5)
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


async def test_a_stream_that_the_worker_is_ahead_on_is_cancelled_after_the_step_that_runs() -> None:
    backend = GatedBackend()
    backend.n_free = 5
    async with Threaded(backend) as engine:
        end = engine.submit("1", "hello")
        await backend.reached(5)
        engine.local.cancel("1")
        backend.gate.release(1000)
        assert isinstance(await end, Cancelled)
        assert backend.n_decodes == 6


async def test_a_command_given_between_plan_and_step_is_not_overlooked() -> None:
    backend = GatedBackend()
    async with Threaded(backend) as engine:
        end = engine.submit("1", "hello", max_tokens=-1)
        await engine.first.wait()
        n_before = 0

        def cancel() -> None:
            nonlocal n_before
            n_before = backend.n_decodes
            engine.local.cancel("1")

        engine.on_state = cancel
        engine.local.ask("state", InspectEngine())
        assert isinstance(await end, Cancelled)
        # The step may have ended by the time that the answer arrives.
        assert n_before > 0
        assert backend.n_decodes - n_before <= 2


async def test_stopping_waits_for_one_step_only() -> None:
    backend = GatedBackend()
    backend.n_free = 5
    async with Threaded(backend) as engine:
        end = engine.submit("1", "hello")
        await backend.reached(5)
        engine.engine.stop()
        backend.gate.release(1000)
        assert isinstance(await end, Failed)
    assert backend.n_decodes == 6


async def test_samplers_outlive_the_step_that_runs_when_the_engine_dies() -> None:
    class Watched(GatedBackend):
        n_sampled = 0

        def sample(self, draws: Draws) -> list[tuple[int, ...]]:
            tokens = super().sample(draws)  # which refuses a closed one
            self.n_sampled += 1
            return tokens

    backend = Watched()
    backend.n_free = 5
    engine = Threaded(backend)

    def die(events: list[Event]) -> None:
        engine.engine._on_events = engine.local._receive
        threading.Timer(0.2, backend.gate.release, (1000,)).start()
        raise ZeroDivisionError

    async with engine:
        end = engine.submit("1", "hello")
        await engine.first.wait()
        await backend.reached(5)
        engine.engine._on_events = die
        engine.engine._outbox.append(Reply("state"))
        backend.gate.release()
        assert isinstance(await end, Failed)
    assert "ZeroDivisionError" in engine.stopped
    assert backend.n_sampled == backend.n_decodes
    assert all(sampler.closed for sampler in backend.samplers)


async def test_streams_that_end_by_their_own_token_give_the_text_they_give_alone() -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    async with Threaded(FakeBackend(n_slots=3)) as engine:
        await asyncio.gather(*(engine.submit(p, p, max_tokens=60, sampling=GREEDY) for p in prompts))
        for prompt in prompts:
            assert engine.texts[prompt] == await alone(prompt, FakeBackend(), max_tokens=60)


@pytest.mark.parametrize("fault", ["", "fatal", "no cells", "poison"])
async def test_a_stop_string_is_searched_while_the_next_step_runs(fault: str) -> None:
    """What that step samples, or its failure, is nothing to the reply, which has ended."""
    whole = await alone("hello", FakeBackend(), max_tokens=40, sampling=ENDLESS)
    stop = whole[9:12]
    n = whole.index(stop) + len(stop)
    backend = GatedBackend()
    backend.n_free = n
    async with Threaded(backend) as engine:
        end = await asyncio.wait_for(engine.submit("1", "hello", stop=(stop,)), 10)
        assert isinstance(end, Finished)
        assert (end.reason, end.progress.n_generated, backend.n_decodes) == ("word", n, n)
        assert engine.texts["1"] == whole[: n - len(stop)]
        if fault == "poison":
            backend.poison.add(ord(whole[n - 1]))
        elif fault:
            backend.failures.append((Status.FATAL if fault == "fatal" else Status.NO_CELLS, 0))
        backend.gate.release(1000)
        await backend.reached(n + 1)
        backend.poison.clear()
        again = await engine.submit("2", "hello", max_tokens=40)
        assert isinstance(again, Finished)
        assert engine.texts["2"] == whole
        assert engine.engine.scheduler.running == []
        assert all(sampler.closed for sampler in backend.samplers)


async def test_streams_beside_one_with_stop_strings_need_few_plans() -> None:
    n, stops = 100, {"1": ("never",), "2": (), "3": ()}
    async with Threaded(GatedBackend(n_slots=3)) as engine:
        await asyncio.gather(*(engine.submit(name, f"hello {name}", n, stop=stop) for name, stop in stops.items()))
        assert engine.n_plans < n / 5
        for name in stops:
            assert engine.texts[name] == await alone(f"hello {name}", FakeBackend(), max_tokens=n, sampling=ENDLESS)


async def test_an_error_on_the_thread_ends_the_engine() -> None:
    class Breaking(GatedBackend):
        def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
            if self.n_decodes == 9:
                raise ZeroDivisionError
            return super().decode(runs, draws)

    engine = Threaded(Breaking())
    async with engine:
        engine.submit("1", "hello")
        await asyncio.wait_for(engine.task, 10)
    assert "ZeroDivisionError" in engine.stopped
    assert isinstance(engine.ends["1"].result(), Failed)
    assert len(engine.texts["1"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("unified", "max_tokens"), [(True, 80), (True, -1), (False, -1)])
async def test_room_is_never_overrun(unified: bool, max_tokens: int) -> None:
    prompts = [letter * 20 for letter in "abcdef"]
    shape = {"n_ctx": 128, "n_slots": 2, "unified": unified}
    async with Threaded(FakeBackend(**shape)) as engine:
        ends = await asyncio.gather(*(engine.submit(p, p, max_tokens=max_tokens) for p in prompts))
        assert all(isinstance(end, Finished) for end in ends)
        for prompt in prompts:
            expected = await alone(prompt, FakeBackend(**shape), max_tokens=max_tokens, sampling=ENDLESS)
            assert engine.texts[prompt] == expected


async def test_an_error_on_the_loop_ends_the_engine_after_the_step_that_runs() -> None:
    backend = GatedBackend()
    backend.n_free = 5
    engine = Threaded(backend)

    has_failed = asyncio.Event()

    def fail_once(_: list[Event]) -> None:
        engine.engine._on_events = engine.local._receive
        has_failed.set()
        raise ZeroDivisionError

    async with engine:
        end = engine.submit("1", "hello")
        await backend.reached(5)
        engine.engine._on_events = fail_once
        backend.gate.release(20)
        await asyncio.wait_for(has_failed.wait(), 10)
        backend.gate.release(1000)
        assert isinstance(await asyncio.wait_for(end, 10), Failed)
    assert "ZeroDivisionError" in engine.stopped
    assert backend.n_decodes <= 5 + 20 + 1
