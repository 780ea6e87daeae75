"""Server-sent events: one HTTP reply that grows.

Headers go out with `open`, so whatever can be refused must be refused before. Each `send` is one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from aiohttp import web

from llamaslot.api import errors
from llamaslot.api.replies import encode

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def event(body: Any) -> bytes:
    """A body as one event."""
    return b"data: " + encode(body) + b"\n\n"


class EventStream:
    """The writing side of one stream; `ping_interval` is in seconds, 0 or less for no pings."""

    def __init__(self, request: web.Request, ping_interval: int) -> None:
        self._request = request
        self._ping_interval = ping_interval if ping_interval > 0 else None
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )

    async def open(self) -> None:
        """Send status and headers."""
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[bytes]) -> None:
        """Write events at once; raises `ConnectionError` when the client is gone."""
        if data := b"".join(events):
            await self.response.write(data)

    async def close(self, events: Iterable[bytes] = ()) -> None:
        """Write the last events and end the reply."""
        await self.response.write_eof(b"".join(events))

    async def fail(self, error: Exception) -> None:
        """Tell the client what went wrong and end the reply, without `[DONE]`."""
        await self.close([b"data: " + errors.body(errors.described(error)) + b"\n\n"])

    async def wait(self, source: Callable[[], Awaitable[T]]) -> T:
        """Wait for `source`, which must lose nothing when cancelled, with a comment at each interval of silence."""
        while True:
            try:
                async with asyncio.timeout(self._ping_interval) as silence:
                    return await source()
            except TimeoutError:
                if not silence.expired():
                    raise
                await self.send([b": ping\n\n"])
