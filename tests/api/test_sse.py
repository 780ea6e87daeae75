"""Events written directly to the connection: framed as chunks, in order, and never faster than a client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from llamaslot.api.sse import EventStream

Writer = Callable[[EventStream], Awaitable[None]]


@asynccontextmanager
async def reading(write: Writer, *, version: str = "1.1") -> AsyncIterator[asyncio.StreamReader]:
    """A raw client of a server that answers with what `write` does."""

    async def handler(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, 0, 2**20)
        await stream.open()
        await write(stream)
        return stream.response

    runner = web.ServerRunner(web.Server(handler))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0])
    writer.write(f"GET / HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()
        await runner.cleanup()


async def test_events_come_in_order_and_framed() -> None:
    async def write(stream: EventStream) -> None:
        assert not stream.is_ready
        await stream.send([b"a"])
        assert stream.is_ready
        stream.write_now([b"b" * 17, b"c"])
        stream.write_now([])
        await stream.send([b"d"])
        await stream.close([b"e"])
        assert not stream.is_ready

    async with reading(write) as reader:
        await reader.readuntil(b"\r\n\r\n")
        expected = b"1\r\na\r\n12\r\n" + b"b" * 17 + b"c\r\n1\r\nd\r\n1\r\ne\r\n0\r\n\r\n"
        assert await reader.readexactly(len(expected)) == expected


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async def write(stream: EventStream) -> None:
        await stream.send([b"a"])
        assert stream.is_ready
        stream.write_now([b"b", b"c"])
        await stream.send([b"d"])
        await stream.close([b"e"])

    async with reading(write, version="1.0") as reader:
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b"abcde"


async def test_a_slow_client_gets_everything() -> None:
    sizes: list[int] = []
    part = b"x" * 10_000

    async def write(stream: EventStream) -> None:
        await stream.send([b"a"])
        for _ in range(1000):
            assert stream.is_ready
            stream.write_now([part])
            sizes.append(len(part))
        await stream.close()

    async with reading(write) as reader:
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(30):
            data = b""
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data += await reader.read(2**16)
    assert data.count(b"x") == sum(sizes)
