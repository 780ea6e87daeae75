"""Chat and text completions in OpenAI's format: `POST /v1/chat/completions`, `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from llamaslot import __version__
from llamaslot.api.bodies import LATER, encode, json_response, list_of, with_values
from llamaslot.api.completions.native_completion import whole_native_body
from llamaslot.api.completions.stored_chats import CHATS, StoredChat
from llamaslot.api.context import CALLER
from llamaslot.api.generation.reply_parts import (
    CacheUse,
    ChatLogprobs,
    ProbsWriter,
    PromptProgress,
    TextLogprobs,
    Timings,
    TokenCount,
    Usage,
    progress_of,
    stats_of,
    timings,
    usage,
)
from llamaslot.api.generation.request_handling import (
    ReplyWriter,
    complete,
    count_prompt_tokens,
    end_reason,
)
from llamaslot.api.middleware import key_namespace
from llamaslot.api.sse import DONE, event, long_event
from llamaslot.base.events import Finished, FinishReason, Output
from llamaslot.base.prompt_jobs import ChatToStore, ReplyOptions
from llamaslot.formats.calls import Delta as ParsedDelta
from llamaslot.formats.calls import ToolCall, ToolCallDelta
from llamaslot.formats.format import ParsedMessage
from llamaslot.service.limits import ProbsLimit
from llamaslot.service.live_request import Completion, LiveRequest
from llamaslot.service.service import Service

_MARK = "\0"
_NOTHING = ParsedDelta()
FINGERPRINT = f"b{__version__}-llamaslot"
"""Clients of llama-server expect a build number that starts with `b`."""

OpenAIReason: TypeAlias = Literal["stop", "length", "tool_calls"]
REASONS: dict[FinishReason, OpenAIReason] = {"eos": "stop", "word": "stop", "limit": "length"}


class Function(msgspec.Struct):
    """The function of a tool call, or of a part of one."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    """JSON."""


class Call(msgspec.Struct, kw_only=True):
    """A tool call, or in a chunk a part of one: the first part has the id, the type and the name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function

    @classmethod
    def of(cls, call: ToolCall) -> Call:
        """Return a whole call."""
        return cls(id=call.id or "", type="function", function=Function(call.name, call.arguments))

    @classmethod
    def part_of(cls, part: ToolCallDelta) -> Call:
        """Return a part of a call."""
        if part.name is None:
            return cls(index=part.index, function=Function(arguments=part.arguments))
        function = Function(part.name, part.arguments)
        return cls(index=part.index, id=part.id or "", type="function", function=function)


class Message(msgspec.Struct):
    """A whole chat message; its content is null if it has nothing but calls."""

    content: str | None
    role: str = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """The addition of a chunk to a chat message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """A choice of a whole chat reply."""

    index: int
    message: Message
    finish_reason: OpenAIReason
    logprobs: ChatLogprobs | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A choice of a chat chunk."""

    index: int
    delta: Delta
    finish_reason: OpenAIReason | None = None
    logprobs: ChatLogprobs | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """A choice of a text completion, whole or a chunk."""

    index: int
    text: str
    finish_reason: OpenAIReason | None = None
    logprobs: TextLogprobs | None = None


Choice: TypeAlias = ChatChoice | ChatChunkChoice | TextChoice
ObjectName: TypeAlias = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Envelope(msgspec.Struct):
    """OpenAI's reply around the choices."""

    id: str
    object: ObjectName
    created: int
    model: str
    choices: Sequence[Choice]
    system_fingerprint: str = FINGERPRINT
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    cache: CacheUse | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    verbose: dict[str, Any] | UnsetType = msgspec.field(name="__verbose", default=UNSET)
    """llama-server's own reply for the first choice."""


