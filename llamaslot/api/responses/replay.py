"""Events of a stored response, for a client that asks for it as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec
from msgspec import UNSET

from llamaslot.api.responses import events
from llamaslot.api.responses.output import item_events
from llamaslot.api.responses.reply_bodies import (
    CustomCall,
    FunctionCall,
    MessageItem,
    OutputText,
    ReasoningItem,
    Response,
    ShellCall,
)
from llamaslot.api.sse import typed_event

N_FIRST = 2
"""Events before those of the items: their numbers are the same whenever a response is streamed."""


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


def _events(body: bytes) -> Iterator[events.Event]:
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
    yield events.Created(response=begun)
    yield events.InProgress(response=begun)
    for index, item in enumerate(whole.output):
        yield from item_events(item, index)
    kind = events.Completed if whole.status == "completed" else events.Incomplete
    yield kind(response=whole, timings=whole.timings)
