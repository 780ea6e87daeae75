"""`POST /v1/chat/completions`: chat completions in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from llamaslot.api.completions.chat_store import CHATS, StoredChat
from llamaslot.api.completions.openai_writer import OpenAIReplyWriter
from llamaslot.api.completions.reply_bodies import (
    REASONS,
    Call,
    ChatChoice,
    ChatChunkChoice,
    Delta,
    Message,
    OpenAIReason,
)
from llamaslot.api.context import CALLER
from llamaslot.api.generation.logprobs import ChatLogprobs, ProbsWriter
from llamaslot.api.generation.reply_stats import PromptProgress, TokenCount, progress_of, stats_of, timings
from llamaslot.api.generation.reply_writer import ReplyContext, end_reason
from llamaslot.api.generation.request_handling import complete, count_prompt_tokens
from llamaslot.api.json_bodies import LATER, encode, json_response, with_values
from llamaslot.api.middleware import key_namespace
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.request_context import ChatToStore
from llamaslot.base.generation.token_probs import TokenProb
from llamaslot.formats.calls import Delta as ParsedDelta
from llamaslot.formats.parsed_message import ParsedMessage
from llamaslot.service.live_request import Completion

_MARK = "\0"
_NOTHING = ParsedDelta()


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

    def __init__(self, reply: ReplyContext, completions: Sequence[Completion]) -> None:
        super().__init__(reply, completions)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """Bytes before and after the text in the chunks of a choice, by index: encoding them once saves time."""
        self._messages: dict[int, ParsedMessage] = {}

    def chunks(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the role once, then text, reasoning and calls, then the finish reason."""
        index = completion.index
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self._delta(index, Delta(content=_MARK)).partition(encode(_MARK))
            frame = self._frames[index] = (before, after)
            self._messages[index] = self.new_message(completion)
            yield self._delta(index, Delta(role="assistant", content=None))
        added = self._messages[index].push(output.content, end_reason(output))
        if progress := PromptProgress.of(output):
            yield self._delta(index, Delta(), prompt_progress=progress)
        elif completion.has_probs or self._options.timings_per_token:
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
            shown = {} if self._options.include_usage else stats_of([output.progress])
            reason = _reason(self._messages[index], output)
            yield from self._last_chunk(completion, ChatChunkChoice(index, Delta(), reason), **shown)

    def closing(self) -> Iterator[bytes]:
        """Yield the usage, if it was asked for, and the end mark."""
        if self._options.include_usage:
            yield self._chunk([], **self._totals())
        if self._options.chat is not None:
            yield from self._storing(self._options.chat)
        yield from super().closing()

    def whole(self) -> Iterator[bytes]:
        """Yield one body with all choices."""
        if self._options.chat is not None:
            yield from self._storing(self._options.chat)
        yield from self._whole(map(self._choice, self._completions))

    def _storing(self, chat: ChatToStore) -> Iterator[bytes]:
        """Store the completion before the client can ask for it; yield an empty piece for each of its pieces."""
        request, reply = self._reply.request, self._reply
        store, pieces, n_bytes = request.app[CHATS], list[bytes](), 0
        for piece in self._whole(map(self._choice, self._completions), is_verbose=False):
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > store.max_bytes:
                return
            yield b""
        owner = request[CALLER].owner
        stored = StoredChat(reply.id, reply.model, b"".join(pieces), chat.messages, chat.metadata, owner)
        store.put(key_namespace(request), stored)

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
        choice.logprobs = self._logprobs(completion, output.probs or ())
        shown = timings([progress_of(output)]) if self._options.timings_per_token else UNSET
        return self._chunk([choice], timings=shown)

    def _delta(self, index: int, delta: Delta, **stats: Any) -> bytes:
        return self._chunk([ChatChunkChoice(index, delta)], **stats)

    def _logprobs(self, completion: Completion, rows: Iterable[TokenProb]) -> ChatLogprobs | UnsetType:
        return self.probs_writer(completion).chat(rows) if completion.has_probs else UNSET


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
