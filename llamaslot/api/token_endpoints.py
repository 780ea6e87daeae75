"""`/apply-template`, `/tokenize` and `/detokenize`, which need only the chat template or the vocabulary."""

from __future__ import annotations

from typing import Literal

from aiohttp import web

from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.json_bodies import BODY_READER
from llamaslot.api.middleware import caller_of
from llamaslot.base.commands import AnswerBody, JsonReply


async def apply_template(request: web.Request) -> web.Response:
    """Return the prompt that the template makes of a conversation and its tools."""
    return await _answered(request, "apply_template")


async def tokenize(request: web.Request) -> web.Response:
    """Return the token ids of a text or of texts and ids, with the text of each token if asked for."""
    return await _answered(request, "tokenize")


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of token ids."""
    return await _answered(request, "detokenize")


async def _answered(
    request: web.Request, kind: Literal["apply_template", "tokenize", "detokenize"]
) -> web.Response:
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    async with request.app[BODY_READER].body(request) as raw:
        caller = caller_of(request)
        client = caller.sender.client(caller.session_id)
        job = AnswerBody(kind, raw, client, settings.reasoning_defaults)
        reply = await service.ask(job, JsonReply)
    return web.Response(body=reply.data, content_type="application/json")
