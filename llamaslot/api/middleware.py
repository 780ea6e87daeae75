"""Middleware of every request: its id, CORS, readiness of the model, and the API key.

Keys are compared in constant time.
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

from llamaslot.api.bodies import MAX_ID_CHARS
from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.http_errors import Handler
from llamaslot.base.errors import AuthenticationError, InvalidRequestError

UNIQUE_ID = web.RequestKey("UNIQUE_ID", str)
"""The server's id of a request; the ids of completions and replies derive from it."""
CLIENT_ID = web.RequestKey("CLIENT_ID", str)
"""The client's `X-Request-Id`; empty without a valid one."""

_log = structlog.get_logger(__name__)
_PUBLIC = frozenset({"/health", "/v1/health"})
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Credentials": "true",
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*",
}


class Caller(NamedTuple):
    """The client of a request, from its headers."""

    client_id: str
    """The client's `X-Request-Id`; empty without a valid one."""
    api_key: str
    session_id: str
    """The client's `X-Session-ID`; empty without one."""


def caller_of(request: web.Request) -> Caller:
    """Return the client of a request; raises `InvalidRequestError` for an `X-Session-ID` that is too long."""
    session_id = request.headers.get("X-Session-ID", "")
    if len(session_id) > MAX_ID_CHARS:
        raise InvalidRequestError(f"X-Session-ID is limited to {MAX_ID_CHARS} characters", param="X-Session-ID")
    return Caller(request[CLIENT_ID], given_key(request), session_id)


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id; the client's own is used if it is fit for a log."""
    client_id = request.headers.get("X-Request-Id", "")
    request[UNIQUE_ID] = uuid4().hex
    request[CLIENT_ID] = client_id if _VALID_ID.fullmatch(client_id) else ""
    with structlog.contextvars.bound_contextvars(http_request_id=_shown_id(request)):
        _log.debug("request.arrived", path=request.path, unique_id=request[UNIQUE_ID])
        return await handler(request)


def _shown_id(request: web.Request) -> str:
    """Return the id for the reply's `X-Request-Id` and for the log."""
    return request[CLIENT_ID] or request[UNIQUE_ID]


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every reply. A signal of aiohttp, because streams and errors need them too."""
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
    """Answer CORS preflights; refuse other requests until the model is loaded, or without a valid key."""
    if request.method == "OPTIONS":
        return web.Response(headers=_PREFLIGHT_HEADERS)
    request.app[READINESS].check()
    keys = request.app[SETTINGS].api_keys
    if keys and request.path not in _PUBLIC and not key_is_known(given_key(request), keys):
        raise AuthenticationError("Invalid API Key")
    return await handler(request)


def given_key(request: web.Request) -> str:
    """Return the key in `Authorization: Bearer` or, without that, in `X-Api-Key`."""
    authorization = request.headers.get("Authorization")
    if authorization is None:
        return request.headers.get("X-Api-Key", "")
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else authorization


def key_is_known(given: str, keys: Sequence[str]) -> bool:
    """Return True if it is one of the keys; takes the same time for every key."""
    raw = given.encode("utf-8", "surrogateescape")
    return sum(hmac.compare_digest(raw, key.encode()) for key in keys) > 0


def origin_allowed(origin: str, allowed: Sequence[str]) -> bool:
    """Return True if pages of this origin may read replies."""
    if "*" in allowed or origin in allowed:
        return True
    if "localhost" not in allowed:
        return False
    try:
        return urlsplit(origin).hostname in _LOCAL_HOSTS
    except ValueError:
        return False
