"""Several models that share memory: real services on fake models, whose processes are in this one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from llamaslot.base.errors import (
    ConfigError,
    InvalidRequestError,
    LlamaslotError,
    NotFoundError,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from llamaslot.base.events import Finished
from llamaslot.service import models as models_module
from llamaslot.service.models import Models, ModelState, ServedModel
from llamaslot.service.service import Service
from tests.conftest import LONG
from tests.engine.harness import LocalEngine
from tests.fake_backend import FakeBackend
from tests.prompt_threads import text_request
from tests.service.live import result

SIZE = 100
"""Bytes of a loaded model."""
PROMPT = "a" * 60


class Process:
    """Takes the place of the processes of a model."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.desk, self.name = desk, name
        self.has_ended = False
        self.backend = FakeBackend(n_reserved=2, n_adapters=1)
        self.engine: LocalEngine | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def n_bytes(self) -> int:
        return SIZE if self.backend.is_loaded else 1

    async def load(self) -> Service:
        self.desk.n_launched[self.name] += 1
        await asyncio.sleep(self.desk.load_s)
        if error := self.desk.errors.get(self.name):
            raise error
        limits = {"max_queue": 256, "names": [self.name]}
        self.engine = LocalEngine(self.backend, service=limits, ram_bytes=10**6)
        self._running = asyncio.create_task(self.engine.run())
        return self.engine.service

    async def stop(self) -> str:
        self.has_ended = True
        if self.engine is not None and self._running is not None:
            await self.engine.stop()
            # A caller that is cancelled does not end it.
            await asyncio.wait([self._running])
        return ""


class Desk:
    """The models of a server."""

    models: Models

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.load_s = 0.0
        self.n_launched: dict[str, int] = {}
        self.processes: dict[str, list[Process]] = {}

    def launcher(self, name: str) -> Callable[[], Process]:
        def launch() -> Process:
            process = Process(self, name)
            self.processes.setdefault(name, []).append(process)
            return process

        self.n_launched[name] = 0
        return launch

    def model(self, name: str) -> ServedModel:
        return self.models.find(name)

    def states(self) -> str:
        """The ids of the models that are loaded."""
        return "".join(each.id for each in self.models.all if each.is_ready)

    async def complete(self, name: str, prompt: str = PROMPT, **fields: Any) -> Finished:
        """A completion by a model, which is loaded all the time."""
        async with self.models.use(name) as service:
            assert service is self.model(name).service
            assert service.is_loaded
            request = text_request(f"{name}-{random.getrandbits(60)}", prompt, **{"max_tokens": 4, **fields})
            _, _, end = await result(service, request)
            assert service.is_loaded
            return end


@asynccontextmanager
async def desk(
    names: str = "abc", *, pinned: str = "", idle_seconds: float = 0, **limits: Any
) -> AsyncIterator[Desk]:
    desk = Desk()
    served = [
        ServedModel(
            [name, f"{name}-alias"],
            desk.launcher(name),
            n_bytes=SIZE,
            idle_seconds=idle_seconds,
            is_pinned=name in pinned,
            loads_at_start=name in pinned,
        )
        for name in names
    ]
    desk.models = Models(served, **limits)
    try:
        async with asyncio.timeout(300 if LONG else 30):
            yield desk
    finally:
        await desk.models.close(1)
        assert not await desk.models.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_requests_that_come_together_load_a_model_once() -> None:
    async with desk() as server:
        server.load_s = 0.05
        ends = await asyncio.gather(*(server.complete("a") for _ in range(5)))
        assert all(end.progress.n_generated == 4 for end in ends)
        assert server.n_launched == {"a": 1, "b": 0, "c": 0}
        await server.complete("a-alias")
        assert server.n_launched["a"] == 1


async def test_the_one_unused_for_longest_makes_room_and_keeps_its_prefixes() -> None:
    async with desk(max_loaded=2) as server:
        await server.complete("a")
        await server.complete("b")
        await server.complete("a")
        await server.complete("c")
        assert server.states() == "ac"
        end = await server.complete("b")
        assert end.progress.n_cached >= len(PROMPT) - 1, "what it had goes on in RAM"
        assert server.states() == "bc"
        assert set(server.n_launched.values()) == {1}


