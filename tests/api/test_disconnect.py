"""A client that goes away cancels its request, whether running or queued, and affects no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

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
    assert server.service.n_in_flight == 0
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
    assert server.service.n_in_flight == 1
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
