"""Reading request bodies, and writing JSON replies.

A reply whose size its client has chosen is never encoded as a whole: a generator yields it in pieces, which are
made while it is sent, one piece of one reply in each turn of the event loop. `LATER` stands in a body for what is
encoded by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from llamaslot.api import http_errors
from llamaslot.api.body_reader import BodyReader
from llamaslot.api.connections import Connection
from llamaslot.protocol.bodies import decode

_MAX_SMALL_BODY = 2**16
"""Bytes of a body that is decoded on the event loop."""
_CHUNK_BYTES = 2**16
"""Bytes of a reply that are made and written at a time."""
_CHUNK_S = 0.004
"""Time after which a chunk is complete, however short it is."""
_MARK = b"\0"

B = TypeVar("B", bound=msgspec.Struct)
BODY_READER = web.AppKey("BODY_READER", BodyReader)
LATER: Any = msgspec.Raw(_MARK)
"""Place of a value for `with_values`: a byte that JSON never has."""

encode = msgspec.json.Encoder().encode


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
    """Yield one JSON list of the items of many lists; an empty one gives others a turn."""
    yield b"["
    comma = b""
    for part in parts:
        if part:
            yield comma + encode(part)[1:-1]
            comma = b","
        else:
            yield b""
    yield b"]"


async def json_reply(request: web.Request, pieces: Iterable[bytes]) -> web.StreamResponse:
    """Return a successful reply with a JSON body of any size, which is sent here unless it is small."""
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


async def read(request: web.Request, kind: type[B]) -> B:
    """Return the small body of a request; raises an `InvalidRequestError` that names the field at fault."""
    async with request.app[BODY_READER].body(request, _MAX_SMALL_BODY) as raw:
        return decode(raw, kind)
