"""Middleware of every request: its id, Host and Origin, CORS, readiness of the model, and the API key.

A page in a browser may send requests to any address of its user's machine. The browser sends the page's `Origin`
with all that could change anything or be read, so foreign pages are refused. After DNS rebinding the page's own
name leads here, but then the browser sends that name as `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import structlog
from aiohttp import web
from msgspec import structs

from llamaslot.api.connections import Connection
from llamaslot.api.context import CALLER, CLIENT_REQUEST_ID, READINESS, SETTINGS, UNIQUE_ID, shown_id
from llamaslot.api.credentials import GRANTED, Access, ApiKeys
from llamaslot.api.http_errors import Handler, is_anthropic
from llamaslot.api.web_page import page
from llamaslot.base.callers import Caller
from llamaslot.base.errors import AuthenticationError, ForbiddenError, InvalidRequestError
from llamaslot.base.namespaces import tenant_name
from llamaslot.protocol.bodies import MAX_SESSION_ID_CHARS

KEYS = web.AppKey("KEYS", ApiKeys)
ACCESS = web.AppKey("ACCESS", dict[Any, Access])
"""Required access by handler; a handler that is missing requires an administrator's key."""

_SESSION_OF_AGENT_HEADER, _AGENT_HEADER = "X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id"
SESSION_HEADERS = (
    "X-Session-ID",
    _SESSION_OF_AGENT_HEADER,
    "Session-Id",
    "session_id",
    "X-Opencode-Session",
    "X-SMG-Routing-Key",
)
"""Headers that name a session: ours, those of Claude Code, Codex and opencode, and the one by which the gateway smg
routes; it passes on none of the others. The first one counts.
"""

_log = structlog.get_logger(__name__)
_MAX_SHOWN = 100
"""Characters of a header in an error message."""
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Credentials": "true",
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
}
_ARE_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_CONTAINER_NAMES = frozenset(
    {
        "host.docker.internal",
        "gateway.docker.internal",
        "kubernetes.docker.internal",
        "host.containers.internal",
        "host.lima.internal",
        "host.rancher-desktop.internal",
        "host.orb.internal",
        "host.minikube.internal",
        "host.k3d.internal",
    }
)
"""Names by which containers reach the machine that they run on, where it forwards them to its loopback addresses.

No page can take one by DNS rebinding: `.internal` is reserved for private use, and never delegated to anybody.
"""


def caller_of(request: web.Request) -> Caller:
    """Return who sent a request; raises `InvalidRequestError` for the id of a session that is too long."""
    return structs.replace(
        request[CALLER], session_id=_session_in(request), client_request_id=request[CLIENT_REQUEST_ID]
    )


def _session_in(request: web.Request) -> str:
    """Return the session in the headers; a sub-agent of Claude Code has a session of its own."""
    name = next((name for name in SESSION_HEADERS if request.headers.get(name)), "")
    session_id = valid_unicode(request.headers.get(name, ""))
    agent = request.headers.get(_AGENT_HEADER) if name == _SESSION_OF_AGENT_HEADER else None
    if agent:
        session_id = f"{session_id}/{valid_unicode(agent)}"
    if len(session_id) > MAX_SESSION_ID_CHARS:
        raise InvalidRequestError(f"{name} is limited to {MAX_SESSION_ID_CHARS} characters", param=name)
    return session_id


def valid_unicode(text: str) -> str:
    """Return a text with its invalid UTF-8, which aiohttp decodes as surrogates, as escapes such as `\\udcff`."""
    return text.encode(errors="backslashreplace").decode()


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, the client's own if it is valid, and its connection the request."""
    if isinstance(request.protocol, Connection):
        # It is not idle while the request is answered.
        request.protocol.begin(request)
    client_request_id = request.headers.get("X-Request-Id", "")
    request[UNIQUE_ID] = uuid4().hex
    request[CLIENT_REQUEST_ID] = client_request_id if _VALID_ID.fullmatch(client_request_id) else ""
    with structlog.contextvars.bound_contextvars(http_request_id=shown_id(request)):
        _log.debug("request.arrived", path=request.path, unique_id=request[UNIQUE_ID])
        return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every reply. A signal of aiohttp, because streams and errors need them too."""
    response.headers["Server"] = "llamaslot"
    if response.status >= 400 and "Expect" in request.headers and not request.content.is_eof():
        # The body that was announced will not be read: what follows must not be taken for it.
        response.force_close()
    request_id = response.headers["X-Request-Id"] = shown_id(request) or uuid4().hex
    if is_anthropic(request.path):
        response.headers["Request-Id"] = request_id
    origin = request.headers.get("Origin")
    if origin is None:
        return
    response.headers["Vary"] = "Origin"
    if origin_allowed(origin, request.app[SETTINGS].cors_origins):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign hosts and origins; answer CORS preflights; refuse other requests until the model is loaded, or
    without a key that opens the endpoint.
    """
    settings, headers = request.app[SETTINGS], request.headers
    if "Host" in headers and not host_allowed(headers["Host"], settings.allowed_hosts):
        raise ForbiddenError(f"Host {_shown(headers['Host'])} is not allowed; add it with --allowed-hosts")
    is_allowed = "Origin" not in headers or origin_allowed(headers["Origin"], settings.cors_origins)
    if request.method == "OPTIONS":
        # Without the headers, the browser does not send the request that it asks about.
        return web.Response(headers=_preflight_headers(request) if is_allowed else None)
    if not is_allowed:
        raise ForbiddenError(
            f"pages of {_shown(headers['Origin'])} may not use this server; --cors-origins allows them"
        )
    if request.match_info.handler is not page:
        # The page shows that the model is still loading.
        request.app[READINESS].check()
    keys, granted = request.app[KEYS], _granted(request)
    request[GRANTED] = granted
    request[CALLER] = Caller.of(
        given_key(request) if keys and granted > Access.PUBLIC else None, request.remote or ""
    )
    # `/health` and administrators' keys have connections that no owner is charged for.
    is_public = request.app[ACCESS].get(request.match_info.handler) is Access.PUBLIC
    is_exempt = is_public or (keys and granted is Access.ADMIN)
    if not is_exempt and isinstance(request.protocol, Connection):
        request.protocol.occupy(request[CALLER].owner)
    return await handler(request)