async def test_a_model_in_use_stays_and_new_requests_wait_behind_the_one_that_needs_its_place() -> None:
    async with desk(max_loaded=1) as server:
        async with server.models.use("a") as service:
            order: list[str] = []

            async def note(name: str) -> None:
                await server.complete(name)
                order.append(name)

            second = asyncio.create_task(note("b"))
            await until(lambda: server.model("a").state is ModelState.LEAVING)
            third = asyncio.create_task(note("a"))
            await asyncio.sleep(0.05)
            assert service.is_loaded
            assert not order
        await asyncio.gather(second, third)
        assert order == ["b", "a"]


async def test_a_request_that_waits_no_longer_costs_nobody_its_room() -> None:
    async with desk(max_loaded=1) as server:
        async with server.models.use("a"):
            waiting = asyncio.create_task(server.complete("b"))
            await until(lambda: server.model("a").state is ModelState.LEAVING)
            waiting.cancel()
            await until(lambda: server.model("a").is_ready)
        await asyncio.sleep(0.05)
        assert server.states() == "a"
        assert server.n_launched["b"] == 0


async def test_a_model_that_cannot_be_loaded_says_why_and_costs_no_other_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models_module, "_RETRY_S", 0.2)
    async with desk() as server:
        server.errors["b"] = ConfigError("not a GGUF file")
        await server.complete("a")
        found = await asyncio.gather(*(server.complete("b") for _ in range(3)), return_exceptions=True)
        for error in found:
            assert isinstance(error, ServerError)
            assert "model 'b' could not be loaded: not a GGUF file" in error.message
        with pytest.raises(ServerError, match="not a GGUF file"):
            await server.complete("b")
        assert server.n_launched["b"] == 1, "it is not tried again at once"
        failure = server.model("b").failure
        assert failure is not None
        await server.complete("a")
        del server.errors["b"]
        await asyncio.sleep(0.25)
        await server.complete("b")
        assert server.model("b").failure is None


async def test_memory_limits_what_is_loaded() -> None:
    async with desk("abcd", max_bytes=2 * SIZE + 50) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models_module, "KEPT_BYTES", 1)
            for name in "abcdabcd":
                await server.complete(name)
                taken = sum(each.n_bytes for processes in server.processes.values() for each in processes[-1:])
                assert taken <= 2 * SIZE + 50
            assert server.states() == "cd"
            assert set(server.n_launched.values()) == {1}


async def test_processes_of_unloaded_models_end_where_they_take_too_much() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models_module, "KEPT_BYTES", 60)
        async with desk(max_bytes=SIZE + 70) as server:
            for name in "abc":
                await server.complete(name)
            assert [server.model(name).is_running for name in "abc"] == [False, True, True]
            assert server.processes["a"][0].has_ended
            await server.complete("a")
            assert server.n_launched["a"] == 2


async def test_only_so_many_models_keep_processes() -> None:
    async with desk("abcd", max_loaded=1, max_kept=2) as server:
        for name in "abcd":
            await server.complete(name)
        assert [each.id for each in server.models.all if each.is_running] == ["c", "d"]


async def test_a_pinned_model_makes_no_room() -> None:
    async with desk(pinned="a", max_loaded=1) as server:
        server.models.load_first()
        await until(lambda: server.states() == "a")
        with pytest.raises(UnavailableError, match="pinned"):
            await server.complete("b")
        await server.complete("a")


async def test_a_request_does_not_wait_for_ever() -> None:
    async with desk(max_loaded=1, timeout=0.1) as server, server.models.use("a"):
        with pytest.raises(UnavailableError, match="--load-timeout"):
            await server.complete("b")
        await until(lambda: server.states() == "a")


async def test_an_unused_model_is_unloaded_and_loaded_again() -> None:
    async with desk("a", idle_seconds=0.1) as server:
        watching = asyncio.create_task(server.models.unload_idle())
        try:
            await server.complete("a")
            await until(lambda: server.model("a").status == "sleeping")
            end = await server.complete("a")
            assert end.progress.n_cached >= len(PROMPT) - 1
            async with server.models.use("a"):
                await asyncio.sleep(0.5)
                assert server.model("a").is_ready
        finally:
            watching.cancel()


