"""Reading request bodies within limits of size and time, and of the bytes that all unparsed bodies take together.

Large bodies are parsed and rendered on a thread of their own, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from llamaslot.base.errors import InvalidRequestError, QueueFullError, RequestTimeoutError, TooLargeError
from llamaslot.base.executors import close_after_queue

_MIB = 2**20
_LARGE_BYTES = 2**16
"""Size from which a body is parsed on the thread: up to it, that takes about as long as the hop to the thread."""
_CLOSE_TIMEOUT_S = 2.0
"""Time that the thread may take to end."""
T = TypeVar("T")


class BodyReader:
    """Reads bodies of at most `max_bytes`, each within `timeout` seconds, and at most `max_total` bytes at once."""

    def __init__(self, *, max_bytes: int, max_total: int, timeout: float) -> None:
        self._max_bytes = max_bytes
        self._max_total = max_total
        self._timeout = timeout
        self._n_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llamaslot-bodies")

    async def close(self) -> bool:
        """End the thread, once no request waits for it any more; False if it does not end."""
        _, pending = await asyncio.wait(
            [asyncio.wrap_future(close_after_queue(self._thread))], timeout=_CLOSE_TIMEOUT_S
        )
        return not pending

    async def parse(self, request: web.Request, convert: Callable[[bytes], T]) -> T:
        """Return a converted body, on the thread if it is large; raises what `convert` and `body` raise."""
        async with self.body(request) as raw:
            return await self.run(len(raw), convert, raw)

    async def run(self, n_bytes: int, function: Callable[..., T], *arguments: object) -> T:
        """Call a function, on the thread if it works on many bytes."""
        if n_bytes < _LARGE_BYTES:
            return function(*arguments)
        unread = list(arguments)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*_taken(unread)))
        finally:
            # The executor's queue keeps cancelled calls until it comes to them.
            unread.clear()

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """Give a request's body; its bytes count as long as the block runs.

        Raises `TooLargeError`, `QueueFullError` if other bodies take too much memory, `RequestTimeoutError`, and
        `InvalidRequestError` for one that is compressed, since its size is not known before it is decompressed.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidRequestError("compressed bodies are not supported: send it without Content-Encoding")
        self._check_size(request.content_length or 0)
        received = bytearray()
        try:
            await self._receive(request, received)
            yield bytes(received)
        finally:
            self._n_bytes -= len(received)

    async def _receive(self, request: web.Request, received: bytearray) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                while chunk := await request.content.readany():
                    self._check_size(len(received) + len(chunk))
                    self._check_total(len(received), len(chunk))
                    self._n_bytes += len(chunk)
                    received += chunk
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout:g} s (--body-timeout)"
            raise RequestTimeoutError(message) from None

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > self._max_bytes:
            raise TooLargeError(
                f"the body is larger than the server's limit of {self._max_bytes / _MIB:g} MiB (--max-body-mb)"
            )

    def _check_total(self, n_received: int, n_more: int) -> None:
        # One body alone is always read.
        if self._n_bytes > n_received and self._n_bytes + n_more > self._max_total:
            raise QueueFullError(
                f"request bodies take {self._n_bytes / _MIB:.0f} MiB, and the limit is {self._max_total / _MIB:g} "
                "MiB (--max-total-body-mb); try later",
                retry_after=1,
            )


def _taken(items: list[Any]) -> list[Any]:
    """Empty a list, and return what it held."""
    taken, items[:] = items[:], []
    return taken
