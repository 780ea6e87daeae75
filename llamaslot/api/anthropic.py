"""Anthropic's Messages API: `POST /v1/messages`, with its replies, events and content blocks.

Blocks are in the order in which the model wrote their content. Errors in Anthropic's form are in
`http_errors.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal, TypeAlias

import msgspec
from aiohttp import web

from llamaslot.api.bodies import encode, json_response
from llamaslot.api.generation.reply_parts import TokenCount, progress_of
from llamaslot.api.generation.request_handling import (
    ReplyWriter,
    complete,
    count_prompt_tokens,
    end_reason,
)
from llamaslot.api.sse import typed_event
from llamaslot.base.events import Finished, Output, Progress
from llamaslot.formats.calls import Delta, is_object
from llamaslot.service.live_request import Completion, LiveRequest
from llamaslot.service.service import Service

_NO_ARGUMENTS = msgspec.Raw(b"{}")
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicUsage(msgspec.Struct):
    """Token counts; the three of the input add up to the prompt."""

    input_tokens: int
    """Prompt tokens that were computed."""
    cache_read_input_tokens: int
    """Prompt tokens whose KV was reused."""
    output_tokens: int
    cache_creation_input_tokens: int = 0
    """Always 0: all computed tokens are cached, at no charge, and are counted as input."""

    @classmethod
    def of(cls, progress: Progress) -> AnthropicUsage:
        """Return the usage of a request so far."""
        return cls(progress.n_prompt - progress.n_cached, progress.n_cached, progress.n_generated)


class _Typed(msgspec.Struct, tag_field="type"):
    """A value with its name in `type`."""


class TextBlock(_Typed, tag="text"):
    """Text of the reply."""

    text: str


class ThinkingBlock(_Typed, tag="thinking"):
    """Reasoning; the signature is empty, as in llama-server."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Typed, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: msgspec.Raw
    """The arguments as the model wrote them, a JSON object."""


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicMessage(_Typed, tag="message", kw_only=True):
    """A reply, or in `message_start` its beginning."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class TextDelta(_Typed, tag="text_delta"):
    """The next part of a text block."""

    text: str


class ThinkingDelta(_Typed, tag="thinking_delta"):
    """The next part of a thinking block."""

    thinking: str


class SignatureDelta(_Typed, tag="signature_delta"):
    """The signature of a thinking block, before its end."""

    signature: str = ""


class InputJsonDelta(_Typed, tag="input_json_delta"):
    """The next part of a call's arguments."""

    partial_json: str


class MessageStart(_Typed, tag="message_start"):
    """The first event."""

    message: AnthropicMessage


class ContentBlockStart(_Typed, tag="content_block_start"):
    """The beginning of a block, which is empty so far."""

    index: int
    content_block: Block


class ContentBlockDelta(_Typed, tag="content_block_delta"):
    """An addition to the block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(_Typed, tag="content_block_stop"):
    """The end of the block."""

    index: int


BlockEvent: TypeAlias = ContentBlockStart | ContentBlockDelta | ContentBlockStop


class Stop(msgspec.Struct):
    """The reason why the reply ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(_Typed, tag="message_delta"):
    """The stop reason and the usage, after the last block."""

    delta: Stop
    usage: AnthropicUsage


class MessageStop(_Typed, tag="message_stop"):
    """The last event."""


class Ping(_Typed, tag="ping"):
    """An event without content, which keeps the connection open."""


Event: TypeAlias = MessageStart | BlockEvent | MessageDelta | MessageStop | Ping


