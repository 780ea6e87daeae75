"""Types of a response, of its items and of the events of a stream.

A response is encoded in two parts: what is generated, and the fields of the request that it repeats, which the
prompt worker has encoded.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.api.generation.logprobs import Prob
from llamaslot.api.generation.reply_stats import CacheUse, Timings

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Prob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning as the model wrote it."""

    text: str


class _Item(msgspec.Struct, kw_only=True, tag_field="type"):
    id: str
    status: Status = "in_progress"


class MessageItem(_Item, kw_only=True, tag="message"):
    """Text of the assistant; a list of one part, or of none while it is in progress."""

    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(_Item, kw_only=True, tag="reasoning"):
    """Reasoning before a message or call."""

    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET
    """The reasoning encoded, if `include` asks for it: clients that send nothing else of it back keep it so."""


class FunctionCall(_Item, kw_only=True, tag="function_call"):
    """A call of a function; `arguments` is JSON."""

    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomCall(_Item, kw_only=True, tag="custom_tool_call"):
    """A call of a tool that takes a text."""

    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


class ShellAction(msgspec.Struct, kw_only=True, tag_field="type", tag="exec"):
    """A command that the client is to run."""

    command: list[str] = []
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    working_directory: str | None = None
    user: str | None = None


class ShellCall(_Item, kw_only=True, tag="local_shell_call"):
    """A call of `local_shell`."""

    call_id: str
    action: ShellAction = msgspec.field(default_factory=ShellAction)


class CompactionItem(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    """An item that stands for a conversation; the content is encoded, and no secret."""

    id: str
    encrypted_content: str


Item: TypeAlias = MessageItem | ReasoningItem | FunctionCall | CustomCall | ShellCall


class InputDetails(msgspec.Struct):
    """Reused prompt tokens, and those that were computed and are kept."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct):
    """Tokens of the reasoning, estimated from its share of the text."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """OpenAI's token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """The reason why a response ends early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ErrorDetails(msgspec.Struct):
    """The error of a response that failed."""

    code: str
    message: str


class Generated(msgspec.Struct, kw_only=True):
    """The fields of a response that are not repeated from its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ErrorDetails | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Item] = []
    store: bool
    temperature: float
    top_p: float
    usage: ResponseUsage | None = None
    timings: Timings | UnsetType = UNSET
    cache: CacheUse | UnsetType = UNSET


class Response(Generated, kw_only=True):
    """A response, with the fields that it repeats from its request."""

    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["disabled"]
    user: str | None


class Deleted(msgspec.Struct):
    """Result of deleting a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(msgspec.Struct):
    """Length of a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
