"""From a request body to an HTTP reply, whole or streamed; each endpoint adds its own `ResponseFormat`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from aiohttp import web

from llamaslot.api.bodies import Options, json_response, read_as
from llamaslot.api.completions import unsupported
from llamaslot.api.completions.reply_bodies import Choice, Envelope, ObjectName, stats_of, usage
from llamaslot.api.completions.submission import Prompt, submissions
from llamaslot.api.context import READINESS, SETTINGS
from llamaslot.api.middleware import UNIQUE_ID, caller_of
from llamaslot.api.sse import DONE, EventStream, event
from llamaslot.base.events import Finished, Output
from llamaslot.service.generations import Generation, Generations
from llamaslot.service.service import Service

B = TypeVar("B", bound=Options)


class ResponseFormat(ABC, Generic[B]):
    """The reply of one endpoint to one request, made from the completions in `generations`."""

    id_prefix: ClassVar[str]
    returns_prompt: ClassVar[bool] = False
    """True if the reply contains the prompt."""

    def __init__(self, reply_id: str, model: str, body: B, generations: Sequence[Generation]) -> None:
        self._reply_id = reply_id
        self._model = model
        self._body = body
        self._generations = generations

    async def prepare(self, service: Service) -> None:
        """Ask the engine for what the reply needs in addition to the completions."""

    @abstractmethod
    def chunks(self, generation: Generation, output: Output | Finished) -> Iterable[bytes]:
        """Yield the server-sent events for an event of a completion."""

    @abstractmethod
    def closing(self) -> Iterable[bytes]:
        """Yield the server-sent events after all completions are finished."""

    @abstractmethod
    def whole(self) -> Any:
        """Return the body of a reply that is not streamed."""


class OpenAIFormat(ResponseFormat[B]):
    """Replies in OpenAI's envelope, with llama-server's `timings` and this server's `cache` next to the usage."""

    object: ClassVar[ObjectName]
    chunk_object: ClassVar[ObjectName]

    def __init__(self, reply_id: str, model: str, body: B, generations: Sequence[Generation]) -> None:
        super().__init__(reply_id, model, body, generations)
        self._created = int(time.time())

    def closing(self) -> Iterable[bytes]:
        """Yield the end mark."""
        yield DONE

    def _whole(self, choices: Sequence[Choice]) -> Envelope:
        return Envelope(self._reply_id, self.object, self._created, self._model, choices, **self._totals())

    def _chunk(self, choices: Sequence[Choice], **stats: Any) -> bytes:
        return event(Envelope(self._reply_id, self.chunk_object, self._created, self._model, choices, **stats))

    def _totals(self) -> dict[str, Any]:
        """Return the usage of all finished completions, and their stats."""
        return {"usage": usage(self._generations), **stats_of([each.end.progress for each in self._generations])}


async def complete(
    request: web.Request,
    body_type: type[B],
    prompts_of: Callable[[Service, B], list[Prompt]],
    response_format: type[ResponseFormat[B]],
) -> web.StreamResponse:
    """Answer a request for completions of the prompts in its body."""
    service, settings = request.app[READINESS].check(), request.app[SETTINGS]

    def with_prompts(body: B) -> tuple[B, list[Prompt]]:
        unsupported.refuse(body)
        return body, prompts_of(service, body)

    body, prompts = await read_as(request, body_type, with_prompts)
    reply_id = f"{response_format.id_prefix}-{request[UNIQUE_ID]}"
    submits = await submissions(
        service,
        settings,
        body,
        prompts,
        reply_id,
        caller=caller_of(request),
        return_tokens=response_format.returns_prompt,
    )
    async with service.generate(submits) as generations:
        reply = response_format(reply_id, settings.model_names(service.info)[0], body, generations.all)
        await reply.prepare(service)
        if body.stream:
            interval = body.sse_ping_interval
            stream = EventStream(request, settings.sse_ping_interval if interval is None else interval)
            return await _stream(stream, generations, reply)
        while await generations.next_batch():
            pass
        return json_response(reply.whole())


async def _stream(stream: EventStream, generations: Generations, reply: ResponseFormat[B]) -> web.StreamResponse:
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
        await stream.fail(error)
    return stream.response
