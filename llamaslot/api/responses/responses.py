"""The endpoints of OpenAI's Responses API, and the writers of its replies.

Only the API key that made a stored response finds it. A compaction is an item that stands for a conversation, with
a summary by the model. The summary is asked for after the conversation, whose prefix is in the cache already.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from aiohttp import web
from msgspec import UNSET

from llamaslot.api.bodies import Paging, encode, json_response, page_of_stored, send_json
from llamaslot.api.context import CALLER, SETTINGS, UNIQUE_ID, service_of
from llamaslot.api.generation.reply_parts import (
    CacheUse,
    Prob,
    PromptProgress,
    Timings,
    progress_of,
    stats_of,
    timings,
)
from llamaslot.api.generation.reply_parts import usage as chat_usage
from llamaslot.api.generation.request_handling import Find, ReplyWriter, complete, count_prompt_tokens, end_reason
from llamaslot.api.middleware import key_namespace
from llamaslot.api.responses import bodies
from llamaslot.api.responses.bodies import (
    CompactionItem,
    CustomCall,
    Deleted,
    ErrorDetails,
    FunctionCall,
    Generated,
    IncompleteDetails,
    InputDetails,
    InputTokens,
    MessageItem,
    OutputDetails,
    OutputText,
    ReasoningItem,
    Response,
    ResponseUsage,
    ShellCall,
    Status,
)
from llamaslot.api.responses.output import OutputItems, item_events
from llamaslot.api.responses.store import ResponseStore, StoredResponse
from llamaslot.api.sse import EventStream, typed_event
from llamaslot.base.errors import LlamaslotError, NotSupportedError
from llamaslot.base.events import Finished, Output
from llamaslot.base.prompt_jobs import BodyKind, EarlierItems, References, ReplyOptions
from llamaslot.formats.calls import Delta
from llamaslot.protocol.responses import encoded_compaction
from llamaslot.service.limits import ProbsLimit
from llamaslot.service.live_request import Completion, LiveRequest
from llamaslot.service.service import Service

_CODES = {
    "rate_limit_error": "rate_limit_exceeded",
    "exceed_context_size_error": "context_length_exceeded",
    "invalid_request_error": "invalid_prompt",
}
"""OpenAI's codes of failed responses by our types of errors."""
_N_COPIES = 4
"""Copies of a reply's probabilities: in its text, its part, its item and the response, or in the store."""
LLAMA_SERVER_PATH = "/responses"
"""Path on which a stream that a limit has cut ends with `response.completed`, as llama-server's clients expect."""
_Json: TypeAlias = tuple[bytes, ...]
"""Parts of a JSON text."""
_EMPTY: Any = msgspec.Raw(b"{}")
CONTINUED = web.RequestKey("CONTINUED", StoredResponse)
"""The response that a request continues, if any."""
RESPONSES = web.AppKey("RESPONSES", ResponseStore)
N_FIRST = 2
"""Events before those of the items: their numbers are the same whenever a response is streamed."""