class OpenAIReplyWriter(ReplyWriter):
    """Writes replies in OpenAI's envelope, with `timings` (llama-server's) and `cache` (ours) beside the usage."""

    object: ClassVar[ObjectName]
    chunk_object: ClassVar[ObjectName]
    probs_fields = ("n", "max_tokens", "logprobs")

    @classmethod
    def probs_limit(cls, options: ReplyOptions, most: int) -> ProbsLimit | None:
        """Return the limit of the reply's probabilities; some streams repeat all at their end, or store them."""
        keeps = options.verbose or options.chat is not None or not options.stream
        return ProbsLimit(most, cls.probs_fields) if keeps else None

    def closing(self) -> Iterable[bytes]:
        """Yield the end mark."""
        yield DONE

    def _whole(self, choices: Iterable[Iterable[bytes]], *, is_verbose: bool = True) -> Iterator[bytes]:
        first = self.completions[0]
        shown = self._verbose(first) if is_verbose else UNSET
        body = Envelope(self.id, self.object, self.created, self.model, LATER, verbose=shown, **self._totals())
        return with_values(body, list_of(choices), *self._verbose_values(first, shown))

    def _chunk(self, choices: Sequence[Choice], **stats: Any) -> bytes:
        return event(Envelope(self.id, self.chunk_object, self.created, self.model, choices, **stats))

    def _last_chunk(self, completion: Completion, end: Choice, **stats: Any) -> Iterator[bytes]:
        """Yield the last chunk of a choice, with llama-server's own reply if it is asked for."""
        shown = self._verbose(completion)
        body = Envelope(self.id, self.chunk_object, self.created, self.model, [end], verbose=shown, **stats)
        return long_event(body, *self._verbose_values(completion, shown))

    def _verbose(self, completion: Completion) -> dict[str, Any] | UnsetType:
        return whole_native_body(self, completion) if self.options.verbose else UNSET

    def _verbose_values(
        self, completion: Completion, shown: dict[str, Any] | UnsetType
    ) -> Iterator[Iterator[bytes]]:
        """Yield the values that are `LATER` in llama-server's own reply."""
        if shown is not UNSET and completion.has_probs:
            yield ProbsWriter(completion.params).native_later(completion.probs)

    def _totals(self) -> dict[str, Any]:
        """Return the usage of all finished completions, and their stats."""
        return {"usage": usage(self.completions), **stats_of([each.end.progress for each in self.completions])}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Complete a conversation."""
    return await complete(request, "chat", ChatReplyWriter)


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of the prompt that a conversation has, and generate nothing."""
    return json_response(TokenCount(await count_prompt_tokens(request, "chat")))


