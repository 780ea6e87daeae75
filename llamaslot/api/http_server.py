"""The HTTP application with its routes, and its sockets."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from aiohttp import web

from llamaslot.api import cache_endpoints, server_endpoints, slot_endpoints, token_endpoints
from llamaslot.api.completions import chat_completions, native_completion, text_completions
from llamaslot.api.context import READINESS, SETTINGS, ApiSettings, Readiness
from llamaslot.api.http_errors import error_middleware
from llamaslot.api.middleware import add_headers, admit, identify
from llamaslot.base.errors import ConfigError


def create_app(settings: ApiSettings) -> web.Application:
    """Return the HTTP application. Every endpoint answers 503 until `app[READINESS].set(service)`."""
    app = web.Application(middlewares=[identify, error_middleware, admit], client_max_size=settings.max_body_bytes)
    app[SETTINGS] = settings
    app[READINESS] = Readiness()
    app.on_response_prepare.append(add_headers)
    app.router.add_routes(
        [
            web.get("/health", server_endpoints.health),
            web.get("/v1/health", server_endpoints.health),
            web.get("/models", server_endpoints.models),
            web.get("/v1/models", server_endpoints.models),
            web.get("/v1/models/{name:.+}", server_endpoints.model),
            web.get("/props", server_endpoints.props),
            web.get("/slots", slot_endpoints.slots),
            web.get("/cache", cache_endpoints.cache),
            web.get("/metrics", server_endpoints.metrics),
            web.post("/chat/completions", chat_completions.chat_completions),
            web.post("/v1/chat/completions", chat_completions.chat_completions),
            web.post("/v1/completions", text_completions.completions),
            web.post("/completion", native_completion.completion),
            web.post("/completions", native_completion.completion),
            web.post("/apply-template", chat_completions.apply_template),
            web.post("/cache/clear", cache_endpoints.clear),
            web.post("/slots/{id_slot}", slot_endpoints.act),
            web.post("/tokenize", token_endpoints.tokenize),
            web.post("/detokenize", token_endpoints.detokenize),
            web.delete("/sessions/{session_id:.+}", cache_endpoints.drop_session),
        ]
    )
    return app


class Listener:
    """A running server; `addresses` are the bound (host, port) pairs."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self.addresses: list[tuple[str, int]] = [(host, port) for host, port, *_ in runner.addresses]

    async def close(self) -> None:
        """Accept no more connections, wait a while for running replies, then close their connections."""
        await self._runner.cleanup()


async def serve(
    app: web.Application, hosts: Sequence[str], port: int, *, shutdown_timeout: float = 5.0
) -> Listener:
    """Listen on each host; port 0 takes a free one, the same for all. Raises `ConfigError` if that fails.

    A client that goes away cancels its handler, and so its request.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_timeout)
    await runner.setup()
    try:
        for host in hosts:
            await web.TCPSite(runner, host, port).start()
            port = port or runner.addresses[0][1]
    except (OSError, UnicodeError) as error:
        await runner.cleanup()
        raise _refusal(error, host, port) from error
    return Listener(runner)


def _refusal(error: OSError | UnicodeError, host: str, port: int) -> ConfigError:
    """Return the error that says why nothing can listen there, and which flag to change."""
    if isinstance(error, UnicodeError | socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{host} is not an address of this machine; change --host", param="--host")
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use; choose another with --port", param="--port")
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} needs rights; choose one above 1023 with --port", param="--port")
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", param="--host")