class ResponsesReplyWriter(ReplyWriter):
    """Writes OpenAI's responses, with llama-server's `timings` and this server's `cache` beside the usage."""

    id_prefix = "resp_"
    is_cancellable: ClassVar[bool] = True
    """True if `POST /v1/responses/{id}/cancel` cancels it while it runs."""
    probs_fields = ("max_output_tokens", "top_logprobs")

    def __init__(self, request: web.Request, service: Service, live: LiveRequest) -> None:
        super().__init__(request, service, live)
        (self._completion,) = live.completions
        self._fields = live.options.response
        self._echo = self._fields.echo[1:]
        self._output = OutputItems(request[UNIQUE_ID], self._fields)
        self._message = self.new_message(self._completion)
        self._tokens = _TokenTexts()
        self._pending: list[Prob] = []
        """Probabilities of tokens that are not assigned to an item yet."""
        self._n_events = 0
        self.is_cancelled = False
        """True once the response was cancelled by its id."""
        if self.is_cancellable:
            request.app[RUNNING][self._key] = self

    @classmethod
    def probs_limit(cls, options: ReplyOptions, most: int) -> ProbsLimit | None:
        """Return the limit of the reply's probabilities; the last events of a stream repeat all of them."""
        return ProbsLimit(most, cls.probs_fields, n_copies=_N_COPIES)

    @property
    def _key(self) -> tuple[str, str]:
        return key_namespace(self.request), self.id

    def unfinished(self) -> bytes:
        """Return the JSON of the response as one that was cancelled, or else is in progress."""
        return b"".join(self._response("cancelled" if self.is_cancelled else "in_progress"))

    def events(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the beginning once, then the events of each item, then the end."""
        if not self._n_events:
            yield from self._lifecycle(bodies.Created, self._response("in_progress"))
            yield from self._lifecycle(bodies.InProgress, self._response("in_progress"))
        if progress := PromptProgress.of(output):
            yield from self._lifecycle(bodies.InProgress, self._response("in_progress"), prompt_progress=progress)
        for each in self._added(output):
            if self.options.timings_per_token:
                each.timings = timings([progress_of(output)])
            yield self._event(each)
        if isinstance(output, Finished):
            is_cut = self._status == "incomplete" and self.request.path != LLAMA_SERVER_PATH
            kind = bodies.Incomplete if is_cut else bodies.Completed
            yield from self._lifecycle(kind, self._finished(output), timings=timings([output.progress]))

    def failure(self, error: LlamaslotError) -> Iterator[bytes]:
        """Yield the error, and the response as it has failed."""
        if not self._n_events:
            yield from self._lifecycle(bodies.Created, self._response("in_progress"))
        details = ErrorDetails(_CODES.get(error.type, "server_error"), error.message)
        yield self._event(bodies.Error(code=error.type, message=error.message, param=error.param))
        yield from self._lifecycle(bodies.Failed, self._response("failed", error=details))

    def whole(self) -> Iterator[bytes]:
        """Yield the response, after an empty piece for each event that it is made of."""
        completion = self._completion
        for part in completion.probs.parts():
            self._tokens.put(self.probs_writers[0].native(part))
            yield b""
        end = msgspec.structs.replace(completion.end, content=completion.text)
        for _ in self._added(end):
            yield b""
        yield from self._finished(end)

    def _added(self, output: Output | Finished) -> Iterator[bodies.ItemEvent]:
        """Add the text of an event, and yield the events that report it."""
        end = end_reason(output)
        if not self._completion.has_probs:
            yield from self._parts(self._message.push(output.content, end))
        else:
            rows = self.probs_writers[0].native(output.probs or ())
            for text, found in self._tokens.add(output.content, rows):
                self._pending += found
                yield from self._parts(self._message.push(text))
            if end is not None:
                yield from self._parts(self._message.push(self._tokens.rest(), end))
        if end is not None:
            yield from self._output.end(self._status, cuts_call=self._message.has_cut_call)

    def _parts(self, delta: Delta) -> Iterator[bodies.ItemEvent]:
        """Add the parts of a message, its text with the probabilities of the last tokens that cover it."""
        for part in delta.parts or (delta,):
            if part == Delta():
                continue
            first, n_left = len(self._pending), len(part.content)
            while first and n_left > 0:
                first -= 1
                n_left -= len(self._pending[first].token)
            probs, self._pending = self._pending[first:], []
            yield from self._output.add(part, probs)

    def _finished(self, end: Finished) -> _Json:
        """Return the response that is complete; it is stored before the client can ask for it."""
        # From here on it cannot be cancelled, although its client may take long to read the end of the stream.
        self.request.app[RUNNING].pop(self._key, None)
        status, output = self._status, self._output.items
        fields = {
            "completed_at": int(time.time()),
            "incomplete_details": IncompleteDetails() if status == "incomplete" else None,
            "output": output,
            "usage": self._usage(),
            **stats_of([end.progress]),
        }
        response = self._response(status, **fields)
        if self._fields.store:
            items = {item.id: encode(item) for item in output}
            stored = StoredResponse(
                *self._key,
                b"".join(response),
                self._fields.input,
                items,
                self.request.get(CONTINUED),
                self.request[CALLER].owner,
            )
            if not self.request.app[RESPONSES].put(stored):
                return self._response(status, store=False, **fields)
        return response

    def _response(self, status: Status, *, store: bool = True, **fields: Any) -> _Json:
        """Return the JSON of a response: its own fields, and those that it repeats of the request.

        The latter may be many MiB of tools, of which each copy would hold up the event loop.
        """
        sampling = self._completion.params.sampling
        generated = Generated(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            store=store and self._fields.store,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            **fields,
        )
        return encode(generated)[:-1] + b",", self._echo

    @property
    def _status(self) -> Status:
        """The status of a response that has ended."""
        return "incomplete" if self._message.reason == "limit" else "completed"

    def _usage(self) -> ResponseUsage:
        counts = chat_usage([self._completion])
        n_prompt, n_cached = counts.prompt_tokens, counts.prompt_tokens_details.cached_tokens
        n_characters = max(len(self._completion.text), 1)
        share = min(len(self._message.reasoning) / n_characters, 1)
        return ResponseUsage(
            n_prompt,
            InputDetails(n_cached, n_prompt - n_cached if self._completion.params.cache_prompt else 0),
            counts.completion_tokens,
            OutputDetails(round(share * counts.completion_tokens)),
            counts.total_tokens,
        )

    def _lifecycle(self, kind: type[bodies.Lifecycle], response: _Json, **fields: Any) -> Iterator[bytes]:
        """Yield the parts of an event with the response."""
        start, name, end = self._event(kind(response=_EMPTY, **fields)).partition(b'"response":')
        yield start + name
        yield from response
        yield end.removeprefix(bytes(_EMPTY))

    def _event(self, event: bodies.Event) -> bytes:
        event.sequence_number = self._n_events
        self._n_events += 1
        return typed_event(event)


RUNNING = web.AppKey("RUNNING", dict[tuple[str, str], ResponsesReplyWriter])
"""Responses that are being generated, by the namespace of their API key and their id."""


class _TokenTexts:
    """Assigns text to the tokens that it comes from.

    The text of an event may come later than its tokens, or never, after a stop string.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Number of its characters that are assigned to tokens."""
        self._probs: deque[Prob] = deque()

    def put(self, probs: Iterable[Prob]) -> None:
        """Add tokens whose text comes later."""
        self._probs.extend(probs)

    def add(self, text: str, probs: Iterable[Prob]) -> Iterator[tuple[str, list[Prob]]]:
        """Add text and tokens; yield each token whose text is there."""
        # Not for each token: a whole reply has a hundred thousand.
        self._text, self._at = self._text[self._at :] + text, 0
        self.put(probs)
        while self._probs and self._at + len(self._probs[0].token) <= len(self._text):
            prob = self._probs.popleft()
            start, self._at = self._at, self._at + len(prob.token)
            yield self._text[start : self._at], [prob]

    def rest(self) -> str:
        """Return the text that is not assigned to a token."""
        return self._text[self._at :]


class Compaction(msgspec.Struct, kw_only=True):
    """A compacted conversation."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[CompactionItem]
    usage: ResponseUsage
    timings: Timings
    cache: CacheUse


class CompactionWriter(ResponsesReplyWriter):
    """Writes one item: what the user wrote, word for word, and a summary of the rest.

    It has no stream: the prompt worker refuses `stream`.
    """

    is_cancellable = False

    def whole(self) -> Iterator[bytes]:
        """Yield the compaction."""
        end = self._completion.end
        self._message.push(self._completion.text, end.reason)
        content = encoded_compaction(self._fields.user_texts, self._message.content.strip())
        item_id = self.id.replace(self.id_prefix, "cmp_", 1)
        compaction = Compaction(
            id=self.id,
            created_at=self.created,
            output=[CompactionItem(id=item_id, encrypted_content=content)],
            usage=self._usage(),
            **stats_of([end.progress]),
        )
        yield encode(compaction)


async def create(request: web.Request) -> web.StreamResponse:
    """Reply to text or items, and store the response unless `store` is false."""
    return await _complete(request, "responses", ResponsesReplyWriter)


async def compact(request: web.Request) -> web.StreamResponse:
    """Return an item that stands for a conversation, with a summary of it."""
    return await _complete(request, "compact", CompactionWriter)


async def cancel(request: web.Request) -> web.StreamResponse:
    """Cancel a running response, also for the client that waits for it; return one that has ended unchanged.

    If its completion has ended, and its client has yet to read the rest, it is in progress until then.
    """
    key = (key_namespace(request), request.match_info["response_id"])
    running = request.app[RUNNING].get(key)
    if running is None:
        return await send_json(request, [_stored(request).body])
    running.is_cancelled |= service_of(running.request).cancel(running.id)
    return web.Response(body=running.unfinished(), content_type="application/json")


async def _complete(
    request: web.Request, kind: BodyKind, writer_type: type[ResponsesReplyWriter]
) -> web.StreamResponse:
    key = (key_namespace(request), writer_type.id_prefix + request[UNIQUE_ID])
    with earlier_items(request) as find:
        try:
            return await complete(request, kind, writer_type, find)
        except LlamaslotError:
            running = request.app[RUNNING].get(key)
            if running is None or not running.is_cancelled:
                raise
            # After a 500, OpenAI's clients would send the request again.
            return web.Response(body=running.unfinished(), content_type="application/json")
        finally:
            request.app[RUNNING].pop(key, None)


async def count(request: web.Request) -> web.Response:
    """Return the tokens of the prompt that a response would be generated for."""
    with earlier_items(request) as find:
        return json_response(InputTokens(await count_prompt_tokens(request, "responses", find)))


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Return a stored response, as a whole or, with `stream`, as events."""
    body = _stored(request).body
    if request.query.get("stream") != "true":
        return await send_json(request, [body])
    after = request.query.get("starting_after")
    if after is not None and after not in map(str, range(N_FIRST)):
        message = "'starting_after': later events have other numbers than when the response was generated"
        raise NotSupportedError(message, param="starting_after")
    stream = EventStream(request, 0, request.app[SETTINGS].max_stream_buffer_bytes)
    await stream.open()
    events = replayed(body, 0 if after is None else int(after) + 1)
    with suppress(ConnectionError):
        # Events that repeat a long response take long to encode and to copy: each on a thread, and in parts.
        while event := await asyncio.to_thread(next, events, b""):
            await stream.send([event])
        await stream.close()
    return stream.response


async def delete(request: web.Request) -> web.Response:
    """Delete a stored response; those that continue it keep its items."""
    response = _stored(request)
    request.app[RESPONSES].delete(response.namespace, response.id)
    return json_response(Deleted(response.id))


async def input_items(request: web.Request) -> web.StreamResponse:
    """Return the items that a stored response answers, those of earlier turns included."""
    paging = Paging(request, "desc", 1)
    return await page_of_stored(request, _stored(request).input_lists(), paging)


def _stored(request: web.Request) -> StoredResponse:
    return request.app[RESPONSES].get(key_namespace(request), request.match_info["response_id"])


@contextmanager
def earlier_items(request: web.Request) -> Iterator[Find]:
    """Yield a function that finds the earlier items that a body names.

    The response that the request continues is kept until the block ends.
    """
    store = request.app[RESPONSES]

    def find(references: References) -> EarlierItems:
        earlier, previous = store.find(key_namespace(request), references)
        if previous is not None:
            request[CONTINUED] = previous
        return earlier

    try:
        yield find
    finally:
        if CONTINUED in request:
            store.release(request[CONTINUED])


class _Text(OutputText, kw_only=True, tag_field="type", tag="output_text"):
    logprobs: list[msgspec.Raw] = msgspec.field(default_factory=list)  # type: ignore[assignment]


class _Message(MessageItem, kw_only=True, tag="message"):
    content: list[_Text] = msgspec.field(default_factory=list)  # type: ignore[assignment]


_StoredItem: TypeAlias = _Message | ReasoningItem | FunctionCall | CustomCall | ShellCall


class _Stored(Response, kw_only=True):
    """A response whose largest fields stay encoded: decoding many MiB of them would hold up the event loop, on
    another thread too, since `msgspec` keeps the GIL.
    """

    output: list[_StoredItem]  # type: ignore[assignment]
    text: msgspec.Raw  # type: ignore[assignment]
    tool_choice: msgspec.Raw  # type: ignore[assignment]
    tools: msgspec.Raw  # type: ignore[assignment]


def replayed(body: bytes, first: int) -> Iterator[bytes]:
    """Yield the events of a complete response, which is JSON, from the one with the number `first` on."""
    for number, event in enumerate(_events(body)):
        event.sequence_number = number
        if number >= first:
            yield typed_event(event)


def _events(body: bytes) -> Iterator[bodies.Event]:
    whole = msgspec.json.decode(body, type=_Stored)
    begun = msgspec.structs.replace(
        whole,
        status="in_progress",
        output=[],
        completed_at=None,
        incomplete_details=None,
        usage=None,
        timings=UNSET,
        cache=UNSET,
    )
    yield bodies.Created(response=begun)
    yield bodies.InProgress(response=begun)
    for index, item in enumerate(whole.output):
        yield from item_events(item, index)
    kind = bodies.Completed if whole.status == "completed" else bodies.Incomplete
    yield kind(response=whole, timings=whole.timings)
