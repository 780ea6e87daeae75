"""Reply bodies of OpenAI's chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot import __version__
from llamaslot.api.generation.logprobs import ChatLogprobs, TextLogprobs
from llamaslot.api.generation.reply_stats import CacheUse, PromptProgress, Timings, Usage
from llamaslot.base.events import FinishReason
from llamaslot.formats.calls import ToolCall, ToolCallDelta

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
