"""Reading request bodies, and writing JSON replies."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from llamaslot.api.body_reader import BodyReader
from llamaslot.protocol.decoding import decode

_MAX_SMALL_BODY = 2**16
"""Bytes of a body that is decoded on the event loop."""

B = TypeVar("B", bound=msgspec.Struct)
BODY_READER = web.AppKey("BODY_READER", BodyReader)

encode = msgspec.json.Encoder().encode


def json_response(body: Any) -> web.Response:
    """Return a successful reply with a JSON body."""
    return web.Response(body=encode(body), content_type="application/json")


async def read(request: web.Request, kind: type[B]) -> B:
    """Return the small body of a request; raises an `InvalidRequestError` that names the field at fault."""
    async with request.app[BODY_READER].body(request, _MAX_SMALL_BODY) as raw:
        return decode(raw, kind)
