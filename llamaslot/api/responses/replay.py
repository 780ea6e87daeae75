"""Events of a stored response, for a client that asks for it as a stream."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from llamaslot.api.responses import events
from llamaslot.api.responses.output import item_events
from llamaslot.api.responses.reply_bodies import Response
from llamaslot.api.sse import typed_event

N_FIRST = 2
"""Events before those of the items: their numbers are the same whenever a response is streamed."""


def replayed(body: bytes, first: int) -> bytes:
    """Return the events of a complete response, which is JSON, from the one with the number `first` on."""
    found = []
    for number, event in enumerate(_events(body)):
        event.sequence_number = number
        found.append(typed_event(event))
    return b"".join(found[first:])


def _events(body: bytes) -> Iterator[events.Event]:
    whole = msgspec.json.decode(body, type=Response)
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