async def test_administrators_load_and_unload() -> None:
    async with desk() as server:
        with pytest.raises(InvalidRequestError, match="not running"):
            server.models.unload("a")
        server.models.load("a")
        await until(lambda: server.model("a").status == "loaded")
        with pytest.raises(InvalidRequestError, match="already running"):
            server.models.load("a")
        async with server.models.use("a"):
            server.models.unload("a")
            await asyncio.sleep(0.02)
            assert server.model("a").status == "loaded", "a request uses it"
        await until(lambda: server.model("a").status == "unloaded")
        assert not server.processes["a"][0].backend.is_loaded


async def test_without_autoload_requests_load_nothing() -> None:
    async with desk(autoload=False) as server:
        with pytest.raises(InvalidRequestError, match="not loaded"):
            await server.complete("a")
        server.models.load("a")
        await until(lambda: server.states() == "a")
        await server.complete("a")


async def test_unknown_and_missing_names_are_errors() -> None:
    async with desk() as server:
        with pytest.raises(NotFoundError, match="this server has a, b, c"):
            server.models.find("z")
        with pytest.raises(InvalidRequestError, match="missing"):
            server.models.find("")
        with pytest.raises(InvalidRequestError, match="not loaded"):
            server.models.running("a")
        assert server.models.find("a:latest") is server.model("a")


async def test_an_engine_that_has_ended_while_its_model_was_unloaded_is_started_again() -> None:
    async with desk(max_loaded=1) as server:
        await server.complete("a")
        await server.complete("b")
        server.processes["a"][0].has_ended = True
        await server.complete("a")
        assert server.n_launched["a"] == 2
        assert server.states() == "a"


async def test_what_waits_when_the_server_stops_is_told() -> None:
    async with desk(max_loaded=1) as server, server.models.use("a"):
        waiting = asyncio.create_task(server.complete("b"))
        await until(lambda: server.model("a").state is ModelState.LEAVING)
        server.models.refuse()
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting


async def test_steady_traffic_on_others_does_not_keep_a_model_out() -> None:
    async with desk(max_loaded=2) as server:
        is_over = False

        async def keep_busy(name: str) -> None:
            while not is_over:
                await server.complete(name, max_tokens=20)

        clients = [asyncio.create_task(keep_busy(name)) for name in "aabb"]
        await until(lambda: server.states() == "ab")
        async with asyncio.timeout(10):
            await server.complete("c")
        is_over = True
        await asyncio.gather(*clients)


async def test_a_model_that_is_to_be_unloaded_once_it_is_unused_holds_up_no_other() -> None:
    async with desk() as server, server.models.use("a"):
        server.models.unload("a")
        await server.complete("b")
        assert server.states() == "ab"


async def test_an_engine_that_is_being_started_again_makes_room() -> None:
    async with desk(max_loaded=1) as server:
        await server.complete("a")
        service = server.model("a").service
        assert service is not None
        service.engine_lost(True)
        await server.complete("b")
        assert server.processes["a"][0].has_ended
        await server.complete("a")
        assert server.n_launched["a"] == 2


async def test_the_only_model_waits_for_the_next_engine() -> None:
    """Its engine ended while the model was unloaded: the next one has it loaded."""
    async with desk("a") as server:
        await server.complete("a")
        service = server.model("a").service
        assert service is not None
        models = Models.of_one(ServedModel(["a"]), service)
        models.all[0].state = ModelState.UNLOADED
        assert await service.unload()
        service.engine_lost(True)

        async def use() -> bool:
            async with models.use("any") as used:
                return used.is_connected

        using = asyncio.create_task(use())
        await asyncio.sleep(0.02)
        service.engine_lost(True)
        await asyncio.sleep(0.02)
        assert not using.done()
        service.engine_restarted()
        assert await using
        await models.close(1)


async def test_a_bug_in_a_load_is_told_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "_RETRY_S", 0.0)
    async with desk() as server:
        server.errors["b"] = RuntimeError("a bug")
        with pytest.raises(ServerError, match="a bug"):
            await server.complete("b")
        assert server.model("b").state is ModelState.UNLOADED
        await server.complete("a")
        del server.errors["b"]
        await server.complete("b")


