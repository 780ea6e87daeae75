"""Server-sent events, and streams of JSON lines.

Headers are sent by `open`, so errors that need another status must be raised before. A `send` is one write unless
it is large. So is each `write_now`, which needs no turn of the event loop: where the model uses all cores, turns
delay decoding. It bypasses aiohttp, and so frames its data itself: in chunks of HTTP/1.1, for HTTP/1.0 not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from llamaslot.api.bodies import chunks, encode, with_values
from llamaslot.api.connections import Connection

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"
_ESCAPED_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")
"""Ends of lines in Unicode that JSON may contain, and their escapes."""
T = TypeVar("T")


def event(body: Any) -> bytes:
    """Return a body as one event."""
    return b"data: " + encode(body) + b"\n\n"


def long_event(body: Any, *values: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a body as one event, with values in the places that are `LATER`."""
    yield b"data: "
    yield from with_values(body, *values)
    yield b"\n\n"


def typed_event(body: msgspec.Struct, data: bytes | None = None) -> bytes:
    """Return a tagged struct as one event, whose type is the tag; `data` is its JSON, if already encoded."""
    return b"event: %b\ndata: %b\n\n" % (str(body.__struct_config__.tag).encode(), data or encode(body))


def json_line(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a JSON value as a line.

    Clients that use httpx, such as Ollama's, divide lines also where Unicode does.
    """
    for piece in pieces:
        escaped = piece
        for end, escape in _ESCAPED_ENDS:
            escaped = escaped.replace(end, escape)
        yield escaped
    yield b"\n"


class EventStream:
    """The writing side of one stream; `ping_interval` is in seconds, 0 or less for no `ping`s.

    What a slow client has not read yet stays in the connection's buffer. With more than `max_buffer` bytes in it
    the connection is closed.
    """

    def __init__(
        self,
        request: web.Request,
        ping_interval: int,
        max_buffer: int,
        ping: bytes = PING,
        content_type: str = EVENTS,
    ) -> None:
        self._request = request
        self._max_buffer = max_buffer
        self._ping = ping
        self._ping_interval = ping_interval if ping_interval > 0 else None
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._transport: asyncio.Transport | None = None
        """The connection, once events can be written to it directly."""
        self._is_chunked = self._has_begun = False
        self.response = web.StreamResponse(
            headers={"Content-Type": content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )

    async def open(self) -> None:
        """Send status and headers."""
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[bytes]) -> None:
        """Write events, which may come in parts; raises `ConnectionError` when the client is gone.

        Until all are written, none can be written directly: they would come between these.
        """
        self._transport = None
        has_written = False
        async for data in chunks(self._request, events):
            self._sent_at = self._loop.time()
            await self.response.write(data)
            has_written = True
        # Headers are sent with the first write.
        self._is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        self._has_begun |= has_written
        if self._has_begun:
            self._transport = self._request.transport

    @property
    def is_ready(self) -> bool:
        """True if `write_now` may be called: the headers are sent, and the connection is open."""
        return self._transport is not None and not self._transport.is_closing()

    def write_now(self, events: Iterable[bytes]) -> None:
        """Write events without waiting; only while `is_ready`."""
        assert self._transport is not None
        if data := b"".join(events):
            self._sent_at = self._loop.time()
            if self._is_chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            self._transport.write(data)
            connection = self._request.protocol
            if isinstance(connection, Connection):
                connection.count_written(len(data))
                if self._transport.get_write_buffer_size() > self._max_buffer:
                    connection.disconnect("--max-stream-buffer-kb")

    async def close(self, events: Iterable[bytes] = ()) -> None:
        """Write the last events and end the reply."""
        self._transport = None
        last = b""
        async for data in chunks(self._request, events):
            if last:
                await self.response.write(last)
            last = data
        await self.response.write_eof(last)

    async def wait(self, source: Callable[[], Awaitable[T]]) -> T:
        """Wait for `source`, which must lose nothing when cancelled; send a ping after each interval of silence."""
        while True:
            try:
                async with asyncio.timeout_at(self._next_ping()) as silence:
                    return await source()
            except TimeoutError:
                if not silence.expired():
                    raise
                if (due := self._next_ping()) is not None and due <= self._loop.time():
                    await self.send([self._ping])

    def _next_ping(self) -> float | None:
        return None if self._ping_interval is None else self._sent_at + self._ping_interval
