"""Choice of the model that a request is for: that of `?model=`, or else the one that its body names.

A server of one model answers whatever name a request has.
"""

from __future__ import annotations

from enum import Enum
from time import perf_counter
from typing import Any

import msgspec
from aiohttp import web

from llamaslot.api.bodies import BODY_READER, has_body
from llamaslot.api.context import LOADING_S, READINESS, SERVICE
from llamaslot.api.http_errors import Handler
from llamaslot.base.errors import NotSupportedError
from llamaslot.protocol.bodies import decode
from llamaslot.service.models import ServedModel


class Requires(Enum):
    """Requirement of an endpoint on a model."""

    NOTHING = "nothing"
    ANY_PROCESSES = "any processes"
    """The processes of any model."""
    PROCESSES = "processes"
    """Its processes: an endpoint that only looks loads nothing."""
    MODEL = "model"
    """The model loaded, until the reply has ended."""
    COMPLETION = "completion"
    """The same of a model that generates text, ..."""
    EMBEDDING = "embedding"
    """... of one that embeds texts, ..."""
    RERANK = "rerank"
    """... and of one that scores documents."""


REQUIRES = web.AppKey("REQUIRES", dict[Any, Requires])
"""Requirement of each handler's endpoint."""


class _Named(msgspec.Struct):
    """The one field of any body that matters here."""

    model: str | None = None


_BODY: Any = _Named | list[msgspec.Raw]
"""A list names no model, such as one of adapters."""


@web.middleware
async def choose_model(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give a request the service of the model that it is for; load that if the endpoint needs it."""
    requires = request.app[REQUIRES].get(request.match_info.handler, Requires.NOTHING)
    if requires is Requires.NOTHING:
        return await handler(request)
    models = request.app[READINESS].check()
    if requires is Requires.ANY_PROCESSES:
        request[SERVICE] = models.any_running()
        return await handler(request)
    name = request.query.get("model", "")
    if models.is_one or name or not has_body(request):
        return await _answer(request, handler, requires, name)
    async with request.app[BODY_READER].received(request) as raw:
        # On the event loop: msgspec skips all other fields.
        name = getattr(decode(raw, _BODY), "model", None) or ""
        del raw
        return await _answer(request, handler, requires, name)


async def _answer(request: web.Request, handler: Handler, requires: Requires, name: str) -> web.StreamResponse:
    models = request.app[READINESS].check()
    if requires is Requires.PROCESSES:
        request[SERVICE] = models.running(name)
        return await handler(request)
    model = models.find(name)
    _check_task(requires, model)
    started = perf_counter()
    async with models.use(name) as service:
        # Its file may have said that it is a reranker.
        _check_task(requires, model)
        request[SERVICE], request[LOADING_S] = service, perf_counter() - started
        return await handler(request)


def _check_task(requires: Requires, model: ServedModel) -> None:
    """Raise `NotSupportedError` for what a model was not started for, as far as that is known by now."""
    match requires, model.task:
        case Requires.EMBEDDING, "completion":
            raise NotSupportedError("this server does not compute embeddings; start it with --embeddings")
        case Requires.EMBEDDING, "rerank":
            # llama.cpp has only scores then.
            raise NotSupportedError("this server computes scores only; start it with another --pooling")
        case Requires.RERANK, "embedding" if model.info is None:
            pass
        case Requires.RERANK, "completion" | "embedding":
            raise NotSupportedError("this server does not rerank; start it with --reranking")
        case Requires.COMPLETION, "embedding" | "rerank" as task:
            flag = "--reranking" if task == "rerank" else "--embeddings"
            raise NotSupportedError(f"this server generates no text; start it without {flag}")
