"""Parser of a store's replies (RESP2) that checks each announced size before it allocates memory.

The store is not trusted. hiredis, the client's usual parser, allocates a list of as many elements as the store
announces: 17 GB for `*2147483647`. The garbage collector then walks through it, which stops all threads. Here the
caller limits how much a call may receive (`allowing`), and a size above the limit closes the connection.
"""

from __future__ import annotations

from asyncio import IncompleteReadError, LimitOverrunError, StreamReader
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from redis._parsers import BaseParser
from redis.exceptions import ConnectionError as StoreConnectionError
from redis.exceptions import InvalidResponse, ResponseError

ELEMENT_BYTES = 128
"""Bytes that each value counts in addition to its content: about the size of a Python object in a list."""
_HANDSHAKE_BYTES = 2**14
"""Additional bytes that every call may receive, for the handshake of a new connection and for error messages."""
_MAX_LINE_BYTES = 2**10
_MAX_ERROR_CHARACTERS = 200
_MAX_DIGITS = 20
_MAX_DEPTH = 2
"""Most levels of nested lists. Only SCAN answers with a list in a list."""

Reply: TypeAlias = bytes | int | ResponseError | list["Reply"] | None


class TooLargeError(InvalidResponse):
    """A reply is larger than the caller allows."""


class _Allowance:
    """Bytes that a call may still receive."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = _HANDSHAKE_BYTES + n_bytes
        self._left = self._n_bytes

    def renew(self) -> None:
        """Start again for a new connection. What the old one sent has been freed."""
        self._left = self._n_bytes

    def take(self, n_bytes: int) -> None:
        """Subtract `n_bytes`; raises `TooLargeError` if they exceed what is left."""
        if n_bytes > self._left:
            raise TooLargeError(f"the store announces {n_bytes:,} bytes where at most {self._left:,} are expected")
        self._left -= n_bytes


_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


@contextmanager
def allowing(n_bytes: int) -> Iterator[None]:
    """Allow the calls in this block to receive `n_bytes` together, where each value counts `ELEMENT_BYTES` more.

    A call outside of any block may only receive a reply without data.
    """
    token = _allowance.set(_Allowance(n_bytes))
    try:
        yield
    finally:
        _allowance.reset(token)


class ReplyParser(BaseParser):
    """Parser of one connection, for `redis.asyncio`."""

    def __init__(self, socket_read_size: int) -> None:
        self._stream: StreamReader | None = None

    def on_connect(self, connection: Any) -> None:
        """Start to read replies of a new connection."""
        self._stream = connection._reader
        if (allowance := _allowance.get()) is not None:
            allowance.renew()

    def on_disconnect(self) -> None:
        """Forget the connection."""
        self._stream = None

    async def can_read(self) -> bool:
        """Return True if the connection must not be reused: it has unrequested bytes, or is closed."""
        if self._stream is None:
            raise OSError("the connection is closed")
        # `StreamReader` has no public way to ask without taking the bytes; redis-py's own parsers do the same.
        return bool(self._stream._buffer) or self._stream.at_eof()  # type: ignore[attr-defined]

    can_read_destructive = can_read
    """The method's name before redis-py 8."""

    async def read_response(self, disable_decoding: bool = False, push_request: bool | None = False) -> Reply:
        """Return the next reply."""
        if self._stream is None:
            raise StoreConnectionError("the connection is closed")
        try:
            reply = await self._read(self._stream, _allowance.get() or _Allowance(0), _MAX_DEPTH)
        except IncompleteReadError as error:
            raise StoreConnectionError("the store has closed the connection") from error
        except LimitOverrunError as error:
            raise InvalidResponse("the store sends a line without end") from error
        if isinstance(reply, StoreConnectionError):
            raise reply
        return reply

    async def _read(self, stream: StreamReader, allowance: _Allowance, depth: int) -> Reply:
        line = await stream.readuntil(b"\r\n")
        if len(line) > _MAX_LINE_BYTES:
            raise InvalidResponse(f"the store sends a line of {len(line):,} bytes")
        kind, text = line[:1], line[1:-2]
        allowance.take(ELEMENT_BYTES + len(text))
        if kind == b"+":
            return text
        if kind == b"-":
            message = text.decode(errors="replace")[:_MAX_ERROR_CHARACTERS]
            error: ResponseError = self.parse_error(message)  # type: ignore[no-untyped-call]
            return error
        number = _number(line)
        if kind == b":":
            return number
        if number == -1:
            return None
        if kind == b"$":
            allowance.take(number)
            data = await stream.readexactly(number + 2)
            if data[-2:] != b"\r\n":
                raise InvalidResponse("the store sends a value of another length than it announces")
            return data[:-2]
        if not depth:
            raise InvalidResponse("the store sends lists within lists")
        # The bytes of the elements themselves are counted as they are read.
        allowance.take(number * ELEMENT_BYTES)
        return [await self._read(stream, allowance, depth - 1) for _ in range(number)]


def _number(line: bytes) -> int:
    """Return the number in a line: an integer reply, or a length of at least -1; raises `InvalidResponse`."""
    kind, text = line[:1], line[1:-2]
    if kind in b":$*" and len(text) <= _MAX_DIGITS and text.removeprefix(b"-").isdigit():
        number = int(text)
        if kind == b":" or number >= -1:
            return number
    raise InvalidResponse(f"the store does not send Redis's protocol: {line[:40]!r}")
