"""From a request body to an HTTP reply, whole or streamed; each endpoint adds its own `ResponseFormat`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeVar

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType, structs

from llamaslot.api import http_errors
from llamaslot.api.completions.logprobs import ProbsWriter
from llamaslot.api.completions.native_body import NativeBodies
from llamaslot.api.completions.reply_bodies import Choice, Envelope, ObjectName, stats_of, usage
from llamaslot.api.context import READINESS, SETTINGS, UNIQUE_ID
from llamaslot.api.json_bodies import BODY_READER, json_response
from llamaslot.api.keys import GRANTED, Access
from llamaslot.api.middleware import caller_of
from llamaslot.api.sse import DONE, PING, EventStream, event
from llamaslot.base.commands import (
    BodyKind,
    CountTokens,
    ParseBody,
    ParsedBody,
    ProbeCache,
    ReplyOptions,
    RequestContext,
    Submit,
)
from llamaslot.base.errors import LlamaslotError
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.responses import EarlierItems, References
from llamaslot.base.prompt import CountedTokens
from llamaslot.formats.format import Format
from llamaslot.service.generations import Generation, Generations
from llamaslot.service.service import Service

Find: TypeAlias = Callable[[References], EarlierItems]
"""Returns the earlier items that a body names."""
R = TypeVar("R", bound=Struct)


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What a reply contains or depends on, beside the completions."""

    request: web.Request
    id: str
    model: str
    """Name of the model."""
    options: ReplyOptions
    output_format: Format
    """The format in which the model writes chat messages."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""


class ResponseFormat(ABC):
    """The reply of one endpoint to one request, made from the completions in `generations`."""

    id_prefix: ClassVar[str]
    """Beginning of the reply's id."""
    ping: ClassVar[bytes] = PING
    """An event of a stream that means nothing, and keeps its connection open."""
    returns_prompt: ClassVar[bool] = False
    """True if the reply contains the prompt."""

    def __init__(self, reply: ReplyContext, generations: Sequence[Generation]) -> None:
        self._reply = reply
        self._options = reply.options
        self._generations = generations
        self._writers: dict[int, ProbsWriter] = {}

    def writer(self, generation: Generation) -> ProbsWriter:
        """Return what writes the probabilities of a completion's tokens."""
        writer = self._writers.get(generation.index)
        if writer is None:
            writer = self._writers[generation.index] = ProbsWriter(generation.submit)
        return writer

    async def prepare(self, service: Service) -> None:  # noqa: B027 - most formats need nothing
        """Ask the engine for what the reply needs in addition to the completions."""

    @abstractmethod
    def chunks(self, generation: Generation, output: Output | Finished) -> Iterable[bytes]:
        """Yield the server-sent events for an event of a completion."""

    @abstractmethod
    def closing(self) -> Iterable[bytes]:
        """Yield the server-sent events after all completions are finished."""

    def failure(self, error: LlamaslotError) -> Iterable[bytes]:
        """Yield the last server-sent events of a stream that fails."""
        yield http_errors.event(error, self._reply.request)

    @abstractmethod
    def whole(self) -> Any:
        """Return the body of a reply that is not streamed."""


class OpenAIFormat(ResponseFormat):
    """Replies in OpenAI's envelope, with llama-server's `timings` and this server's `cache` next to the usage."""

    object: ClassVar[ObjectName]
    chunk_object: ClassVar[ObjectName]
    _bodies: NativeBodies | None = None

    async def prepare(self, service: Service) -> None:
        """Decode the prompts for a verbose reply."""
        if self._options.verbose:
            self._bodies = await NativeBodies.ask(service, self._generations, self._reply.model, self._options)

    def closing(self) -> Iterable[bytes]:
        """Yield the end mark."""
        yield DONE

    def _whole(self, choices: Sequence[Choice]) -> Envelope:
        reply = self._reply
        shown = self._verbose(self._generations[0])
        return Envelope(reply.id, self.object, reply.created, reply.model, choices, verbose=shown, **self._totals())

    def _chunk(self, choices: Sequence[Choice], **stats: Any) -> bytes:
        reply = self._reply
        return event(Envelope(reply.id, self.chunk_object, reply.created, reply.model, choices, **stats))

    def _verbose(self, generation: Generation) -> dict[str, Any] | UnsetType:
        """Return llama-server's own reply for a finished completion, if it is asked for."""
        return UNSET if self._bodies is None else self._bodies.whole(generation, self.writer(generation))

    def _totals(self) -> dict[str, Any]:
        """Return the usage of all finished completions, and their stats."""
        return {"usage": usage(self._generations), **stats_of([each.end.progress for each in self._generations])}


async def complete(
    request: web.Request, kind: BodyKind, response_format: type[ResponseFormat], find: Find | None = None
) -> web.StreamResponse:
    """Answer a request for completions of the prompts in its body; `find` returns earlier items that it names."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]
    reply_id = response_format.id_prefix + request[UNIQUE_ID]
    deadline = service.deadline()
    context = _context(request, reply_id, returns_prompt=response_format.returns_prompt)
    async with service.limited_by(deadline):
        submits, options = await _read(request, kind, context, find)
    async with service.generate(submits, deadline) as generations:
        model = settings.model_names(service.info)[0]
        reply_context = ReplyContext(request, reply_id, model, options, service.output_format)
        reply = response_format(reply_context, generations.all)
        await reply.prepare(service)
        if options.stream:
            interval = options.sse_ping_interval
            interval = settings.sse_ping_interval if interval is None else interval
            stream = EventStream(request, interval, settings.max_stream_buffer_bytes, reply.ping)
            return await _stream(stream, generations, reply)
        while await generations.next_batch():
            pass
        return json_response(reply.whole())


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
        return await service.ask(query(submit), reply_type)


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
        reasoning=settings.reasoning,
        reasoning_format=settings.reasoning_format,
        reasoning_budget=settings.reasoning_budget,
    )


async def _stream(stream: EventStream, generations: Generations, reply: ResponseFormat) -> web.StreamResponse:
    await stream.open()
    generations.listen(
        lambda generation, output: stream.write_now(reply.chunks(generation, output)), lambda: stream.is_ready
    )
    try:
        while batch := await stream.wait(generations.next_batch):
            events = [data for generation, output in batch for data in reply.chunks(generation, output)]
            if generations.done:
                await stream.close([*events, *reply.closing()])
            else:
                await stream.send(events)
    except ConnectionError:
        pass  # The client is gone; leaving the generations cancels them.
    except Exception as error:
        await stream.close(reply.failure(http_errors.described(error)))
    return stream.response
