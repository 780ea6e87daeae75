"""Types of the events of a streamed response."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from llamaslot.api.generation.logprobs import Prob
from llamaslot.api.generation.reply_stats import PromptProgress, Timings
from llamaslot.api.responses.reply_bodies import Item, OutputText, ReasoningText, Response


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