class ChatReplyWriter(OpenAIReplyWriter):
    """Writes OpenAI's chat completions."""

    id_prefix = "chatcmpl-"
    probs_fields = ("n", "max_tokens", "top_logprobs")
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: web.Request, service: Service, live: LiveRequest) -> None:
        super().__init__(request, service, live)
        self._messages = [self.new_message(each) for each in live.completions]
        self._frames: list[tuple[bytes, bytes] | None] = [None] * len(live.completions)
        """Bytes before and after the text in the chunks of each choice: encoding them once saves time."""

    def events(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the role once, then text, reasoning and calls, then the finish reason."""
        index = completion.index
        frame = self._frames[index]
        if frame is None:
            before, _, after = self._delta(index, Delta(content=_MARK)).partition(encode(_MARK))
            frame = self._frames[index] = (before, after)
            yield self._delta(index, Delta(role="assistant", content=None))
        added = self._messages[index].push(output.content, end_reason(output))
        if progress := PromptProgress.of(output):
            yield self._delta(index, Delta(), prompt_progress=progress)
        elif completion.has_probs or self.options.timings_per_token:
            if output.content or output.probs or added != _NOTHING:
                first, *others = _deltas_of(added)
                yield self._with_details(completion, output, first)
                for each in others:
                    yield self._delta(index, each)
        elif added.content and not (added.reasoning or added.tool_calls):
            yield encode(added.content).join(frame)
        elif added != _NOTHING:
            for each in _deltas_of(added):
                yield self._delta(index, each)
        if isinstance(output, Finished):
            shown = {} if self.options.include_usage else stats_of([output.progress])
            reason = _reason(self._messages[index], output)
            yield from self._last_chunk(completion, ChatChunkChoice(index, Delta(), reason), **shown)

    def closing(self) -> Iterator[bytes]:
        """Yield the usage, if it was asked for, and the end mark."""
        if self.options.include_usage:
            yield self._chunk([], **self._totals())
        if self.options.chat is not None:
            yield from self._storing(self.options.chat)
        yield from super().closing()

    def whole(self) -> Iterator[bytes]:
        """Yield one body with all choices."""
        if self.options.chat is not None:
            yield from self._storing(self.options.chat)
        yield from self._whole(map(self._choice, self.completions))

    def _storing(self, chat: ChatToStore) -> Iterator[bytes]:
        """Store the completion before the client can ask for it; yield an empty piece for each of its pieces."""
        store, pieces, n_bytes = self.request.app[CHATS], list[bytes](), 0
        for piece in self._whole(map(self._choice, self.completions), is_verbose=False):
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > store.max_bytes:
                return
            yield b""
        owner = self.request[CALLER].owner
        stored = StoredChat(self.id, self.model, b"".join(pieces), chat.messages, chat.metadata, owner)
        store.put(key_namespace(self.request), stored)

    def _choice(self, completion: Completion) -> Iterator[bytes]:
        message = self.new_message(completion)
        message.push(completion.text, completion.end.reason)
        reason = _reason(message, completion.end)
        choice = ChatChoice(completion.index, _whole_message(message), reason)
        if not completion.has_probs:
            return with_values(choice)
        choice.logprobs = ChatLogprobs(LATER)
        return with_values(choice, ProbsWriter(completion.params).native_later(completion.probs))

    def _with_details(self, completion: Completion, output: Output | Finished, delta: Delta) -> bytes:
        """Return a chunk with new text, and with what the client wants to know about it."""
        choice = ChatChunkChoice(completion.index, delta)
        if completion.has_probs:
            choice.logprobs = ChatLogprobs(self.probs_writers[completion.index].native(output.probs or ()))
        shown = timings([progress_of(output)]) if self.options.timings_per_token else UNSET
        return self._chunk([choice], timings=shown)

    def _delta(self, index: int, delta: Delta, **stats: Any) -> bytes:
        return self._chunk([ChatChunkChoice(index, delta)], **stats)


def _deltas_of(added: ParsedDelta) -> list[Delta]:
    """Return the deltas of what was added, each with one part of a call at most, as OpenAI sends them."""
    first = Delta(content=added.content or UNSET, reasoning_content=added.reasoning or UNSET)
    calls = [[Call.part_of(part)] for part in added.tool_calls]
    if calls:
        first.tool_calls = calls[0]
    return [first, *(Delta(tool_calls=each) for each in calls[1:])]


def _whole_message(message: ParsedMessage) -> Message:
    calls = [Call.of(call) for call in message.calls]
    content = message.content
    return Message(
        content=None if calls and not content else content,
        reasoning_content=message.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _reason(message: ParsedMessage, end: Finished) -> OpenAIReason:
    reason = message.reason or end.reason
    is_whole = message.has_calls and reason != "limit" and not message.has_cut_call
    return "tool_calls" if is_whole else REASONS[reason]


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several."""
    return await complete(request, "text", TextReplyWriter)


class TextReplyWriter(OpenAIReplyWriter):
    """Writes OpenAI's text completions.

    Clients of llama-server expect a choice in every chunk: the usage comes with the last choice's end.
    """

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"
    _n_ended = 0

    def __init__(self, request: web.Request, service: Service, live: LiveRequest) -> None:
        super().__init__(request, service, live)
        self._unsent = set(live.completions) if live.options.echo else set()
        """Choices whose prompt is still to be streamed."""

    def events(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the prompt if it is wanted, then text, then the finish reason."""
        if self._unsent and (output.content or output.probs or isinstance(output, Finished)):
            yield from self._echo(completion)
        if progress := PromptProgress.of(output):
            yield self._chunk([TextChoice(completion.index, "")], prompt_progress=progress)
        if output.content or output.probs:
            shown = timings([progress_of(output)]) if self.options.timings_per_token else UNSET
            logprobs = None
            if self._shows_probs(completion):
                logprobs = self.probs_writers[completion.index].text(list(output.probs or ()))
            yield self._chunk([TextChoice(completion.index, output.content, logprobs=logprobs)], timings=shown)
        if isinstance(output, Finished):
            self._n_ended += 1
            total = usage(self.completions) if self._n_ended == len(self.completions) else UNSET
            end = TextChoice(completion.index, "", REASONS[output.reason])
            yield from self._last_chunk(completion, end, usage=total, **stats_of([output.progress]))

    def whole(self) -> Iterator[bytes]:
        """Yield one body with all choices, or with the best ones."""
        return self._whole(self._choice(i, each) for i, each in enumerate(self._best()))

    def _choice(self, index: int, completion: Completion) -> Iterator[bytes]:
        prompt = completion.echo
        choice = TextChoice(index, prompt + completion.text, REASONS[completion.end.reason])
        if not self._shows_probs(completion):
            return with_values(choice)
        choice.logprobs = TextLogprobs(LATER, LATER, LATER, LATER, LATER)
        of_prompt = completion.prompt_probs if self.options.echo else None
        return with_values(choice, *ProbsWriter(completion.params).text_later(of_prompt, prompt, completion.probs))

    def _best(self) -> Iterator[Completion]:
        """Yield the completions of each prompt that are most likely per token; all of them if all are wanted."""
        for _, group in groupby(self.completions, lambda each: each.params.group or each.params.completion_id):
            if self.options.n_best:
                yield from sorted(group, key=lambda each: -each.mean_logprob)[: self.options.n_best]
            else:
                yield from group

    def _echo(self, completion: Completion) -> Iterator[bytes]:
        """Yield the prompt of a choice, once."""
        if completion not in self._unsent:
            return
        self._unsent.remove(completion)
        index, text = completion.index, completion.echo
        parts: Iterator[TextLogprobs] = iter(())
        if self._shows_probs(completion):
            parts = self.probs_writers[index].prompt(completion.prompt_probs, text)
        yield self._chunk([TextChoice(index, text, logprobs=next(parts, None))])
        for part in parts:
            yield self._chunk([TextChoice(index, "", logprobs=part)])

    def _shows_probs(self, completion: Completion) -> bool:
        return completion.has_probs and not self.options.hides_logprobs