async def test_a_model_that_is_loaded_while_the_server_stops_takes_no_request() -> None:
    async with desk() as server:
        server.load_s = 0.1
        waiting = asyncio.create_task(server.complete("a"))
        await until(lambda: server.model("a").state is ModelState.LOADING)
        server.models.load("b")
        server.models.refuse()
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting
        assert server.n_launched["b"] == 0
        assert not server.models.n_in_flight


async def test_the_server_ends_while_processes_start_and_end() -> None:
    for delay in (0.0, 0.01, 0.03):
        async with desk(max_loaded=1, max_kept=1) as server:
            server.load_s = 0.02
            await server.complete("a")
            waiting = asyncio.create_task(server.complete("b"))
            await asyncio.sleep(delay)
            await server.models.close(1)
            (found,) = await asyncio.gather(waiting, return_exceptions=True)
            assert isinstance(found, LlamaslotError | Finished)
        assert all(each.has_ended for all_of in server.processes.values() for each in all_of)


async def test_scales_of_adapters_outlive_the_processes() -> None:
    async with desk(max_loaded=1, max_kept=1) as server:
        async with server.models.use("a") as service:
            service.adapter_scales = (0.5,)
        await server.complete("b")
        assert server.model("a").processes is None
        async with server.models.use("a") as service:
            assert service.adapter_scales == (0.5,)


async def test_only_so_many_requests_wait_for_a_model() -> None:
    async with desk(max_waiting=2) as server:
        server.load_s = 0.05
        found = await asyncio.gather(*(server.complete("a") for _ in range(3)), return_exceptions=True)
        assert sum(isinstance(each, QueueFullError) for each in found) == 1
        assert sum(isinstance(each, Finished) for each in found) == 2


@pytest.mark.parametrize("seed", range(30 if LONG else 4))
async def test_random_requests_of_eight_clients_on_four_models(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends, on its own model, which is loaded all the time; no more are loaded than may be."""
    monkeypatch.setattr(models_module, "KEPT_BYTES", 10)
    monkeypatch.setattr(models_module, "_IDLE_POLL_S", 0.01)
    chance = random.Random(seed)
    limits = {"max_loaded": 2, "max_kept": chance.choice([2, 3, 4]), "max_bytes": chance.choice([0, 2 * SIZE + 20])}
    idle_seconds = chance.choice([0, 0.02])
    async with desk("abcd", idle_seconds=idle_seconds, **limits) as server, AsyncExitStack() as stack:
        server.load_s = 0.002

        async def watch() -> None:
            while True:
                loaded = [each for all_of in server.processes.values() for each in all_of if each.engine]
                assert sum(each.backend.is_loaded and not each.has_ended for each in loaded) <= 2
                await asyncio.sleep(0)

        watching = [asyncio.create_task(each) for each in (watch(), server.models.unload_idle())]
        for each in watching:
            stack.callback(each.cancel)

        def disturb() -> None:
            name = chance.choice("abcd")
            with contextlib.suppress(InvalidRequestError):
                server.models.unload(name) if chance.random() < 0.5 else server.models.load(name)
            model = server.model(chance.choice("abcd"))
            if model.state is ModelState.UNLOADED and model.processes is not None and chance.random() < 0.3:
                # Its engine was killed.
                model.processes.has_ended = True  # type: ignore[misc]

        async def client() -> None:
            for _ in range(8):
                name = chance.choice("abcd")
                asking = asyncio.create_task(server.complete(name, name * 30, max_tokens=chance.randrange(1, 6)))
                if chance.random() < 0.2:
                    disturb()
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.random() / 50)
                    asking.cancel()
                    await asyncio.wait([asking])
                    continue
                end = await asking
                assert end.progress.n_generated >= 1

        await asyncio.gather(*(client() for _ in range(8)))
        assert not any(each.done() for each in watching)
        assert not any(each.n_uses for each in server.models.all)
        await until(lambda: not any(each.loading or each.n_waiting for each in server.models.all))
