"""Handling of requests that generate: from the body to the reply, whole or streamed, for all APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeAlias, TypeVar

from aiohttp import web
from msgspec import Struct, structs

from llamaslot.api import http_errors
from llamaslot.api.context import READINESS, SETTINGS, UNIQUE_ID
from llamaslot.api.generation.reply_writer import ReplyContext, ReplyWriter
from llamaslot.api.json_bodies import BODY_READER, json_reply
from llamaslot.api.keys import GRANTED, Access
from llamaslot.api.middleware import caller_of
from llamaslot.api.sse import EventStream
from llamaslot.base.commands import (
    BodyKind,
    CountTokens,
    ParseBody,
    ParsedBody,
    ProbeCache,
    Submit,
)
from llamaslot.base.generation.request_context import ReplyOptions, RequestContext
from llamaslot.base.generation.responses import EarlierItems, References
from llamaslot.base.prompt import CountedTokens
from llamaslot.service.generations import Generations

Find: TypeAlias = Callable[[References], EarlierItems]
"""Returns the earlier items that a body names."""
R = TypeVar("R", bound=Struct)


async def complete(
    request: web.Request, kind: BodyKind, writer_type: type[ReplyWriter], find: Find | None = None
) -> web.StreamResponse:
    """Answer a request for completions of the prompts in its body; `find` returns earlier items that it names."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    reply_id = writer_type.id_prefix + request[UNIQUE_ID]
    deadline = service.deadline()
    context = _context(request, reply_id, returns_prompt=writer_type.returns_prompt)
    async with service.limited_by(deadline):
        submits, options = await _read(request, kind, context, find)
    probs = writer_type.probs_limit(options, settings.max_reply_probs)
    async with service.generate(submits, deadline, probs) as generations:
        model = settings.model_names(service.info)[0]
        reply = ReplyContext(request, reply_id, model, options, service.output_format)
        writer = writer_type(reply, generations.all)
        await writer.prepare(service)
        if options.stream:
            interval = options.sse_ping_interval
            interval = settings.sse_ping_interval if interval is None else interval
            stream = EventStream(request, interval, settings.max_stream_buffer_bytes, writer.ping)
            return await _stream(stream, generations, writer)
        while await generations.next_batch():
            pass
        return await json_reply(request, writer.whole())


async def inspect_prompt(
    request: web.Request,
    kind: BodyKind,
    query: Callable[[Submit], CountTokens | ProbeCache],
    reply_type: type[R],
    find: Find | None = None,
) -> R:
    """Answer a query about the prompt that the body of a request has, and generate nothing."""
    service = request.app[READINESS].check()
    context = _context(request, f"prompt-{request[UNIQUE_ID]}")
    async with service.limited_by(service.deadline()):
        (submit,), _ = await _read(request, kind, context, find, is_run=False)
        return await service.ask_about(query(submit), reply_type)


async def count_prompt_tokens(request: web.Request, kind: BodyKind, find: Find | None = None) -> int:
    """Count the tokens of the prompt that the body of a request has, and generate nothing."""
    return (await inspect_prompt(request, kind, CountTokens, CountedTokens, find)).n_tokens


async def _read(
    request: web.Request, kind: BodyKind, context: RequestContext, find: Find | None, *, is_run: bool = True
) -> tuple[Sequence[Submit], ReplyOptions]:
    """Have the body of a request read; it is not kept while the reply is generated."""
    service = request.app[READINESS].check()
    async with request.app[BODY_READER].body(request) as raw:
        job = ParseBody(kind, raw, context, is_run)
        body = await service.ask(job, ParsedBody)
        if body.references is not None and find is not None:
            # Only the prompt worker decodes bodies, and it has no earlier items.
            body = await service.ask(structs.replace(job, earlier=find(body.references)), ParsedBody)
    return body.submits, body.options


def _context(request: web.Request, request_id: str, *, returns_prompt: bool = False) -> RequestContext:
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    caller = caller_of(request)
    return RequestContext(
        request_id=request_id,
        limits=settings.request_limits(service.max_in_flight),
        sampling=settings.default_sampling(service.info),
        max_tokens=settings.n_predict,
        cache_prompt=settings.cache_prompt,
        return_tokens=returns_prompt,
        verbose=settings.verbose,
        client_request_id=caller.client_request_id,
        session_id=caller.session_id,
        sender=caller.sender,
        key_secret=settings.key_secret(caller.api_key),
        is_admin=request[GRANTED] is Access.ADMIN,
        reasoning=settings.reasoning_defaults,
    )


async def _stream(stream: EventStream, generations: Generations, writer: ReplyWriter) -> web.StreamResponse:
    await stream.open()
    generations.listen(
        lambda generation, output: stream.write_now(writer.chunks(generation, output)), lambda: stream.is_ready
    )
    try:
        while batch := await stream.wait(generations.next_batch):
            events = (data for generation, output in batch for data in writer.chunks(generation, output))
            if generations.done:
                await stream.close(chain(events, writer.closing()))
            else:
                await stream.send(events)
    except ConnectionError:
        pass  # The client is gone; leaving the generations cancels them.
    except Exception as error:
        await stream.close(writer.failure(http_errors.described(error)))
    return stream.response
