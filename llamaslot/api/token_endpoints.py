"""`/apply-template`, `/tokenize`, `/detokenize`, `/tokenizer_info`: they need the template or the vocabulary."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.json_bodies import BODY_READER, json_reply, json_response
from llamaslot.api.middleware import caller_of
from llamaslot.base.commands import AnswerBody


class TokenizerInfo(msgspec.Struct):
    """Control tokens of the vocabulary, and the chat template, as vLLM names them."""

    bos_token: str | None
    eos_token: str | None
    model_max_length: int
    chat_template: str


async def apply_template(request: web.Request) -> web.StreamResponse:
    """Return the prompt that the template makes of a conversation and its tools."""
    return await _answered(request, "apply_template")


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Return the token ids of a text or of texts and ids, with the text of each token if asked for."""
    return await _answered(request, "tokenize")


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Return the text of token ids."""
    return await _answered(request, "detokenize")


async def tokenizer_info(request: web.Request) -> web.StreamResponse:
    """Return what vLLM's clients need to know of the vocabulary, such as lm-eval."""
    service = request.app[READINESS].check()
    info, template = service.info, service.chat_template
    return json_response(TokenizerInfo(info.bos_token or None, info.eos_token or None, info.n_ctx_slot, template))


async def _answered(
    request: web.Request, kind: Literal["apply_template", "tokenize", "detokenize"]
) -> web.StreamResponse:
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    async with request.app[BODY_READER].body(request) as raw:
        caller = caller_of(request)
        job = AnswerBody(kind, raw, caller.client(), settings.reasoning_defaults)
        reply = await service.answer(job)
    with service.reply_budget.held(caller.owner, len(reply.data)):
        return await json_reply(request, [reply.data])