class Blocks:
    """Makes blocks of the parts of a message, and events that report them: one block is open at a time.

    With `omit_thinking`, thinking blocks have no text.
    """

    def __init__(self, *, omit_thinking: bool) -> None:
        self.complete: list[Block] = []
        """Without a call that is not complete: with empty arguments a client might run it."""
        self._omit_thinking = omit_thinking
        self._index = -1
        self._open: Block | None = None
        """The last block, without its text."""
        self._texts: list[str] = []

    def add(self, delta: Delta) -> Iterator[BlockEvent]:
        """Yield the events of what was added to the message."""
        for part in delta.parts or (delta,):
            if part.reasoning:
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._start(ThinkingBlock(""))
                if not self._omit_thinking:
                    yield self._added(ThinkingDelta(part.reasoning), part.reasoning)
            if part.content:
                if not isinstance(self._open, TextBlock):
                    yield from self._start(TextBlock(""))
                yield self._added(TextDelta(part.content), part.content)
            for call in part.tool_calls:
                if call.name is not None:
                    yield from self._start(ToolUseBlock(call.id or "", call.name, _NO_ARGUMENTS))
                if call.arguments:
                    yield self._added(InputJsonDelta(call.arguments), call.arguments)

    def close(self) -> Iterator[BlockEvent]:
        """Yield the end of the block that is open."""
        block, text, self._open = self._open, "".join(self._texts), None
        if isinstance(block, ThinkingBlock):
            yield ContentBlockDelta(self._index, SignatureDelta())
            self.complete.append(ThinkingBlock(text))
        elif isinstance(block, TextBlock):
            self.complete.append(TextBlock(text))
        elif block is not None and is_object(text):
            self.complete.append(ToolUseBlock(block.id, block.name, msgspec.Raw(text.encode())))
        if block is not None:
            yield ContentBlockStop(self._index)

    def _start(self, block: Block) -> Iterator[BlockEvent]:
        yield from self.close()
        self._index += 1
        self._open, self._texts = block, []
        yield ContentBlockStart(self._index, block)

    def _added(self, delta: TextDelta | ThinkingDelta | InputJsonDelta, text: str) -> BlockEvent:
        self._texts.append(text)
        return ContentBlockDelta(self._index, delta)


async def messages(request: web.Request) -> web.StreamResponse:
    """Complete a conversation in Anthropic's format."""
    return await complete(request, "messages", MessagesReplyWriter)


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of the prompt that a conversation in Anthropic's format has, and generate nothing."""
    return json_response(TokenCount(await count_prompt_tokens(request, "messages")))


class MessagesReplyWriter(ReplyWriter):
    """Writes Anthropic's messages; each is of one completion."""

    id_prefix = "msg_"
    ping = typed_event(Ping())

    def __init__(self, request: web.Request, service: Service, live: LiveRequest) -> None:
        super().__init__(request, service, live)
        self._message = self.new_message(live.completions[0])
        self._blocks = Blocks(omit_thinking=self.options.omit_reasoning)
        self._is_started = False

    def events(self, completion: Completion, output: Output | Finished) -> Iterator[bytes]:
        """Yield the beginning of the message with the first event, then blocks, then the stop reason."""
        if not self._is_started:
            self._is_started = True
            yield typed_event(MessageStart(self._empty(AnthropicUsage.of(progress_of(output)))))
        added = self._message.push(output.content, end_reason(output))
        for each in self._blocks.add(added):
            yield typed_event(each)
        if isinstance(output, Finished):
            for each in self._blocks.close():
                yield typed_event(each)
            yield typed_event(MessageDelta(self._stop(output), AnthropicUsage.of(output.progress)))

    def closing(self) -> Iterator[bytes]:
        """Yield the last event."""
        yield typed_event(MessageStop())

    def whole(self) -> Iterator[bytes]:
        """Yield the whole message."""
        (completion,) = self.completions
        end = completion.end
        added = self._message.push(completion.text, end.reason)
        for _ in chain(self._blocks.add(added), self._blocks.close()):
            pass
        message = self._empty(AnthropicUsage.of(end.progress))
        stop = self._stop(end)
        message.content = self._blocks.complete
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        yield encode(message)

    def _empty(self, usage: AnthropicUsage) -> AnthropicMessage:
        return AnthropicMessage(id=self.id, model=self.model, content=[], usage=usage)

    def _stop(self, end: Finished) -> Stop:
        reason: StopReason = "tool_use" if self._message.has_calls else "end_turn"
        if self._message.reason == "limit":
            reason = "max_tokens"
        elif end.stopping_word:
            return Stop("stop_sequence", end.stopping_word)
        return Stop(reason)
