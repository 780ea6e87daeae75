"""A server on a real port over the real service and engine; only the model is the fake one."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llamaslot.api import http_server
from llamaslot.api.bodies import BODY_READER, BodyReader
from llamaslot.api.context import READINESS, ApiSettings
from llamaslot.api.http_server import Listener, create_app, serve
from llamaslot.base.stats import EngineState
from llamaslot.service.metrics import Metrics
from llamaslot.service.models import Models, ServedModel
from llamaslot.service.service import Service
from tests.engine.harness import LocalEngine
from tests.fake_backend import FakeBackend

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Server:
    """A running server and a client for it."""

    listener: Listener

    def __init__(
        self, url: str, service: Service, session: aiohttp.ClientSession, bodies: BodyReader, local: LocalEngine
    ) -> None:
        self.url = url
        self.service = service
        self.bodies = bodies
        self.local = local
        self.session = session

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def ok(self, path: str, body: Any) -> Any:
        status, reply = await self.post(path, body)
        assert status == 200, reply
        return reply

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The bodies of all events, `[DONE]` as a string."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
        events = text.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        data = [event.removeprefix("data: ") for event in events]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    async def state_where(self, wanted: Callable[[EngineState], bool]) -> EngineState:
        """The engine's state as soon as it is as wanted."""
        for _ in range(2000):
            state = await self.service.engine_state()
            if wanted(state):
                return state
            await asyncio.sleep(0.005)
        raise AssertionError(f"never as wanted: {state}")

    async def idle(self) -> EngineState:
        """The engine's state once nothing runs or waits."""
        return await self.state_where(lambda s: s.n_queued == 0 and not any(slot.request_id for slot in s.slots))


Start = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start a server; `backend`, `engine`, the limits and `template` are not settings of the API, everything else
    is, if no `app` is given.
    """
    monkeypatch.setattr(http_server, "_CLOSE_TIMEOUT_S", 0.1)
    async with AsyncExitStack() as stack:

        async def started(
            *,
            backend: FakeBackend | None = None,
            max_queue: int = 256,
            max_queue_per_client: int = 0,
            request_timeout: float = 0,
            warm_ahead: int = 0,
            template: str = TEMPLATE,
            engine: dict[str, Any] | None = None,
            app: web.Application | None = None,
            tls: ssl.SSLContext | None = None,
            **settings: Any,
        ) -> Server:
            backend = backend or FakeBackend(n_ctx=1024)
            api_settings = ApiSettings(**settings)
            limits = {
                "metrics": Metrics(api_settings.model_names(backend.info)[0]),
                "names": api_settings.model_names(backend.info),
                "tags": api_settings.model_tags(),
                "max_queue": max_queue,
                "max_queue_per_client": max_queue_per_client,
                "request_timeout": request_timeout,
                "warm_ahead": warm_ahead,
            }
            own = LocalEngine(
                backend,
                service=limits,
                template=template,
                requests=api_settings.request_policy(backend.info, max_queue),
                **(engine or {}),
            )
            service = own.service
            run = asyncio.create_task(own.run())

            async def stop() -> None:
                await own.stop()
                await run

            stack.push_async_callback(stop)
            app = app or create_app(api_settings)
            listener = await serve(app, ["127.0.0.1"], 0, tls=tls)
            stack.push_async_callback(listener.close)
            capability: Any = "embedding" if backend.info.pooling else "completion"
            model = ServedModel(service.names, tags=service.tags, task_by_flags=capability)
            app[READINESS].set(Models.of_one(model, service))
            # The certificates of tests are self-signed.
            connector = aiohttp.TCPConnector(ssl=tls is None)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            url = f"http{'s' if tls is not None else ''}://127.0.0.1:{listener.addresses[0][1]}"
            server = Server(url, service, session, app[BODY_READER], own)
            server.listener = listener
            return server

        yield started


@pytest.fixture
async def server(start: Start) -> Server:
    """A server with the default settings."""
    return await start()
