"""Reading request bodies, within limits of size and time, and writing JSON replies, whole or a page of a list.

A reply whose size the client chooses is never encoded as a whole: a generator yields it in pieces, which are made
while it is sent, one piece of one reply in each turn of the event loop. `LATER` is the placeholder in a body for a
value that is encoded separately.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Literal, TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http import HttpProcessingError

from llamaslot.api import http_errors
from llamaslot.api.connections import OWNER_SHARE, Connection
from llamaslot.api.context import CALLER, ApiSettings, service_of
from llamaslot.api.middleware import caller_of, valid_unicode
from llamaslot.base.callers import Amounts
from llamaslot.base.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    TooLargeError,
    UnsupportedMediaTypeError,
)
from llamaslot.base.prompt_jobs import ListItems
from llamaslot.protocol.bodies import decode

_MAX_SMALL_BODY = 2**16
"""Bytes of a body that is decoded on the event loop."""
_CHUNK_BYTES = 2**16
"""Bytes of a reply that are made and written at a time."""
_CHUNK_S = 0.004
"""Time after which a chunk is complete, however short it is."""
_RECEIVED = web.RequestKey("_RECEIVED", io.BytesIO)
"""The body of a request, if it was received before its handler asks for it."""
_MARK = b"\0"
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
is_count = re.compile(r"[0-9]{1,9}").fullmatch

B = TypeVar("B")
T = TypeVar("T")
LATER: Any = msgspec.Raw(_MARK)
"""Place of a value for `with_values`: a byte that JSON never has."""

encode = msgspec.json.Encoder().encode
_MIB = 2**20


class BodyReader:
    """Reads bodies within the settings' limits of the size of one, of the size of all together, and of time."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._bytes = Amounts()
        """Bytes of the bodies that are being received or read, by owner."""

    @asynccontextmanager
    async def body(self, request: web.Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """Receive the body of a request, of at most `max_bytes` if given; its bytes are counted until the block
        ends.

        Raises `TooLargeError`, `QueueFullError` if other bodies take too much memory, `RequestTimeoutError`, and
        `UnsupportedMediaTypeError` for a compressed body, whose size is not known before it is decompressed. A
        client that waits for `100 Continue` gets it only if its body will be read.
        """
        limit = self._settings.max_body_bytes
        most = limit if max_bytes is None else min(max_bytes, limit)
        received: io.BytesIO | None = request.pop(_RECEIVED, None)
        if received is None:
            received = await self._received(request, most)
        try:
            _check_size(received.tell(), most, limit)
            # Without a copy, which would hold up the event loop.
            yield received.getvalue()
        finally:
            self._release(request, received)

    @asynccontextmanager
    async def received(self, request: web.Request) -> AsyncIterator[bytes]:
        """Receive the body of a request, and keep it in the block for the handler, which calls `body`."""
        received = request[_RECEIVED] = await self._received(request, self._settings.max_body_bytes)
        try:
            yield received.getvalue()
        finally:
            if (unread := request.pop(_RECEIVED, None)) is not None:
                self._release(request, unread)

    async def _received(self, request: web.Request, most: int) -> io.BytesIO:
        encodings = request.headers.getall("Content-Encoding", [])
        if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
            message = "compressed bodies are not supported: send it without Content-Encoding"
            raise UnsupportedMediaTypeError(message, param="Content-Encoding")
        _check_size(request.content_length or 0, most, self._settings.max_body_bytes)
        await _continue(request)
        received = io.BytesIO()
        try:
            await self._receive(request, received, most)
        except BaseException:
            self._release(request, received)
            raise
        return received

    def _release(self, request: web.Request, received: io.BytesIO) -> None:
        self._bytes.add(request[CALLER].owner, -received.tell())
        # aiohttp keeps what broke the connection, and with it these frames, for longer than the connection.
        received.close()

    async def _receive(self, request: web.Request, received: io.BytesIO, most: int) -> None:
        owner = request[CALLER].owner
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while chunk := await request.content.readany():
                    _check_size(received.tell() + len(chunk), most, self._settings.max_body_bytes)
                    self._check_total(received.tell(), len(chunk), owner)
                    self._bytes.add(owner, len(chunk))
                    received.write(chunk)
        except TimeoutError:
            message = f"the body did not arrive within {self._settings.body_timeout:g} s (--body-timeout)"
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
        n_total, n_own, most = self._bytes.total, self._bytes[owner], self._settings.max_total_body_bytes
        if n_total > n_received and not self._bytes.may_add(owner, n_more, most, OWNER_SHARE):
            raise QueueFullError(
                f"request bodies take {n_total / _MIB:.0f} MiB, {n_own / _MIB:.0f} of them this client's, and the "
                f"limit is {most / _MIB:g} MiB (--max-total-body-mb); try later",
                retry_after=1,
            )


BODY_READER = web.AppKey("BODY_READER", BodyReader)


def _check_size(n_bytes: int, most: int, flag_bytes: int) -> None:
    """Raise `TooLargeError` for more than `most` bytes; `flag_bytes` is the limit of the server's flag."""
    if n_bytes > flag_bytes:
        limit = f"the server's limit of {flag_bytes / _MIB:g} MiB (--max-body-mb)"
    elif n_bytes > most:
        limit = f"the {most} bytes that this endpoint takes"
    else:
        return
    raise TooLargeError(f"the body is larger than {limit}")


def has_body(request: web.Request) -> bool:
    """Return True if a request has a body that nobody has read."""
    return _RECEIVED in request or request.can_read_body


async def read(request: web.Request, kind: type[B]) -> B:
    """Return the small body of a request; raises an `InvalidRequestError` that names the field at fault."""
    async with request.app[BODY_READER].body(request, _MAX_SMALL_BODY) as raw:
        return decode(raw, kind)


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


def json_response(body: Any) -> web.Response:
    """Return a successful reply with a small JSON body."""
    return web.Response(body=encode(body), content_type="application/json")


def with_values(body: Any, *values: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the JSON of a body, with a value in each place that is `LATER`, in their order."""
    first, *others = encode(body).split(_MARK)
    yield first
    for value, after in zip(values, others, strict=True):
        yield from value
        yield after


def list_of(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield a JSON list of items that are in pieces each."""
    yield b"["
    for i, item in enumerate(items):
        if i:
            yield b","
        yield from item
    yield b"]"


def joined_lists(parts: Iterable[list[Any]]) -> Iterator[bytes]:
    """Yield one JSON list of the items of many lists; an empty list yields an empty piece, to give other
    replies a turn.
    """
    yield b"["
    comma = b""
    for part in parts:
        if part:
            yield comma + encode(part)[1:-1]
            comma = b","
        else:
            yield b""
    yield b"]"


async def send_json(request: web.Request, pieces: Iterable[bytes]) -> web.StreamResponse:
    """Send a successful reply with a JSON body of any size. A small one is returned, and not sent yet."""
    rest = _cut(pieces)
    first, is_all = _next_chunk(rest)
    if is_all or request.method == "HEAD":
        return web.Response(body=first, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(request)
    try:
        await response.write(first)
        async for chunk in chunks(request, rest):
            await response.write(chunk)
        await response.write_eof()
    except ConnectionError:
        # The client is gone.
        pass
    except Exception as error:
        # The status is sent: only a connection that ends too soon can tell of the error.
        http_errors.described(error)
        if isinstance(request.protocol, Connection):
            request.protocol.abort()
    return response


async def chunks(request: web.BaseRequest, pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a reply in chunks.

    The first is made at once. Of all further ones, whichever replies they are of, each turn of the event loop makes
    one.
    """
    connection, rest = request.protocol, _cut(pieces)
    chunk, is_all = _next_chunk(rest)
    if chunk:
        yield chunk
    turn = connection.encoding_turn if isinstance(connection, Connection) else asyncio.Lock()
    while not is_all:
        async with turn:
            chunk, is_all = _next_chunk(rest)
            await asyncio.sleep(0)
        if chunk:
            yield chunk


def _next_chunk(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """Return the next chunk, and True if it is the last one."""
    chunk: list[bytes] = []
    n_bytes, now = 0, asyncio.get_running_loop().time
    end = now() + _CHUNK_S
    for piece in pieces:
        chunk.append(piece)
        n_bytes += len(piece)
        if n_bytes >= _CHUNK_BYTES or now() >= end:
            return b"".join(chunk), False
    return b"".join(chunk), True


def _cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Cut long pieces, such as a stored body."""
    for piece in pieces:
        if len(piece) <= _CHUNK_BYTES:
            yield piece
        else:
            for start in range(0, len(piece), _CHUNK_BYTES):
                yield piece[start : start + _CHUNK_BYTES]


class ListReply(msgspec.Struct, Generic[T]):
    """A page of a list."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Paging:
    """The page that a request asks for; raises `InvalidRequestError`.

    `order` is the default, and `min_limit` the least `limit`.
    """

    def __init__(self, request: web.Request, order: str, min_limit: int) -> None:
        limit = request.query.get("limit", str(DEFAULT_LIMIT))
        if not is_count(limit) or not min_limit <= int(limit) <= MAX_LIMIT:
            message = f"'limit' must be an integer from {min_limit} to {MAX_LIMIT}"
            raise InvalidRequestError(message, param="limit")
        order = request.query.get("order", order)
        if order not in ("asc", "desc"):
            raise InvalidRequestError("'order' must be asc or desc", param="order")
        self.limit = int(limit)
        self.is_reversed = order == "desc"
        self.after = request.query.get("after", "")

    def page(self, items: list[T], id_of: Callable[[T], str]) -> ListReply[T]:
        """Return the page of items, which are in ascending order; raises `InvalidRequestError` for `after`."""
        listed = items[::-1] if self.is_reversed else items
        if self.after:
            place = next((i for i, item in enumerate(listed) if id_of(item) == self.after), None)
            if place is None:
                raise InvalidRequestError(f"'after': there is no item '{self.after}'", param="after")
            listed = listed[place + 1 :]
        page = listed[: self.limit]
        first, last = (id_of(page[0]), id_of(page[-1])) if page else (None, None)
        return ListReply(page, first, last, has_more=len(listed) > len(page))


async def page_of_stored(request: web.Request, lists: Sequence[bytes], paging: Paging) -> web.StreamResponse:
    """Return a page of stored items, which are given as JSON lists, the oldest item first.

    The prompt worker decodes them. Here many MiB would hold up the event loop, on another thread too, since
    `msgspec` keeps the GIL.
    """
    caller = caller_of(request)
    job = ListItems(
        tuple(lists),
        paging.limit,
        is_descending=paging.is_reversed,
        after=valid_unicode(paging.after),
        client=caller.client(),
    )
    service = service_of(request)
    reply: bytes = await service.answer(job)
    with service.reply_budget.held(caller.owner, len(reply)):
        return await send_json(request, [reply])
