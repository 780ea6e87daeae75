"""What every request passes before its handler: an id, CORS, readiness of the model, the API key.

Keys are compared in constant time. No header of the client is used for anything but what it says here.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import structlog
from aiohttp import web

from llamaslot.api.bodies import LONGEST_ID
from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.http_errors import Handler
from llamaslot.base.errors import AuthenticationError, InvalidRequestError

UNIQUE_ID = web.RequestKey("UNIQUE_ID", str)
"""Our own name for a request; the engine's ids and those in replies are made from it."""
CLIENT_ID = web.RequestKey("CLIENT_ID", str)
"""The client's name for a request in its `X-Request-Id`, empty where it gave no sane one."""

_log = structlog.get_logger(__name__)
_PUBLIC = frozenset({"/health", "/v1/health"})
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Credentials": "true",
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*",
}


class Caller(NamedTuple):
    """What a request's headers say of who asks."""

    client_id: str
    """The client's name for the request; empty where it gave no sane one."""
    api_key: str
    session_id: str
    """The client's name for the conversation; empty for none."""


def caller_of(request: web.Request) -> Caller:
    """Raises `InvalidRequestError` for an `X-Session-ID` that is too long."""
    session_id = request.headers.get("X-Session-ID", "")
    if len(session_id) > LONGEST_ID:
        raise InvalidRequestError(f"X-Session-ID is limited to {LONGEST_ID} characters", param="X-Session-ID")
    return Caller(request[CLIENT_ID], given_key(request), session_id)


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, by the client's own name for it where that is fit for a log."""
    theirs = request.headers.get("X-Request-Id", "")
    request[UNIQUE_ID] = uuid4().hex
    request[CLIENT_ID] = theirs if _SANE_ID.fullmatch(theirs) else ""
    with structlog.contextvars.bound_contextvars(http_request_id=_shown_id(request)):
        _log.debug("request.arrived", path=request.path, unique_id=request[UNIQUE_ID])
        return await handler(request)


def _shown_id(request: web.Request) -> str:
    """What the request is called in the reply's `X-Request-Id` and in the log."""
    return request[CLIENT_ID] or request[UNIQUE_ID]


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """The headers of every reply; a signal of aiohttp's, since streams and errors need them too."""
    response.headers["Server"] = "llamaslot"
    response.headers["X-Request-Id"] = _shown_id(request) if UNIQUE_ID in request else uuid4().hex
    origin = request.headers.get("Origin")
    if origin is None:
        return
    response.headers["Vary"] = "Origin"
    if origin_allowed(origin, request.app[SETTINGS].cors_origins):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer preflights; let others in once the model is there and if they bring a key."""
    if request.method == "OPTIONS":
        return web.Response(headers=_PREFLIGHT_HEADERS)
    request.app[READINESS].check()
    keys = request.app[SETTINGS].api_keys
    if keys and request.path not in _PUBLIC and not key_is_known(given_key(request), keys):
        raise AuthenticationError("Invalid API Key")
    return await handler(request)


def given_key(request: web.Request) -> str:
    """The key in `Authorization: Bearer` or, without that, in `X-Api-Key`."""
    authorization = request.headers.get("Authorization")
    if authorization is None:
        return request.headers.get("X-Api-Key", "")
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else authorization


def key_is_known(given: str, keys: Sequence[str]) -> bool:
    """Whether it is one of the keys, in a time that tells nothing about them."""
    raw = given.encode("utf-8", "surrogateescape")
    return sum(hmac.compare_digest(raw, key.encode()) for key in keys) > 0


def origin_allowed(origin: str, allowed: Sequence[str]) -> bool:
    """Whether pages of this origin may read replies."""
    if "*" in allowed or origin in allowed:
        return True
    if "localhost" not in allowed:
        return False
    try:
        return urlsplit(origin).hostname in _LOCAL_HOSTS
    except ValueError:
        return False
