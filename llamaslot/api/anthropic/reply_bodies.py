"""Replies and events of the Messages API."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from llamaslot.base.events import Progress

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
    """Reasoning; the signature is empty, as llama-server's."""

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
    """The end of all blocks."""

    delta: Stop
    usage: AnthropicUsage


class MessageStop(_Typed, tag="message_stop"):
    """The last event."""


class Ping(_Typed, tag="ping"):
    """An event that means nothing, and keeps the connection open."""


Event: TypeAlias = MessageStart | BlockEvent | MessageDelta | MessageStop | Ping
