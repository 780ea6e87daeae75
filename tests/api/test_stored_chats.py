"""Stored chat completions: listed, returned, changed, deleted, evicted, and of one API key only."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.test_tools import CALL, WEATHER, joined, plain, served

CHATS = "/v1/chat/completions"
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
BODY = {"messages": QUESTION, "max_tokens": 4, "ignore_eos": True, "store": True}


async def deleted(server: Any, chat_id: str) -> tuple[int, Any]:
    async with server.session.delete(f"{server.url}{CHATS}/{chat_id}") as reply:
        return reply.status, await reply.json()


async def ids(server: Any, **query: str) -> list[str]:
    status, listed = await server.get(CHATS, params=query)
    assert status == 200, listed
    return [chat["id"] for chat in listed["data"]]


async def test_a_completion_is_stored_as_it_was_returned(server: Any) -> None:
    whole = await server.ok(CHATS, {**BODY, "n": 2, "metadata": {"a": "b"}, "verbose": True})
    assert whole.pop("__verbose")
    assert await server.get(f"{CHATS}/{whole['id']}") == (200, {**whole, "metadata": {"a": "b"}})
    chunks = await server.stream(CHATS, {**BODY, "stream_options": {"include_usage": True}})
    status, stored = await server.get(f"{CHATS}/{chunks[0]['id']}")
    assert (status, stored["object"], stored["metadata"]) == (200, "chat.completion", {})
    assert stored["choices"][0]["message"] == joined(chunks)[0]
    assert (stored["choices"][0]["finish_reason"], stored["usage"]) == ("length", chunks[-2]["usage"])
    unstored = [await server.ok(CHATS, {**BODY, "store": value}) for value in (False, None)]
    assert await ids(server) == [whole["id"], stored["id"]]
    assert (await server.get(f"{CHATS}/{unstored[0]['id']}"))[0] == 404


async def test_a_streamed_call_is_stored_whole(start: Any) -> None:
    server = await served(start, "hermes", f"Let me see.\n{CALL}")
    chunks = await server.stream(CHATS, {"messages": QUESTION, "tools": [WEATHER], "store": True})
    _, stored = await server.get(f"{CHATS}/{chunks[0]['id']}")
    assert plain(stored["choices"][0]["message"]) == plain(joined(chunks)[0])
    assert stored["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_messages_of_a_stored_completion_are_listed(server: Any) -> None:
    parts = [{"type": "text", "text": "Hello"}]
    chat = await server.ok(CHATS, {**BODY, "messages": [QUESTION[0], {"role": "user", "content": parts}]})
    path = f"{CHATS}/{chat['id']}/messages"
    status, listed = await server.get(path)
    system, user = listed["data"]
    assert (status, system) == (200, {**QUESTION[0], "id": system["id"]})
    assert user == {"role": "user", "content": None, "content_parts": parts, "id": user["id"]}
    assert system["id"] != user["id"]
    assert (listed["first_id"], listed["last_id"]) == (system["id"], user["id"])
    _, listed = await server.get(path, params={"order": "desc", "limit": "1"})
    assert (listed["data"], listed["has_more"]) == ([user], True)
    _, listed = await server.get(path, params={"after": system["id"]})
    assert (listed["data"], listed["has_more"]) == ([user], False)


async def test_completions_are_listed_by_page_model_and_metadata(server: Any) -> None:
    labels: list[dict[str, str]] = [{"a": "1", "b": "2"}, {"a": "1"}, {"a": "3"}]
    chats = [(await server.ok(CHATS, {**BODY, "metadata": each}))["id"] for each in labels]
    assert await ids(server) == chats
    assert await ids(server, order="desc", limit="2") == [chats[2], chats[1]]
    assert await ids(server, after=chats[0]) == chats[1:]
    assert await ids(server, limit="0") == []
    assert await ids(server, model="fake.gguf") == chats
    assert await ids(server, model="other") == []
    assert await ids(server, **{"metadata[a]": "1"}) == chats[:2]
    assert await ids(server, **{"metadata[a]": "1", "metadata[b]": "2"}) == chats[:1]
    for query in ({"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "none"}):
        status, reply = await server.get(CHATS, params=query)
        assert (status, reply["error"]["param"]) == (400, next(iter(query)))


async def test_metadata_is_replaced_and_a_deleted_completion_is_gone(server: Any) -> None:
    chat = await server.ok(CHATS, {**BODY, "metadata": {"a": "1"}})
    path = f"{CHATS}/{chat['id']}"
    assert await server.ok(path, {"metadata": {"b": "2"}}) == {**chat, "metadata": {"b": "2"}}
    assert await ids(server, **{"metadata[b]": "2"}) == [chat["id"]]
    assert await deleted(server, chat["id"]) == (
        200,
        {"id": chat["id"], "object": "chat.completion.deleted", "deleted": True},
    )
    assert (await deleted(server, chat["id"]))[0] == 404
    assert (await server.get(path))[0] == (await server.get(f"{path}/messages"))[0] == 404
    assert (await server.post(path, {"metadata": {}}))[0] == 404
    assert await ids(server) == []


@pytest.mark.parametrize("metadata", [{"a": 1}, {"x" * 65: "a"}, {"a": "x" * 513}, "a", ["a"]], ids=str)
async def test_wrong_metadata_is_refused_where_it_would_be_stored(server: Any, metadata: Any) -> None:
    status, reply = await server.post(CHATS, {**BODY, "metadata": metadata})
    assert (status, reply["error"]["param"]) == (400, "metadata")
    assert await server.ok(CHATS, {**BODY, "store": False, "metadata": metadata})
    chat = await server.ok(CHATS, BODY)
    status, reply = await server.post(f"{CHATS}/{chat['id']}", {"metadata": metadata})
    assert (status, reply["error"]["param"].partition("[")[0]) == (400, "metadata"), reply


async def test_the_oldest_completions_are_evicted(start: Any) -> None:
    server = await start(max_stored_responses=2)
    chats = [(await server.ok(CHATS, BODY))["id"] for _ in range(3)]
    assert await ids(server) == chats[1:]
    server = await start(max_stored_responses=0)
    await server.ok(CHATS, BODY)
    assert await ids(server) == []


async def test_stored_bytes_are_limited(start: Any) -> None:
    server = await start(max_stored_responses_bytes=4000)
    for _ in range(6):
        last = (await server.ok(CHATS, BODY))["id"]
    n_small = len(await ids(server))
    assert 1 < n_small < 6
    long = [{"role": "system", "content": "x" * 900}, *QUESTION]
    longer = (await server.ok(CHATS, {**BODY, "messages": long}))["id"]
    assert (await ids(server))[-2:] == [last, longer]
    assert len(await ids(server)) < n_small + 1
    for key in "abcdef":
        await server.ok(f"{CHATS}/{longer}", {"metadata": {f"{key}{i}": "x" * 500 for i in range(2)}})
    assert await ids(server) == [last, longer], "changed metadata replaces the old one's bytes"
    metadata = {str(i): "x" * 512 for i in range(9)}
    await server.ok(CHATS, {**BODY, "metadata": metadata})
    assert await ids(server) == [last, longer], "one that is too large evicts nothing"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"max_stored_responses": 4}, {"max_stored_responses_bytes": 5000}], ids=str)
async def test_no_key_evicts_what_another_stored_within_its_share(start: Any, limit: dict[str, int]) -> None:
    server = await start(api_keys=("one", "two"), **limit)
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    _, chat = await server.post(CHATS, BODY, headers=mine)
    last = [(await server.post(CHATS, BODY, headers=other))[1]["id"] for _ in range(9)][-1]
    for headers, kept in ((mine, chat["id"]), (other, last)):
        assert (await server.get(f"{CHATS}/{kept}", headers=headers))[0] == 200
    listed = (await server.get(CHATS, headers=other))[1]["data"]
    assert 1 < len(listed) < 5


async def test_keys_do_not_see_each_others_completions(start: Any) -> None:
    server = await start(api_keys=("one", "two"))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    _, chat = await server.post(CHATS, BODY, headers=mine)
    path = f"{CHATS}/{chat['id']}"
    for headers, status, n_listed in ((other, 404, 0), (mine, 200, 1)):
        assert len((await server.get(CHATS, headers=headers))[1]["data"]) == n_listed
        assert (await server.get(path, headers=headers))[0] == status
        assert (await server.get(f"{path}/messages", headers=headers))[0] == status
        assert (await server.post(path, {"metadata": {}}, headers=headers))[0] == status
        async with server.session.delete(server.url + path, headers=headers) as reply:
            assert reply.status == status
