"""A client that goes away cancels its request, whether running or queued, and affects no other."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llamaslot.base import commands
from llamaslot.base.commands import Cancel
from llamaslot.scheduler.request import Request, RequestState
from tests.api.conftest import Start
from tests.conftest import LONG
from tests.engine.harness import LocalEngine
from tests.engine.test_disk_worker import HEAD, KEY, GatedDisk, served, written
from tests.engine.test_engine import CountingBackend
from tests.fake_backend import FakeBackend

ENDLESS = {"prompt": "Hello", "ignore_eos": True, "temperature": 0, "max_tokens": 19_000}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def connect(start: Any) -> Any:
    """A server with one slot, and raw connections to it that have sent a request."""
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=1))
    writers = []

    async def connected(body: dict[str, Any], path: str = "/v1/completions") -> Connection:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return reader, writer

    yield server, connected
    for writer in writers:
        writer.close()


async def gone(server: Any) -> None:
    """Check that all requests have ended, well before their token limit."""
    state = await server.idle()
    assert server.service.capacity.n_in_flight == 0
    assert state.n_decoded_tokens < 10_000
    await server.ok("/completion", {"prompt": "Hello", "max_tokens": 1})


@pytest.mark.parametrize("drop", ["close", "reset"])
async def test_a_client_that_leaves_a_stream_cancels_its_request(
    connect: tuple[Any, Callable[..., Awaitable[Connection]]], drop: str
) -> None:
    server, connected = connect
    reader, writer = await connected({**ENDLESS, "stream": True})
    await reader.readuntil(b"data: ")
    if drop == "reset":
        writer.transport.abort()
    else:
        writer.close()
    await gone(server)


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
async def test_a_client_that_leaves_before_a_whole_reply_cancels_its_request(connect: Any, path: str) -> None:
    server, connected = connect
    _, writer = await connected(ENDLESS, path)
    await server.state_where(lambda state: state.slots[0].n_generated > 2)
    writer.close()
    await gone(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_queued_cancels_its_request(connect: Any, stream: bool) -> None:
    server, connected = connect
    _, first = await connected(ENDLESS)
    await server.state_where(lambda state: state.slots[0].n_generated > 2)
    _, second = await connected({**ENDLESS, "stream": stream})
    await server.state_where(lambda state: state.n_queued == 1)
    second.close()
    state = await server.state_where(lambda state: state.n_queued == 0)
    assert state.slots[0].request_id
    assert server.service.capacity.n_in_flight == 1
    first.close()
    await gone(server)


async def test_a_client_that_leaves_cancels_all_choices(connect: Any) -> None:
    server, connected = connect
    _, writer = await connected({**ENDLESS, "n": 3, "stream": True})
    await server.state_where(lambda state: state.n_queued == 2 and state.slots[0].n_generated > 2)
    writer.close()
    await gone(server)


async def test_a_cancelled_request_keeps_its_kv_in_the_slot(connect: Any) -> None:
    server, connected = connect
    _, writer = await connected(ENDLESS)
    await server.state_where(lambda state: state.slots[0].n_generated > 2)
    writer.close()
    await server.idle()
    reply = await server.ok("/completion", {**ENDLESS, "max_tokens": 1})
    assert reply["timings"]["cache_n"] == len("Hello")


@pytest.mark.slow
async def test_comments_are_sent_while_no_event_comes(connect: Any) -> None:
    server, connected = connect
    await connected(ENDLESS)
    await server.state_where(lambda state: state.slots[0].n_generated > 2)
    reader, writer = await connected({**ENDLESS, "stream": True, "sse_ping_interval": 1})
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"text/event-stream" in head
    assert await asyncio.wait_for(reader.readuntil(b"\n\n"), 30) == b"8\r\n: ping\n\n"
    writer.close()


@pytest.fixture
def at_end() -> Iterator[ExitStack]:
    """Callbacks for after the end of the servers of `start`, if it is the fixture before."""
    with ExitStack() as stack:
        yield stack


class Cancellations:
    """For each request that was cancelled: its stage, and the steps computed after the engine had been told."""

    def __init__(self, local: LocalEngine, backend: CountingBackend) -> None:
        self.stages: Counter[str] = Counter()
        self.n_steps: list[int] = []
        self._told: dict[str, int] = {}
        self._engine, self._backend = local.engine, backend
        self._cancel = self._engine._cancel
        self._engine._cancel = self.cancel
        local.service.connect(self.send)

    def send(self, command: commands.EngineCommand) -> None:
        """Note when the engine is told."""
        if isinstance(command, Cancel):
            self._told[command.completion_id] = self._backend.n_decodes
        self._engine.send(command)

    def cancel(self, completion_id: str) -> None:
        """Note when it frees the slot."""
        live = self._engine._replies.get(completion_id)
        if live is not None:
            self.stages[self.stage(live.request)] += 1
            self.n_steps.append(self._backend.n_decodes - self._told[completion_id])
        self._cancel(completion_id)
        assert all(
            slot.request is None or slot.request.id != completion_id for slot in self._engine.scheduler.slots
        )

    def stage(self, request: Request) -> str:
        """Where a request is on its way."""
        if request.state is RequestState.QUEUED:
            return "queued"
        if request.n_generated:
            return "decoding"
        return "prefilling" if request.n_prompt_computed else "loading"


async def test_every_client_that_leaves_frees_its_slot_within_a_step(
    at_end: ExitStack, start: Start, tmp_path: Path
) -> None:
    async with served(tmp_path) as harness:
        await harness.submit("a", HEAD)
        await written(harness)
    store = GatedDisk(tmp_path)
    at_end.callback(store.close)
    store.open(KEY, 10**7)
    backend = CountingBackend(n_ctx=2048, n_slots=2, n_reserved=4, n_ubatch=32)
    server = await start(backend=backend, engine={"disk": store, "ram_bytes": 10**6})
    cancellations = Cancellations(server.local, backend)
    engine = server.local.engine
    host, port = server.url.removeprefix("http://").split(":")
    chance = random.Random(1)

    async def leave(body: dict[str, Any], reached: Callable[[Request], bool]) -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps({**ENDLESS, "stream": chance.random() < 0.5, **body}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        async with asyncio.timeout(20):
            while not any(reached(live.request) for live in engine._replies.values()):
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                writer.transport.abort()
            writer.close()
            while server.service.capacity.n_in_flight > n_others:
                await asyncio.sleep(0)

    n_others, n_each = 0, 250 if LONG else 3
    for _ in range(n_each):
        await leave({"prompt": HEAD + "more"}, lambda r: cancellations.stage(r) == "loading" and r.slot >= 0)
    store.gate.set()
    for i in range(n_each):
        await leave({"prompt": f"{i} {'x' * 1000}"}, lambda r: cancellations.stage(r) == "prefilling")
        await leave({"prompt": f"{i} Hello"}, lambda r: r.n_generated > 2)
    for i in range(n_each):
        n_others = 2
        async with server.session.post(f"{server.url}/v1/completions", json={**ENDLESS, "n": 2, "stream": True}):
            await leave({"prompt": f"{i} Hello"}, lambda r: r.state is RequestState.QUEUED and not r.params.group)
        n_others = 0
        await server.idle()
    assert cancellations.stages.total() == 6 * n_each
    assert set(cancellations.stages) == {"loading", "prefilling", "decoding", "queued"}
    assert max(cancellations.n_steps) <= 1
