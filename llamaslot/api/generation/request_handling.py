"""Requests that generate, for all APIs: from the body to the reply, whole or as the events of a stream.

Each endpoint has a `ReplyWriter` of its own, which writes the reply.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import ClassVar, TypeAlias

from aiohttp import web

from llamaslot.api import http_errors
from llamaslot.api.bodies import BODY_READER, send_json
from llamaslot.api.context import SETTINGS, UNIQUE_ID, service_of
from llamaslot.api.credentials import GRANTED, Access
from llamaslot.api.generation.reply_parts import ProbsWriter
from llamaslot.api.middleware import caller_of, given_key
from llamaslot.api.sse import EVENTS, PING, EventStream
from llamaslot.base.errors import ForbiddenError, InvalidRequestError, LlamaslotError
from llamaslot.base.events import Finished, FinishReason, Output
from llamaslot.base.model import ModelInfo
from llamaslot.base.prompt_jobs import (
    BodyKind,
    EarlierItems,
    Prepare,
    Purpose,
    References,
    ReplyOptions,
    RequestContext,
)
from llamaslot.base.stats import CacheProbe
from llamaslot.formats.format import ParsedMessage
from llamaslot.service.limits import ProbsLimit
from llamaslot.service.live_request import Completion, LiveRequest
from llamaslot.service.service import Service
from llamaslot.text.conversation import refuse_field

Find: TypeAlias = Callable[[References], EarlierItems]
"""Returns the earlier items that a body names."""


async def complete(
    request: web.Request, kind: BodyKind, writer_type: type[ReplyWriter], find: Find | None = None
) -> web.StreamResponse:
    """Answer a request for completions of the prompts in its body; `find` returns earlier items that it names."""
    settings = request.app[SETTINGS]
    context = _context(request, writer_type.id_prefix, writer_type)
    async with _prepared(request, kind, context, find) as (service, live):
        if live.options.generates:
            service.start(live, writer_type.probs_limit(live.options, settings.max_reply_probs))
        writer = writer_type(request, service, live)
        if live.options.stream:
            interval = live.options.sse_ping_interval
            interval = settings.sse_ping_interval if interval is None else interval
            most = settings.max_stream_buffer_bytes
            stream = EventStream(request, interval, most, writer.ping, writer.content_type)
            return await _stream(stream, live, writer)
        while await live.next_batch():
            pass
        return await send_json(request, writer.whole())


async def count_prompt_tokens(request: web.Request, kind: BodyKind, find: Find | None = None) -> int:
    """Count the tokens of the prompt that the body of a request has, and generate nothing."""
    async with _prepared(request, kind, _context(request, "prompt-"), find, "inspect") as (_, live):
        return live.prompts[0].prompt.n_tokens


async def probe_cache(request: web.Request, find: Find) -> CacheProbe:
    """Return what is cached of the prompt in the body of any API, which is not run."""
    async with (
        _prepared(request, "any", _context(request, "prompt-"), find, "inspect") as (service, live),
        service.until_deadline(live),
    ):
        return await service.probe(live)


async def warm_cache(request: web.Request, find: Find) -> Completion:
    """Compute the prompt in the body of any API for later requests; return the finished completion of no tokens."""
    context = _context(request, "warm-")
    async with _prepared(request, "any", context, find, "warm") as (service, live):
        params = live.prompts[0].params
        if params.pin is not None and not context.is_admin:
            refuse_field("pin", "needs an administrator's API key", ForbiddenError)
        service.start(live)
        while await live.next_batch():
            pass
        return live.completions[0]


@asynccontextmanager
async def _prepared(
    request: web.Request,
    kind: BodyKind,
    context: RequestContext,
    find: Find | None = None,
    purpose: Purpose = "run",
) -> AsyncIterator[tuple[Service, LiveRequest]]:
    """Prepare the body of a request, and yield the live request; leaving the block cancels what has not ended.

    The body is not kept while the reply is generated.
    """
    service = service_of(request)
    _check_pooling(kind, service.info)
    async with service.open(context.caller) as live:
        async with service.until_deadline(live), request.app[BODY_READER].body(request) as raw:
            await service.prepare(live, Prepare(kind, raw, context, purpose), find)
        yield service, live


def _check_pooling(kind: BodyKind, info: ModelInfo) -> None:
    """Raise `InvalidRequestError` for a reply whose form has one vector of each input, where each token has one."""
    if info.pooling == "none" and kind in ("embeddings", "ollama_embed", "ollama_embeddings"):
        api = "OAI" if kind == "embeddings" else "Ollama"
        raise InvalidRequestError(
            f"Pooling type 'none' is not {api} compatible. Please use a different pooling type (--pooling)"
        )


def _context(request: web.Request, id_prefix: str, writer_type: type[ReplyWriter] | None = None) -> RequestContext:
    return RequestContext(
        id_prefix + request[UNIQUE_ID],
        caller=caller_of(request),
        key_secret=request.app[SETTINGS].key_secret(given_key(request)),
        is_admin=request[GRANTED] is Access.ADMIN,
        shows_prompt=writer_type is not None and writer_type.shows_prompt,
        counts_tokens=writer_type is not None and writer_type.counts_tokens,
    )


async def _stream(stream: EventStream, live: LiveRequest, writer: ReplyWriter) -> web.StreamResponse:
    await stream.open()
    live.listen(
        lambda completion, output: stream.write_now(writer.events(completion, output)), lambda: stream.is_ready
    )
    try:
        while batch := await stream.wait(live.next_batch):
            events = (data for completion, output in batch for data in writer.events(completion, output))
            if live.is_done:
                await stream.close(chain(events, writer.closing()))
            else:
                await stream.send(events)
    except ConnectionError:
        pass  # The client is gone; leaving the live request cancels its completions.
    except Exception as error:
        await stream.close(writer.failure(http_errors.described(error)))
    return stream.response


def end_reason(output: Output | Finished) -> FinishReason | None:
    """Return why a completion ended with an event; None if it has not."""
    return output.reason if isinstance(output, Finished) else None


class ReplyWriter(ABC):
    """Writes the reply of one endpoint to one request, from the completions of the live request."""

    id_prefix: ClassVar[str]
    """Beginning of the reply's id."""
    content_type: ClassVar[str] = EVENTS
    """The type of a stream."""
    ping: bytes = PING
    """An event without content, which keeps a stream's connection open."""
    shows_prompt: ClassVar[bool] = False
    """True if the reply contains the prompt."""
    counts_tokens: ClassVar[bool] = False
    """True if each event of a stream has the number of tokens so far."""
    probs_fields: ClassVar[Sequence[str]] = ("max_tokens",)
    """Request fields that multiply the probabilities in the reply."""

    def __init__(self, request: web.Request, service: Service, live: LiveRequest) -> None:
        self.request = request
        self.id = self.id_prefix + request[UNIQUE_ID]
        self.created = int(time.time())
        """Seconds since 1970."""
        self.model = service.names[0]
        self.info = service.info
        self.options = live.options
        self.completions = live.completions
        self._output_format = service.output_format
        self.probs_writers = [ProbsWriter(each.params) for each in live.completions]
        """Writers of the probabilities in a stream, by the index of the completion."""

    @classmethod
    def probs_limit(cls, options: ReplyOptions, most: int) -> ProbsLimit | None:
        """Return the limit of the reply's probabilities; None for a stream that keeps none of them."""
        return None if options.stream else ProbsLimit(most, cls.probs_fields)

    def new_message(self, completion: Completion) -> ParsedMessage:
        """Return the message that the text of a chat's completion is to be added to."""
        return ParsedMessage(self._output_format, self.options.parser, completion.id)

    @abstractmethod
    def events(self, completion: Completion, output: Output | Finished) -> Iterable[bytes]:
        """Yield the server-sent events, or lines, for an event of a completion, each whole or in parts."""

    def closing(self) -> Iterable[bytes]:
        """Yield the server-sent events after all completions are finished, if there are any."""
        return ()

    def failure(self, error: LlamaslotError) -> Iterable[bytes]:
        """Yield the last server-sent events of a stream that fails."""
        yield http_errors.event(error, self.request)

    @abstractmethod
    def whole(self) -> Iterable[bytes]:
        """Yield the JSON body of a reply that is not streamed."""
