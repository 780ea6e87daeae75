"""A client that does not read its reply is disconnected, which cancels its request, and this is logged."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from llamaslot.api.connections import Connection, Connections
from llamaslot.api.sse import EventStream
from tests.fake_clock import LoopClock

PART = b"x" * 100_000


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("max_buffer", [10**6, 10**9], ids=["buffer", "timeout"])
async def test_a_client_that_does_not_read_is_disconnected(max_buffer: int, version: str) -> None:
    clock = LoopClock()
    loop = asyncio.get_running_loop()
    written, cancelled = asyncio.Event(), asyncio.Event()
    connections: list[Connection] = []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        stream = EventStream(request, 0, max_buffer)  # type: ignore[arg-type]
        await stream.open()
        await stream.send([b"a"])
        for _ in range(200):
            if stream.is_ready:
                stream.write_now([PART])
        written.set()
        try:
            await asyncio.sleep(10_000)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return stream.response

    server = web.Server(handler, handler_cancellation=True)

    def made() -> Connection:
        connections.append(Connection(Connections(9, loop.time), server, write_timeout=60))
        return connections[0]

    listener = await loop.create_server(made, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname(), limit=1000)
    with capture_logs() as logs:
        writer.write(f"GET / HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
        await written.wait()
        if max_buffer == 10**9:
            clock.advance(50)
            await reader.readexactly(8 * len(PART))
            clock.advance(15)
            await asyncio.sleep(0.02)
            assert connections[0].connected, "it has read enough"
            clock.advance(50)
            await asyncio.sleep(0.02)
            assert connections[0].connected
            # The kernel may have sent on to the client's buffers for a while.
            for _ in range(3):
                clock.advance(61)
                await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            await cancelled.wait()
    (line,) = [line for line in logs if line["event"] == "connection.slow_reader"]
    assert line["flag"] == ("--write-timeout" if max_buffer == 10**9 else "--max-stream-buffer-kb")
    assert max_buffer == 10**9 or max_buffer < line["unread_bytes"] < max_buffer + 2 * len(PART)
    writer.close()
    listener.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what was acknowledged")
async def test_a_client_that_reads_slowly_and_steadily_stays_connected() -> None:
    """The kernel empties the transport's buffer in lumps, so that for seconds it seems that nothing was read."""
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        stream = EventStream(request, 0, 10**9)  # type: ignore[arg-type]
        await stream.open()
        await stream.send([b"a"])
        for _ in range(60):
            stream.write_now([PART])
        await asyncio.sleep(60)
        return stream.response

    server = web.Server(handler, handler_cancellation=True)

    def made() -> Connection:
        connections.append(Connection(Connections(9, loop.time), server, write_timeout=0.25))
        return connections[0]

    listener = await loop.create_server(made, "127.0.0.1", 0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.setblocking(False)
        await loop.sock_connect(client, listener.sockets[0].getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(30):
            n_left = 40_000
            while n_left:
                n_left -= len(await loop.sock_recv(client, n_left))
            await asyncio.sleep(0.05)
        assert connections[0].connected
    listener.close()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_does_not_read_cannot_make_the_server_keep_its_reply(start: Any, version: str) -> None:
    """The buffer's limit holds for all that was generated, and the client's request ends with the connection."""
    # Each event has the model's name: together they are more than the kernel takes for the client.
    server = await start(alias="m" * 20_000, max_stream_buffer_bytes=100_000)
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 4}
    data = json.dumps(body).encode()
    address = urlsplit(server.url)
    loop = asyncio.get_running_loop()
    with socket.socket() as client, capture_logs() as logs:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        await loop.sock_connect(client, (address.hostname, address.port))
        head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        await loop.sock_sendall(client, head.encode() + data)
        async with asyncio.timeout(30):
            while not any(line["event"] == "connection.slow_reader" for line in logs):
                await asyncio.sleep(0.01)
            await server.idle()
    (line,) = [line for line in logs if line["event"] == "connection.slow_reader"]
    assert line["flag"] == "--max-stream-buffer-kb"
