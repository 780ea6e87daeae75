"""Replies of OpenAI's Responses API: `POST /v1/responses`, and `POST /v1/responses/compact`.

A compaction is an item that stands for a conversation, with a summary by the model. The summary is asked for after
the conversation, whose prefix is in the cache already.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from aiohttp import web

from llamaslot.api.bodies import encode
from llamaslot.api.generation.logprobs import Prob
from llamaslot.api.generation.reply_stats import CacheUse, PromptProgress, Timings, progress_of, stats_of, timings
from llamaslot.api.generation.reply_stats import usage as chat_usage
from llamaslot.api.generation.request_handling import ReplyContext, ReplyWriter, end_reason
from llamaslot.api.middleware import key_namespace
from llamaslot.api.responses import bodies
from llamaslot.api.responses.bodies import (
    CompactionItem,
    ErrorDetails,
    Generated,
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseUsage,
    Status,
)
from llamaslot.api.responses.output import OutputItems
from llamaslot.api.responses.store import StoreAccess
from llamaslot.api.sse import typed_event
from llamaslot.base.errors import LlamaslotError, ServerError
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.request_context import ReplyOptions
from llamaslot.formats.calls import Delta
from llamaslot.protocol.responses import encoded_compaction
from llamaslot.service.live_request import Completion
from llamaslot.service.reply_budget import ProbsLimit

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
STORE_ACCESS = web.RequestKey("STORE_ACCESS", StoreAccess)


class ResponsesReplyWriter(ReplyWriter):
    """Writes OpenAI's responses, with llama-server's `timings` and this server's `cache` beside the usage."""

    id_prefix = "resp_"
    is_cancellable: ClassVar[bool] = True
    """True if `POST /v1/responses/{id}/cancel` cancels it while it runs."""
    probs_fields = ("max_output_tokens", "top_logprobs")

    def __init__(self, reply: ReplyContext, completions: Sequence[Completion]) -> None:
        super().__init__(reply, completions)
        (self._completion,) = completions
        self._fields = reply.options.response
        self._echo = self._fields.echo[1:]
        self._output = OutputItems(reply.id.removeprefix(self.id_prefix), self._fields)
        self._message = self.new_message(self._completion)
        self._tokens = _TokenTexts()
        self._pending: list[Prob] = []
        """Probabilities of tokens that are not assigned to an item yet."""
        self._n_events = 0
        self.is_cancelled = False
        """True once the response was cancelled by its id."""
        if self.is_cancellable:
            reply.request.app[RUNNING][self._key] = self

    @classmethod
    def probs_limit(cls, options: ReplyOptions, most: int) -> ProbsLimit | None:
        """Return the limit of the reply's probabilities; the last events of a stream repeat all of them."""
        return ProbsLimit(most, cls.probs_fields, n_copies=_N_COPIES)

    @property
    def id(self) -> str:
        """The id of the response, and of its completion."""
        return self._reply.id

    @property
    def _key(self) -> tuple[str, str]:
        return key_namespace(self._reply.request), self._reply.id

    def unfinished(self) -> bytes:
        """Return the JSON of the response as one that was cancelled, or else is in progress."""
        return b"".join(self._response("cancelled" if self.is_cancelled else "in_progress"))

    def chunks(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the beginning once, then the events of each item, then the end."""
        if not self._n_events:
            yield from self._lifecycle(bodies.Created, self._response("in_progress"))
            yield from self._lifecycle(bodies.InProgress, self._response("in_progress"))
        if progress := PromptProgress.of(output):
            yield from self._lifecycle(bodies.InProgress, self._response("in_progress"), prompt_progress=progress)
        for each in self._added(output):
            if self._options.timings_per_token:
                each.timings = timings([progress_of(output)])
            yield self._event(each)
        if isinstance(output, Finished):
            is_cut = self._status == "incomplete" and self._reply.request.path != LLAMA_SERVER_PATH
            kind = bodies.Incomplete if is_cut else bodies.Completed
            yield from self._lifecycle(kind, self._finished(output), timings=timings([output.progress]))

    def closing(self) -> Iterable[bytes]:
        """Yield nothing: the end of the only completion ends the stream."""
        return ()

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
            self._tokens.put(self.probs_writer(completion).native(part))
            yield b""
        end = msgspec.structs.replace(completion.end, content=completion.text)
        for _ in self._added(end):
            yield b""
        yield from self._finished(end)

    def _added(self, output: Output | Finished) -> Iterator[bodies.ItemEvent]:
        """Add the text of an event, and yield the events of that."""
        end = end_reason(output)
        if not self._completion.has_probs:
            yield from self._parts(self._message.push(output.content, end))
        else:
            rows = self.probs_writer(self._completion).native(output.probs or ())
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
        self._reply.request.app[RUNNING].pop(self._key, None)
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
            access = self._reply.request[STORE_ACCESS]
            if not access.put(self._reply.id, b"".join(response), self._fields.input, items):
                return self._response(status, store=False, **fields)
        return response

    def _response(self, status: Status, *, store: bool = True, **fields: Any) -> _Json:
        """Return the JSON of a response: its own fields, and those that it repeats of the request.

        The latter may be many MiB of tools, of which each copy would hold up the event loop.
        """
        sampling = self._completion.params.sampling
        generated = Generated(
            id=self._reply.id,
            created_at=self._reply.created,
            status=status,
            model=self._reply.model,
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
    """A conversation that was made short."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[CompactionItem]
    usage: ResponseUsage
    timings: Timings
    cache: CacheUse


class CompactionWriter(ResponsesReplyWriter):
    """One item: what the user wrote, word for word, and a summary of the rest."""

    is_cancellable = False

    def chunks(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Raise an error: a request for a stream was refused."""
        raise ServerError("a compaction is not streamed")

    def whole(self) -> Iterator[bytes]:
        """Yield the compaction."""
        end = self._completion.end
        self._message.push(self._completion.text, end.reason)
        content = encoded_compaction(self._fields.user_texts, self._message.content.strip())
        item_id = self._reply.id.replace(self.id_prefix, "cmp_", 1)
        compaction = Compaction(
            id=self._reply.id,
            created_at=self._reply.created,
            output=[CompactionItem(id=item_id, encrypted_content=content)],
            usage=self._usage(),
            **stats_of([end.progress]),
        )
        yield encode(compaction)