def _preflight_headers(request: web.Request) -> dict[str, str]:
    """Return the headers of a preflight's answer; `*` for the page's own would not cover `Authorization`."""
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    names = wanted if _ARE_HEADER_NAMES.fullmatch(wanted) else "*"
    return {**_PREFLIGHT_HEADERS, "Access-Control-Allow-Headers": names, "Access-Control-Max-Age": "600"}


def _granted(request: web.Request) -> Access:
    """Return the access of a request's key; raises `AuthenticationError` or `ForbiddenError` if it needs more."""
    keys = request.app[KEYS]
    if not keys:
        return Access.ADMIN
    match = request.match_info
    # An unknown address is answered with 404, but to users only.
    needed = Access.USER if match.http_exception else request.app[ACCESS].get(match.handler, Access.ADMIN)
    granted = keys.access_of(given_key(request))
    if granted is None:
        if needed > Access.PUBLIC:
            raise AuthenticationError("Invalid API Key")
        return Access.PUBLIC
    if granted < needed:
        raise ForbiddenError("this needs an administrator's API key")
    return granted


def sees_all(request: web.Request) -> bool:
    """Return True if a key may see what other keys do, and how much."""
    return request[GRANTED] is Access.ADMIN or not request.app[SETTINGS].cache_salt_from_api_key


def check_sees_all(request: web.Request, what: str) -> None:
    """Raise `ForbiddenError` for a key that may not see what others do."""
    if not sees_all(request):
        raise ForbiddenError(
            f"{what} of all keys need an administrator's API key (the server runs with --cache-salt-from-api-key)"
        )


def _shown(header: str) -> str:
    """Return a header's value for an error message."""
    return repr(header if len(header) <= _MAX_SHOWN else f"{header[:_MAX_SHOWN]}...")


def host_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Return True if the name in a `Host` header is one of these, whatever its port; `localhost` stands for all
    loopback addresses and for the names that containers have for this machine, and no names at all for any.
    """
    if not allowed or "*" in allowed:
        return True
    name = host_name(host)
    is_local = _is_this_machine(name) or name in _CONTAINER_NAMES
    return bool(name) and (name in allowed or ("localhost" in allowed and is_local))


def host_name(host: str) -> str:
    """Return the name in a `Host` header in lower case, without port and brackets; empty for an invalid one."""
    return _name_in(f"//{host}" if host.count(":") < 2 or host.startswith("[") else f"//[{host}]")


def _name_in(url: str) -> str:
    try:
        # With a dot at its end, a name is the same.
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_this_machine(name: str) -> bool:
    """Return True for loopback addresses and their names; `.localhost` is reserved for them (RFC 6761)."""
    return is_loopback(name) or name.endswith(".localhost")


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and the loopback addresses of IPv4 and IPv6."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def given_key(request: web.Request) -> str:
    """Return the key in `Authorization: Bearer` or, without that, in `X-Api-Key`."""
    authorization = request.headers.get("Authorization")
    if authorization is None:
        return request.headers.get("X-Api-Key", "")
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else authorization


def key_namespace(request: web.Request) -> str:
    """Return the namespace of what is stored for a request: its API key's; without keys all requests share one."""
    return tenant_name(given_key(request)) if request.app[KEYS] else ""


def origin_allowed(origin: str, allowed: Sequence[str]) -> bool:
    """Return True if pages of this origin may use the server."""
    if "*" in allowed or origin in allowed:
        return True
    return "localhost" in allowed and _is_this_machine(_name_in(origin))
