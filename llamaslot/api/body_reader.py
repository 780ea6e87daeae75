"""Reading request bodies within limits of size and time, and of the bytes that all unread bodies take together."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import HttpVersion11, web
from aiohttp.http import HttpProcessingError

from llamaslot.api.connections import OWNER_SHARE
from llamaslot.api.context import CALLER
from llamaslot.base.callers import Amounts
from llamaslot.base.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    TooLargeError,
    UnsupportedMediaTypeError,
)

_MIB = 2**20


class BodyReader:
    """Reads bodies of at most `max_bytes`, each within `timeout` seconds, and at most `max_total` bytes at once."""

    def __init__(self, *, max_bytes: int, max_total: int, timeout: float) -> None:
        self._max_bytes = max_bytes
        self._max_total = max_total
        self._timeout = timeout
        self._bytes = Amounts()
        """Those that owners have of bodies that are being received or read."""

    @asynccontextmanager
    async def body(self, request: web.Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """Give a request's body, of at most `max_bytes` if given; its bytes count as long as the block runs.

        Raises `TooLargeError`, `QueueFullError` if other bodies take too much memory, `RequestTimeoutError`, and
        `UnsupportedMediaTypeError` for one that is compressed, since its size is not known before it is
        decompressed. A client that waits for `100 Continue` gets it only if its body will be read.
        """
        encodings = request.headers.getall("Content-Encoding", [])
        if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
            message = "compressed bodies are not supported: send it without Content-Encoding"
            raise UnsupportedMediaTypeError(message, param="Content-Encoding")
        most = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
        _check_size(request.content_length or 0, most, self._max_bytes)
        await _continue(request)
        received = io.BytesIO()
        try:
            await self._receive(request, received, most)
            # Without a copy, which would hold up the event loop.
            yield received.getvalue()
        finally:
            self._bytes.add(request[CALLER].owner, -received.tell())
            # aiohttp keeps what broke the connection, and with it these frames, for longer than the connection.
            received.close()

    async def _receive(self, request: web.Request, received: io.BytesIO, most: int) -> None:
        owner = request[CALLER].owner
        try:
            async with asyncio.timeout(self._timeout):
                while chunk := await request.content.readany():
                    _check_size(received.tell() + len(chunk), most, self._max_bytes)
                    self._check_total(received.tell(), len(chunk), owner)
                    self._bytes.add(owner, len(chunk))
                    received.write(chunk)
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout:g} s (--body-timeout)"
            raise RequestTimeoutError(message) from None
        except RuntimeError as error:
            if request.transport is not None:
                raise
            # aiohttp's error if the connection was closed before its handler came to read the body, as that of one
            # that another has replaced.
            raise ConnectionResetError("the connection was closed before its body was read") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise InvalidRequestError("the body cannot be read: it is not encoded as its headers say") from error
        finally:
            # As above: an error keeps this frame.
            chunk = b""

    def _check_total(self, n_received: int, n_more: int, owner: str) -> None:
        """Raise unless the owner leaves enough free for others; one body alone is always read."""
        n_total, n_own = self._bytes.total, self._bytes[owner]
        if n_total > n_received and OWNER_SHARE * (self._max_total - n_total - n_more) < n_own + n_more:
            raise QueueFullError(
                f"request bodies take {n_total / _MIB:.0f} MiB, {n_own / _MIB:.0f} of them this client's, and the "
                f"limit is {self._max_total / _MIB:g} MiB (--max-total-body-mb); try later",
                retry_after=1,
            )


def _check_size(n_bytes: int, most: int, flag_bytes: int) -> None:
    """Raise `TooLargeError` for more than `most` bytes; `flag_bytes` is the limit of the server's flag."""
    if n_bytes > flag_bytes:
        limit = f"the server's limit of {flag_bytes / _MIB:g} MiB (--max-body-mb)"
    elif n_bytes > most:
        limit = f"the {most} bytes that this endpoint takes"
    else:
        return
    raise TooLargeError(f"the body is larger than {limit}")


async def accept_expect(request: web.Request) -> None:
    """Accept `Expect: 100-continue` without an answer: whether the body is wanted is known only when it is read.

    Raises `web.HTTPExpectationFailed` for any other expectation.
    """
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed


async def _continue(request: web.Request) -> None:
    """Tell a client that waits with its body to send it."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The reply has not begun.
        request.writer.output_size = 0
