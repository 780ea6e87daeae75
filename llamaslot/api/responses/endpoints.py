"""The endpoints of OpenAI's Responses API. Stored responses are found with the API key that made them only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TypeAlias

import msgspec
from aiohttp import web
from msgspec import UNSET

from llamaslot.api.bodies import json_reply, json_response
from llamaslot.api.context import CALLER, READINESS, SETTINGS, UNIQUE_ID
from llamaslot.api.generation.pages import Paging, page_of_stored
from llamaslot.api.generation.request_handling import complete, count_prompt_tokens
from llamaslot.api.middleware import key_namespace
from llamaslot.api.responses import bodies
from llamaslot.api.responses.bodies import (
    CustomCall,
    Deleted,
    FunctionCall,
    InputTokens,
    MessageItem,
    OutputText,
    ReasoningItem,
    Response,
    ShellCall,
)
from llamaslot.api.responses.output import item_events
from llamaslot.api.responses.responses import RUNNING, STORE_ACCESS, CompactionWriter, ResponsesReplyWriter
from llamaslot.api.responses.store import ResponseStore, StoreAccess, StoredResponse
from llamaslot.api.sse import EventStream, typed_event
from llamaslot.base.commands import BodyKind
from llamaslot.base.errors import LlamaslotError, NotSupportedError

RESPONSES = web.AppKey("RESPONSES", ResponseStore)
N_FIRST = 2
"""Events before those of the items: their numbers are the same whenever a response is streamed."""


async def create(request: web.Request) -> web.StreamResponse:
    """Reply to text or items, and store the response unless `store` is false."""
    return await _complete(request, "responses", ResponsesReplyWriter)


async def compact(request: web.Request) -> web.StreamResponse:
    """Return an item that stands for a conversation, with a summary of it."""
    return await _complete(request, "compact", CompactionWriter)


async def cancel(request: web.Request) -> web.StreamResponse:
    """Cancel a response that runs, for its client too; return one that has ended as it is.

    If its completion has ended, and its client has yet to read the rest, it is in progress until then.
    """
    service, key = request.app[READINESS].check(), (key_namespace(request), request.match_info["response_id"])
    running = request.app[RUNNING].get(key)
    if running is None:
        return await json_reply(request, [_stored(request).body])
    running.is_cancelled |= service.cancel(running.id)
    return web.Response(body=running.unfinished(), content_type="application/json")


async def _complete(
    request: web.Request, kind: BodyKind, writer_type: type[ResponsesReplyWriter]
) -> web.StreamResponse:
    key = (key_namespace(request), writer_type.id_prefix + request[UNIQUE_ID])
    with closing(_store_access(request)) as access:
        request[STORE_ACCESS] = access
        try:
            return await complete(request, kind, writer_type, access.find)
        except LlamaslotError:
            running = request.app[RUNNING].get(key)
            if running is None or not running.is_cancelled:
                raise
            # After a 500, OpenAI's clients would send the request again.
            return web.Response(body=running.unfinished(), content_type="application/json")
        finally:
            request.app[RUNNING].pop(key, None)


async def count(request: web.Request) -> web.Response:
    """Return the tokens of the prompt that a response would be generated for."""
    with closing(_store_access(request)) as access:
        return json_response(InputTokens(await count_prompt_tokens(request, "responses", access.find)))


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Return a stored response, as a whole or, with `stream`, as events."""
    body = _stored(request).body
    if request.query.get("stream") != "true":
        return await json_reply(request, [body])
    after = request.query.get("starting_after")
    if after is not None and after not in map(str, range(N_FIRST)):
        message = "'starting_after': later events have other numbers than when the response was generated"
        raise NotSupportedError(message, param="starting_after")
    stream = EventStream(request, 0, request.app[SETTINGS].max_stream_buffer_bytes)
    await stream.open()
    events = replayed(body, 0 if after is None else int(after) + 1)
    with suppress(ConnectionError):
        # Events that repeat a long response take long to encode and to copy: each on a thread, and in parts.
        while event := await asyncio.to_thread(next, events, b""):
            await stream.send([event])
        await stream.close()
    return stream.response


async def delete(request: web.Request) -> web.Response:
    """Delete a stored response; those that continue it keep its items."""
    response = _stored(request)
    request.app[RESPONSES].delete(response.namespace, response.id)
    return json_response(Deleted(response.id))


async def input_items(request: web.Request) -> web.StreamResponse:
    """Return the items that a stored response answers, those of earlier turns included."""
    paging = Paging(request, "desc", 1)
    return await page_of_stored(request, _stored(request).input_lists(), paging)


def _stored(request: web.Request) -> StoredResponse:
    return request.app[RESPONSES].get(key_namespace(request), request.match_info["response_id"])


def _store_access(request: web.Request) -> StoreAccess:
    return StoreAccess(request.app[RESPONSES], key_namespace(request), request[CALLER].owner)


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


def _events(body: bytes) -> Iterator[bodies.Event]:
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
    yield bodies.Created(response=begun)
    yield bodies.InProgress(response=begun)
    for index, item in enumerate(whole.output):
        yield from item_events(item, index)
    kind = bodies.Completed if whole.status == "completed" else bodies.Incomplete
    yield kind(response=whole, timings=whole.timings)
