"""The HTTP application and its sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from aiohttp import web

from llamaslot.api.bodies import BODY_READER, BodyReader, accept_expect
from llamaslot.api.completions.stored_chats import CHATS, ChatStore
from llamaslot.api.connections import (
    Connection,
    Connections,
    Handshake,
    Handshakes,
    available_connections,
)
from llamaslot.api.context import READINESS, SETTINGS, ApiSettings, Readiness
from llamaslot.api.credentials import Access, ApiKeys
from llamaslot.api.http_errors import error_middleware
from llamaslot.api.middleware import ACCESS, KEYS, add_headers, admit, identify
from llamaslot.api.model_choice import REQUIRES, choose_model
from llamaslot.api.responses.responses import RESPONSES, RUNNING
from llamaslot.api.responses.store import ResponseStore
from llamaslot.api.routes import ROUTES
from llamaslot.api.web_page import PAGES, page
from llamaslot.base.errors import ConfigError

Application = web.Application
_BACKLOG = 512
"""Connections that the kernel may keep until they are accepted."""
_READ_BUFFER_BYTES = 2**14
"""Half of what a connection keeps of a body before it stops receiving: all connections may have as much unread."""
_CLOSE_TIMEOUT_S = 5.0
"""Most time that running replies have once `Listener.close` was called."""


def create_app(settings: ApiSettings) -> web.Application:
    """Return the HTTP application. Every endpoint answers 503 until `app[READINESS].set(models)`.

    Raises `ConfigError` for an unusable file of API keys.
    """
    app = web.Application(middlewares=[identify, error_middleware, admit, choose_model])
    app[SETTINGS] = settings
    app[KEYS] = ApiKeys(settings.api_keys, settings.api_key_file)
    app[ACCESS] = {**{route.handler: route.access for route in ROUTES}, page: Access.PUBLIC}
    app[REQUIRES] = {route.handler: route.requires for route in ROUTES}
    app[BODY_READER] = BodyReader(settings)
    app[RESPONSES] = ResponseStore(
        max_responses=settings.max_stored_responses, max_bytes=settings.max_stored_responses_bytes
    )
    app[RUNNING] = {}
    app[CHATS] = ChatStore(max_chats=settings.max_stored_responses, max_bytes=settings.max_stored_responses_bytes)
    app[READINESS] = Readiness()
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_watched_keys)
    for route in ROUTES:
        # `add_get` answers HEAD too.
        if route.method == "GET":
            app.router.add_get(route.path, route.handler, expect_handler=accept_expect)
        else:
            app.router.add_route(route.method, route.path, route.handler, expect_handler=accept_expect)
    if settings.webui:
        for path in PAGES:
            app.router.add_get(path, page)
    return app


async def _watched_keys(app: web.Application) -> AsyncIterator[None]:
    """Read the file of API keys again when it changes, while the application runs."""
    app[KEYS].changes.start()
    yield
    app[KEYS].changes.stop()


class Listener:
    """The sockets of a server; `make_protocol` is called for each connection, `handshakes` are those of TLS."""

    def __init__(
        self, runner: web.AppRunner, make_protocol: Callable[[], asyncio.Protocol], handshakes: Handshakes | None
    ) -> None:
        self._runner = runner
        self._make_protocol = make_protocol
        self._handshakes = handshakes
        self._servers: list[asyncio.Server] = []

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The bound (host, port) pairs."""
        return [each.getsockname()[:2] for server in self._servers for each in server.sockets]

    async def listen(self, host: str, port: int) -> None:
        """Accept connections at one more address. Raises `OSError`, and `UnicodeError` for an impossible name."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._make_protocol, host, port, backlog=_BACKLOG)
        self._servers.append(server)

    async def close(self) -> None:
        """Accept no more connections, wait a while for running replies, then close their connections."""
        for server in self._servers:
            server.close()
        if self._handshakes is not None:
            self._handshakes.close()
        await self._runner.cleanup()


async def serve(
    app: web.Application,
    hosts: Sequence[str],
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
) -> Listener:
    """Listen on each host, for HTTPS with `tls`; port 0 takes a free one, the same for all. Raises `ConfigError` if
    that fails.

    A client that goes away cancels its handler, and so its request.
    """
    settings = app[SETTINGS]
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSE_TIMEOUT_S)
    await runner.setup()
    assert runner.server is not None
    connections = Connections(available_connections(settings.max_connections), asyncio.get_running_loop().time)
    make_connection = partial(
        Connection,
        connections,
        runner.server,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=settings.keep_alive_timeout,
        read_bufsize=_READ_BUFFER_BYTES,
        write_timeout=settings.write_timeout,
    )
    if tls is None:
        listener = Listener(runner, make_connection, None)
    else:
        handshakes = Handshakes(connections, tls, lambda handshake: make_connection(handshake=handshake))
        listener = Listener(runner, partial(Handshake, handshakes), handshakes)
    try:
        for host in hosts:
            await listener.listen(host, port)
            port = port or listener.addresses[0][1]
    except (OSError, UnicodeError) as error:
        await listener.close()
        raise _refusal(error, host, port) from error
    return listener


def _refusal(error: OSError | UnicodeError, host: str, port: int) -> ConfigError:
    """Return the error for an address at which listening fails, with the flag to change."""
    if isinstance(error, UnicodeError | socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{host} is not an address of this machine; change --host", param="--host")
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use; choose another with --port", param="--port")
    if error.errno == errno.EACCES:
        message = f"port {port} requires root privileges; choose one above 1023 with --port"
        return ConfigError(message, param="--port")
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", param="--host")
