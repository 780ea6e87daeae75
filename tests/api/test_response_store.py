"""Stored responses: continued, returned, deleted, evicted, and of one API key only."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from llamaslot.api.context import ApiSettings
from llamaslot.api.http_server import create_app
from llamaslot.api.responses.responses import RESPONSES as STORE
from llamaslot.api.responses.responses import RUNNING
from llamaslot.api.responses.store import ResponseStore, StoredResponse
from llamaslot.api.sse import EventStream
from llamaslot.base.errors import NotFoundError
from llamaslot.base.prompt_jobs import References
from llamaslot.protocol.responses import decoded_reasoning
from tests.api.response_events import RESPONSES, events_of, put_together, text_of
from tests.api.test_tools import CALL, PARAMETERS, served
from tests.fake_backend import FakeBackend

WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
SHORT = {"max_output_tokens": 4, "ignore_eos": True}


async def test_a_response_continues_another(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=2048))
    first = await server.ok(RESPONSES, {"input": "One", **SHORT})
    second = await server.ok(RESPONSES, {"input": "Two", "previous_response_id": first["id"], **SHORT})
    third = put_together(await events_of(server, {"input": "Three", "previous_response_id": second["id"], **SHORT}))
    assert third["previous_response_id"] == second["id"]
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": text_of(first["output"][0])},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": text_of(second["output"][0])},
        {"role": "user", "content": "Three"},
    ]
    chat = await server.ok("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert chat["usage"]["prompt_tokens"] == third["usage"]["input_tokens"]
    assert third["usage"]["input_tokens_details"]["cached_tokens"] >= second["usage"]["total_tokens"] - 1
    branch = await server.ok(RESPONSES, {"input": "Three", "previous_response_id": second["id"], **SHORT})
    assert branch["usage"]["input_tokens"] == third["usage"]["input_tokens"]
    count = await server.ok(f"{RESPONSES}/input_tokens", {"input": "Three", "previous_response_id": second["id"]})
    assert count["input_tokens"] == third["usage"]["input_tokens"]


async def test_instructions_are_those_of_each_request(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=2048))
    first = await server.ok(RESPONSES, {"input": "One", "instructions": "X" * 100, **SHORT})
    same = {"input": "Two", "previous_response_id": first["id"]}
    without = await server.ok(f"{RESPONSES}/input_tokens", same)
    other = await server.ok(f"{RESPONSES}/input_tokens", {**same, "instructions": "Y"})
    assert without["input_tokens"] < 100
    assert other["input_tokens"] == without["input_tokens"] + len("system: Y\n")


async def test_the_result_of_a_call_continues_it(start: Any) -> None:
    server = await served(start, "hermes", f"Let me see.\n{CALL}", "Sunny.")
    first = await server.ok(RESPONSES, {"input": "The weather?", "tools": [WEATHER]})
    message, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    body = {"input": [result], "tools": [WEATHER], "previous_response_id": first["id"]}
    second = await server.ok(RESPONSES, body)
    assert text_of(second["output"][0]) == "Sunny."
    items = [{"role": "user", "content": "The weather?"}, message, call, result]
    count = await server.ok(f"{RESPONSES}/input_tokens", {"input": items, "tools": [WEATHER]})
    assert count["input_tokens"] == second["usage"]["input_tokens"]
    named = [items[0], *({"type": "item_reference", "id": item["id"]} for item in (message, call)), result]
    for without_type in (False, True):
        if without_type:
            named[1:3] = [{"id": message["id"]}, {"type": None, "id": call["id"]}]
        count = await server.ok(f"{RESPONSES}/input_tokens", {"input": named, "tools": [WEATHER]})
        assert count["input_tokens"] == second["usage"]["input_tokens"]


async def test_a_stored_response_is_returned_with_its_input(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=2048))
    first = await server.ok(RESPONSES, {"input": "One", **SHORT})
    items = [{"role": "user", "content": "Two"}, {"type": None, "role": "user", "content": "Three", "id": "mine"}]
    body = {"input": items, "previous_response_id": first["id"], **SHORT}
    second = put_together(await events_of(server, body))
    for response in (first, second):
        assert await server.get(f"{RESPONSES}/{response['id']}") == (200, response)
    path = f"{RESPONSES}/{second['id']}/input_items"
    status, listed = await server.get(path, params={"order": "asc"})
    assert (status, listed["object"], listed["has_more"]) == (200, "list", False)
    texts = [text_of(item) for item in listed["data"]]
    assert texts == ["One", text_of(first["output"][0]), "Two", "Three"]
    assert listed["data"][-1] == {
        "type": "message",
        "id": "mine",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Three"}],
    }
    ids = [item["id"] for item in listed["data"]]
    assert (listed["first_id"], listed["last_id"]) == (ids[0], ids[-1])
    assert len(set(ids)) == 4
    _, page = await server.get(path, params={"limit": "2", "after": ids[3]})
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "none"}):
        status, reply = await server.get(path, params=query)
        assert (status, reply["error"]["param"]) == (400, next(iter(query)))


async def test_a_stored_response_is_streamed(start: Any) -> None:
    shell = {"type": "local_shell"}
    custom = {"type": "custom", "name": "apply_patch"}
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in (
            ("get_weather", {"city": "Rome"}),
            ("apply_patch", {"input": '{"input": 1}'}),
            ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}),
        )
    ]
    text = "<think>\nHm.\n</think>\n\nLet me see.\n" + "\n".join(calls)
    server = await served(start, "hermes-thinking", text, "")
    fields = {"include": ["reasoning.encrypted_content"], "logprobs": True}
    whole = await server.ok(RESPONSES, {"input": "One", "tools": [WEATHER, custom, shell], **fields})
    kinds = ["reasoning", "message", "function_call", "custom_tool_call", "local_shell_call"]
    assert [item["type"] for item in whole["output"]] == kinds
    cut = await server.ok(RESPONSES, {"input": "One", "max_output_tokens": 0})
    for response in (whole, cut):
        path = f"{RESPONSES}/{response['id']}"
        streamed = await stored_events(server, path)
        assert await stored_events(server, path, starting_after="0") == streamed[1:]
        assert put_together(streamed) == response
    status, reply = await server.get(path, params={"stream": "true", "starting_after": "2"})
    assert (status, reply["error"]["param"]) == (400, "starting_after")


async def test_a_long_stored_response_is_written_in_parts(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(ApiSettings())
    server = await start(app=app)
    response = await server.ok(RESPONSES, {"input": "One", **SHORT})
    response["tools"] = [{"type": "custom", "name": "f", "description": "x" * 3_000_000}]
    body = json.dumps(response).encode()
    app[STORE].put(StoredResponse("", "long", body, b"[]", {}))
    written: list[int] = []
    write = web.StreamResponse.write

    async def counted(self: web.StreamResponse, data: bytes) -> None:
        written.append(len(data))
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", counted)
    assert put_together(await stored_events(server, f"{RESPONSES}/long")) == response
    assert sum(written) > 3 * 3_000_000, "it is in three events"
    assert max(written) <= 2**20


async def stored_events(server: Any, path: str, **query: str) -> list[dict[str, Any]]:
    async with server.session.get(server.url + path, params={"stream": "true", **query}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        return [json.loads(block.split("data: ")[1]) for block in (await response.text()).split("\n\n")[:-1]]


async def test_a_conversation_is_made_short(start: Any) -> None:
    texts = (CALL, "<think>\nHm.\n</think>\n\nIt was sunny.", "Short.")
    server = await served(start, "hermes-thinking", *texts)
    first = await server.ok(RESPONSES, {"input": "The weather?", "tools": [WEATHER]})
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "sunny"}
    asked = {"input": [result], "previous_response_id": first["id"], "tools": [WEATHER]}
    counted = (await server.ok(f"{RESPONSES}/input_tokens", asked))["input_tokens"]
    short = await server.ok(f"{RESPONSES}/compact", asked)
    (item,) = short["output"]
    assert (short["object"], item["type"]) == ("response.compaction", "compaction")
    assert short["usage"]["input_tokens"] > counted
    assert short["cache"]["cells"] >= len("user: The weather?\n"), "the prefix is that of the conversation"
    assert (await server.get(f"{RESPONSES}/{short['id']}"))[0] == 404, "it is not stored"
    question = {"role": "user", "content": "And now?"}
    shown = await server.ok("/v1/chat/completions/input_tokens", {"messages": [written("The weather?"), question]})
    count = await server.ok(f"{RESPONSES}/input_tokens", {"input": [item, question]})
    assert count == {"input_tokens": shown["input_tokens"], "object": "response.input_tokens"}
    again = await server.ok(f"{RESPONSES}/compact", {"input": [item, question]})
    content = json.loads(decoded_reasoning(again["output"][0]["encrypted_content"]))
    assert content == {"user": ["The weather?", "And now?"], "summary": "Short."}
    for body, param in (
        ({"input": [{"type": "compaction", "encrypted_content": "theirs"}]}, "input[0].encrypted_content"),
        ({"input": "x", "stream": True}, "stream"),
    ):
        status, reply = await server.post(f"{RESPONSES}/compact", body)
        assert (status, reply["error"]["param"]) == (400, param)


def written(text: str) -> dict[str, str]:
    """The message that stands for a conversation with one text of the user."""
    content = f"What I wrote before:\n<message>\n{text}\n</message>\n\nA summary of our conversation until now:\n"
    return {"role": "user", "content": f"{content}It was sunny."}


async def test_a_running_response_is_cancelled_by_its_id(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=60_000), api_keys=("one", "two"))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"input": "x", "ignore_eos": True, "stream": True}
    async with server.session.post(server.url + RESPONSES, json=body, headers=mine) as response:
        line = await response.content.readuntil(b"\n\n")
        created = json.loads(line.split(b"data: ")[1])["response"]
        path = f"{RESPONSES}/{created['id']}/cancel"
        assert (await server.post(path, {}, headers=other))[0] == 404
        status, reply = await server.post(path, {}, headers=mine)
        assert (status, reply) == (200, {**created, "status": "cancelled"})
        assert b"response.failed" in await response.content.read()
    assert (await server.post(path, {}, headers=mine))[0] == 404, "it is not stored"
    assert (await server.idle()).n_queued == 0
    _, ended = await server.post(RESPONSES, {"input": "x", **SHORT}, headers=mine)
    assert await server.post(f"{RESPONSES}/{ended['id']}/cancel", {}, headers=mine) == (200, ended)


async def test_a_cancelled_response_is_no_error_of_the_server(start: Any) -> None:
    app = create_app(ApiSettings())
    server = await start(app=app, backend=FakeBackend(n_ctx=60_000))
    reply = asyncio.create_task(server.post(RESPONSES, {"input": "x", "ignore_eos": True}))
    await server.state_where(lambda state: any(slot.request_id for slot in state.slots))
    ((_, running),) = app[RUNNING]
    cancelled = await server.post(f"{RESPONSES}/{running}/cancel", {})
    assert (cancelled[0], cancelled[1]["status"]) == (200, "cancelled")
    assert await reply == cancelled, "clients repeat a request that gets a 500"
    await server.idle()
    compaction = asyncio.create_task(server.post(f"{RESPONSES}/compact", {"input": "x", "ignore_eos": True}))
    state = await server.state_where(lambda state: any(slot.request_id for slot in state.slots))
    (running,) = filter(None, (slot.request_id for slot in state.slots))
    assert (await server.post(f"{RESPONSES}/{running}/cancel", {}))[0] == 404, "it is no response"
    compaction.cancel()


async def test_a_response_that_has_ended_is_not_cancelled_while_its_stream_is_read(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(ApiSettings())
    server = await start(app=app)
    is_read = asyncio.Event()
    close = EventStream.close

    async def closed_late(self: EventStream, events: Iterable[bytes] = ()) -> None:
        made = list(events)
        await is_read.wait()
        await close(self, made)

    monkeypatch.setattr(EventStream, "close", closed_late)
    events = asyncio.create_task(events_of(server, {"input": "x", **SHORT}))
    async with asyncio.timeout(10):
        while not len(app[STORE]):
            await asyncio.sleep(0.005)
    ((_, ended),) = app[STORE]._listed
    status, reply = await server.post(f"{RESPONSES}/{ended}/cancel", {})
    is_read.set()
    assert (status, reply) == (200, put_together(await events))


async def test_a_response_whose_rest_is_unread_is_in_progress_and_not_cancelled(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(ApiSettings())
    server = await start(app=app)
    is_read = asyncio.Event()
    send = EventStream.send

    async def sent_late(self: EventStream, events: Iterable[bytes]) -> None:
        await is_read.wait()
        await send(self, events)

    monkeypatch.setattr(EventStream, "send", sent_late)
    events = asyncio.create_task(events_of(server, {"input": "x", **SHORT}))
    async with asyncio.timeout(10):
        while not app[RUNNING]:
            await asyncio.sleep(0.005)
    await server.idle()
    ((_, ended),) = app[RUNNING]
    path = f"{RESPONSES}/{ended}"
    status, reply = await server.post(f"{path}/cancel", {})
    assert (status, reply["status"]) == (200, "in_progress")
    is_read.set()
    response = put_together(await events)
    assert response["status"] in ("completed", "incomplete")
    assert await server.post(f"{path}/cancel", {}) == await server.get(path) == (200, response)


async def test_without_input_a_response_is_continued(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=2048))
    first = await server.ok(RESPONSES, {"input": "One", **SHORT})
    second = await server.ok(RESPONSES, {"previous_response_id": first["id"], **SHORT})
    assert second["usage"]["input_tokens"] == first["usage"]["total_tokens"], "the last message is continued"
    _, items = await server.get(f"{RESPONSES}/{second['id']}/input_items")
    assert len(items["data"]) == 2
    empty = await server.ok(RESPONSES, SHORT)
    message = await server.ok(f"{RESPONSES}/input_tokens", {"input": ""})
    assert empty["usage"]["input_tokens"] == message["input_tokens"]


async def test_a_deleted_response_is_gone_and_those_after_it_are_not(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=2048))
    first = await server.ok(RESPONSES, {"input": "One", **SHORT})
    second = await server.ok(RESPONSES, {"input": "Two", "previous_response_id": first["id"], **SHORT})
    path = f"{server.url}{RESPONSES}/{first['id']}"
    async with server.session.delete(path) as reply:
        assert await reply.json() == {"id": first["id"], "object": "response", "deleted": True}
    async with server.session.delete(path) as reply:
        assert reply.status == 404
    status, reply = await server.post(RESPONSES, {"input": "Two", "previous_response_id": first["id"]})
    assert (status, reply["error"]["param"]) == (404, "previous_response_id")
    assert first["id"] in reply["error"]["message"]
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    status, reply = await server.post(RESPONSES, {"input": [reference]})
    assert (status, reply["error"]["param"]) == (404, "input")
    _, items = await server.get(f"{RESPONSES}/{second['id']}/input_items")
    assert len(items["data"]) == 3
    third = await server.ok(RESPONSES, {"input": "Three", "previous_response_id": second["id"], **SHORT})
    assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]


async def test_requests_that_continue_a_response_keep_it_until_they_end(start: Any) -> None:
    app = create_app(ApiSettings())
    server = await start(app=app)
    first = await server.ok(RESPONSES, {"input": "One", **SHORT})
    body = {"input": "Two", "previous_response_id": first["id"], "store": False, **SHORT}
    await server.ok(RESPONSES, body)
    await events_of(server, body)
    await server.ok(f"{RESPONSES}/input_tokens", body)
    for wrong in (
        {"temperature": "x"},
        {"input": "x" * 5000},
        {"input": [{"type": "item_reference", "id": "none"}]},
    ):
        for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
            assert (await server.post(path, {**body, **wrong}))[0] in (400, 404)
    store = app[STORE]
    assert store.n_bytes > 0
    async with server.session.delete(f"{server.url}{RESPONSES}/{first['id']}") as reply:
        assert reply.status == 200
    assert (len(store), store.n_bytes) == (0, 0)


async def test_keys_do_not_see_each_others_responses(start: Any) -> None:
    server = await start(api_keys=("one", "two"))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    url = server.url + RESPONSES
    async with server.session.post(url, json={"input": "One", **SHORT}, headers=mine) as reply:
        first = await reply.json()
    for path in (first["id"], f"{first['id']}/input_items"):
        for headers, status in ((other, 404), (mine, 200)):
            async with server.session.get(f"{url}/{path}", headers=headers) as reply:
                assert reply.status == status
    async with server.session.delete(f"{url}/{first['id']}", headers=other) as reply:
        assert reply.status == 404
    reference = [{"type": "item_reference", "id": first["output"][0]["id"]}]
    for body in ({"input": "Two", "previous_response_id": first["id"]}, {"input": reference}):
        for headers, status in ((other, 404), (mine, 200)):
            async with server.session.post(url, json={**body, **SHORT}, headers=headers) as reply:
                assert reply.status == status


@pytest.mark.slow
async def test_a_response_is_not_stored_if_that_is_not_wanted_or_not_possible(start: Any) -> None:
    server = await start(max_stored_responses_bytes=20_000)
    for body in (
        {"input": "x", "store": False},
        {"input": "x", "instructions": "x" * 20_000, "cache_prompt": False},
    ):
        if "instructions" in body:
            server = await start(backend=FakeBackend(n_ctx=30_000), max_stored_responses_bytes=20_000)
        for response in (
            await server.ok(RESPONSES, {**body, **SHORT}),
            put_together(await events_of(server, {**body, **SHORT})),
        ):
            assert response["store"] is False
            assert (await server.get(f"{RESPONSES}/{response['id']}"))[0] == 404
    server = await start(max_stored_responses=0)
    response = await server.ok(RESPONSES, {"input": "x", **SHORT})
    assert response["store"] is False
    status, reply = await server.get(f"{RESPONSES}/{response['id']}")
    assert status == 404
    assert "--max-stored-responses" in reply["error"]["message"]


@pytest.mark.parametrize("limit", [{"max_stored_responses": 4}, {"max_stored_responses_bytes": 8000}], ids=str)
async def test_no_key_evicts_what_another_stored_within_its_share(start: Any, limit: dict[str, int]) -> None:
    server = await start(api_keys=("one", "two"), **limit)
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"input": "One", **SHORT}
    _, first = await server.post(RESPONSES, body, headers=mine)
    stored = [(await server.post(RESPONSES, body, headers=other))[1] for _ in range(9)]
    assert all(each["store"] for each in stored)
    for headers, kept in ((mine, first), (other, stored[-1]), (other, stored[-2])):
        assert (await server.get(f"{RESPONSES}/{kept['id']}", headers=headers))[0] == 200
    assert (await server.get(f"{RESPONSES}/{stored[0]['id']}", headers=other))[0] == 404


async def test_the_least_recently_used_response_is_evicted(start: Any) -> None:
    server = await start(max_stored_responses=2)
    first = await server.ok(RESPONSES, {"input": "One", **SHORT})
    second = await server.ok(RESPONSES, {"input": "Two", **SHORT})
    await server.ok(RESPONSES, {"input": "More", "previous_response_id": first["id"], **SHORT})
    assert (await server.get(f"{RESPONSES}/{first['id']}"))[0] == 200
    assert (await server.get(f"{RESPONSES}/{second['id']}"))[0] == 404


def stored(name: str, n_bytes: int, previous: StoredResponse | None = None) -> StoredResponse:
    return StoredResponse("", name, b"b" * n_bytes, b"[]", {f"item of {name}": b"{}"}, previous)


def delete(store: ResponseStore, name: str) -> None:
    """Delete a response if it is still there."""
    with suppress(NotFoundError):
        store.delete("", name)


def test_items_that_a_later_response_needs_are_kept_and_counted() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1000)
    first = stored("1", 100)
    assert store.put(first)
    second = stored("2", 100, first)
    assert store.put(second)
    assert store.put(stored("3", 100, second))
    with pytest.raises(NotFoundError):
        store.get("", "1")
    assert store.n_bytes == 3 * 104, "the third continues the first"
    assert len(store.get("", "3").history()) == 6
    assert not store.put(stored("large", 1000))
    assert store.put(stored("4", 900))
    assert (len(store), store.n_bytes) == (1, 904)


def test_a_response_that_does_not_fit_with_those_it_continues_evicts_none() -> None:
    store = ResponseStore(max_responses=8, max_bytes=1000)
    first = stored("1", 500)
    assert store.put(stored("other", 200))
    assert store.put(first)
    assert not store.put(stored("2", 600, first))
    assert (len(store), store.n_bytes) == (2, 708)


def test_a_response_that_a_request_continues_is_kept_until_it_ends() -> None:
    store = ResponseStore(max_responses=1, max_bytes=1000)
    assert store.put(stored("1", 600))
    earlier, previous = store.find("", References("1"))
    assert earlier.history == (b"[]", b"[{}]")
    assert previous is not None
    assert store.put(stored("2", 10))
    assert store.n_bytes == 604 + 14
    assert not store.put(stored("3", 900)), "the first is in use"
    assert store.put(StoredResponse("", "4", b"b", b"[]", {}, previous))
    store.release(previous)
    assert store.get("", "4").input_lists() == [b"[]", b"[{}]", b"[]"]
    assert store.n_bytes == 604 + 3
    store.delete("", "4")
    assert (len(store), store.n_bytes) == (0, 0)


def test_the_limits_hold_whatever_is_done() -> None:
    chance = random.Random(5)
    store = ResponseStore(max_responses=8, max_bytes=3000)
    held: list[StoredResponse | None] = []
    names: list[str] = []
    for i in range(3000):
        previous = None
        if names and chance.random() < 0.7:
            try:
                _, previous = store.find("", References(chance.choice(names[-12:])))
            except NotFoundError:
                continue
        held.append(previous)
        if len(held) > 3 or chance.random() < 0.5:
            each = held.pop(chance.randrange(len(held)))
            body, output = b"b" * chance.randrange(900), {f"i{i}": b"{}"}
            if store.put(StoredResponse("", f"r{i}", body, b"[]", output, each)):
                names.append(f"r{i}")
                assert len(store.get("", f"r{i}").history()) % 2 == 0
            if each is not None:
                store.release(each)
        if names and chance.random() < 0.1:
            delete(store, names[-1])
        assert len(store) <= 8
        assert store.n_bytes <= 3000
    for each in held:
        if each is not None:
            store.release(each)
    for name in names:
        delete(store, name)
    assert (len(store), store.n_bytes) == (0, 0)
