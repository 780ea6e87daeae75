"""Types of a response, of its items, and of the events of a streamed one.

A response is encoded in two parts: what is generated, and the fields of the request that it repeats, which the
prompt worker has encoded.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.api.generation.reply_parts import CacheUse, Prob, PromptProgress, Timings

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
    """The encoded reasoning, if `include` asks for it: some clients send back nothing else of a reasoning item."""


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
    """An item that stands for a conversation; the content is encoded, but not encrypted."""

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


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event; they are numbered from 0 on."""

    sequence_number: int = 0
    timings: Timings | UnsetType = UNSET
    """With `timings_per_token`, and in the last event."""


class Lifecycle(Event, kw_only=True):
    """An event with the response as it is then."""

    response: Response
    """Written into the event when it is encoded."""


class Created(Lifecycle, kw_only=True, tag="response.created"):
    """The first event."""


class InProgress(Lifecycle, kw_only=True, tag="response.in_progress"):
    """The second event; further ones come with `return_progress` before the first text."""

    prompt_progress: PromptProgress | UnsetType = UNSET


class Completed(Lifecycle, kw_only=True, tag="response.completed"):
    """The last event of a response that is complete."""


class Incomplete(Lifecycle, kw_only=True, tag="response.incomplete"):
    """The last event of a response that a limit has cut."""


class Failed(Lifecycle, kw_only=True, tag="response.failed"):
    """The last event of a response that failed."""


class Error(Event, kw_only=True, tag="error"):
    """The error before `response.failed`."""

    code: str
    message: str
    param: str | None = None


class ItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: Item


class ItemDone(Event, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: Item


class _OfItem(Event, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, kw_only=True):
    content_index: int = 0


class PartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    """The content of a message or of reasoning begins."""

    part: OutputText | ReasoningText


class PartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    """The content is complete."""

    part: OutputText | ReasoningText


class TextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    """More text of a message."""

    delta: str
    logprobs: list[Prob] = []


class TextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    """The text of a message is complete."""

    text: str
    logprobs: list[Prob] = []


class ReasoningDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    """The reasoning is complete."""

    text: str


class ArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    """The arguments of a call are complete."""

    name: str
    arguments: str


class InputDelta(_OfItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """The input of a custom tool; it comes in one piece."""

    delta: str


class InputDone(_OfItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The input of a custom tool is complete."""

    input: str


ItemEvent: TypeAlias = (
    ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
)
AnyEvent: TypeAlias = Created | InProgress | Completed | Incomplete | Failed | Error | ItemEvent
