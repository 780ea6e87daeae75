"""Connection to a remote store: calls with limits of time and size, and a parser that keeps to them.

The store is not trusted: it may answer anything, of any length, at any time. hiredis, the client's usual parser,
allocates a list of as many elements as the store announces: 17 GB for `*2147483647`. The garbage collector then
walks through it, which stops all threads. So `ReplyParser` (RESP2) checks each announced size before it allocates
memory: the caller limits how much a call may receive (`allowing`), and a size above the limit closes the
connection.
"""

from __future__ import annotations

import asyncio
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias, TypeVar

from redis import exceptions
from redis._parsers import BaseParser
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as StoreConnectionError
from redis.exceptions import InvalidResponse, ResponseError

from llamaslot.backend.remote import StoreSettings
from llamaslot.backend.storage import FailureLog
from llamaslot.kvcache.tiers.remote_tier import RemoteUnavailableError

_MAX_NUMBER = 2**53
"""Largest plausible count or size in a store; still fits into an index entry."""
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

_T = TypeVar("_T")


def connect(settings: StoreSettings, n_retries: int | None = None) -> Redis:
    """Return a client, which connects on first use and retries `n_retries` times (None: redis-py's default)."""
    options: dict[str, Any] = {}
    if settings.url.startswith("rediss://"):
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
        if settings.ca_file:
            options["ssl_ca_certs"] = settings.ca_file
    if settings.password:
        options["password"] = settings.password
    if n_retries is not None:
        options["retry"] = Retry(NoBackoff(), n_retries)
    return Redis.from_url(
        settings.url,
        protocol=2,
        parser_class=ReplyParser,
        # Not redis-py's timeouts: each call has one time limit of its own, which also closes the connection.
        socket_connect_timeout=None,
        socket_timeout=None,
        health_check_interval=0,
        **options,
    )


class StoreConnection:
    """A client of the store, whose keys begin with `prefix`."""

    def __init__(self, client: Redis, prefix: str, settings: StoreSettings, failures: FailureLog) -> None:
        self.client: Any = client
        self.prefix = prefix
        self._settings = settings
        self._failures = failures

    def name(self, kind: str, digest: bytes) -> str:
        """Return the key of a kind (such as `d`) for a digest."""
        return f"{self.prefix}{kind}:{digest.hex()}"

    async def within(self, call: Callable[[], Awaitable[_T]], seconds: float | None = None, n_bytes: int = 0) -> _T:
        """Return the result of a call; raises `RemoteUnavailableError` if it fails or takes longer than `seconds`.

        The default of `seconds` is the settings' `timeout_s`; `n_bytes` is as in `unlimited`.
        """

        async def limited() -> _T:
            async with asyncio.timeout(self._settings.timeout_s if seconds is None else seconds):
                return await call()

        return await self.unlimited(limited, n_bytes)

    async def unlimited(self, call: Callable[[], Awaitable[_T]], n_bytes: int = 0) -> _T:
        """Return the result of a call; raises `RemoteUnavailableError` if it fails. The caller sets a time limit.

        The call may receive `n_bytes` (`size_of`) of data.
        """
        try:
            with allowing(n_bytes):
                return await call()
        except RemoteUnavailableError:
            raise
        except (exceptions.RedisError, OSError, TimeoutError, ValueError) as error:
            self._fail(error)
        except (TypeError, LookupError, AttributeError, EOFError) as error:
            # Raised by the client itself, which does not check the types of replies.
            self._fail(ValueError(f"the store answers with unexpected types ({error})"))

    def _fail(self, error: Exception) -> NoReturn:
        self._failures.add("remote.unavailable", error, flag="--cache-remote", url=self._settings.address)
        raise RemoteUnavailableError(str(error) or type(error).__name__) from error


def size_of(n_values: int, n_bytes: int) -> int:
    """Return the size of replies with `n_values` values of at most `n_bytes` each."""
    return n_values * (ELEMENT_BYTES + n_bytes)


def values(reply: object, n: int | None = None) -> list[bytes | None]:
    """Return a reply that must be a list, of `n` values if given; raises `ValueError`."""
    if not isinstance(reply, list) or not all(each is None or isinstance(each, bytes) for each in reply):
        raise ValueError("the store does not answer with a list of values")
    if n is not None and len(reply) != n:
        raise ValueError(f"the store answers with {len(reply)} values instead of {n}")
    return reply


def number(reply: object) -> int:
    """Return a reply that must be a count or size; raises `ValueError` for anything else."""
    if not isinstance(reply, int) or not 0 <= reply <= _MAX_NUMBER:
        raise ValueError("the store does not answer with a size")
    return int(reply)


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
