"""Sessions over HTTP: three ways to name them, their fields in replies, and dropping them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_backend import FakeBackend

HELLO = "Hello, this is the first message of a conversation. " * 3
NATIVE, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"


@pytest.fixture
async def server(start: Any) -> Any:
    return await start(backend=FakeBackend(n_ctx=4096, n_slots=2, n_reserved=6))


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": HELLO, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}


async def outcome(server: Any, headers: dict[str, str] | None = None, **fields: Any) -> str | None:
    status, reply = await server.post(NATIVE, body(**fields), headers=headers or {})
    assert status == 200, reply
    return reply["cache"]["session_match"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"session_id": "mine"}),
        ({"X-Session-ID": "mine"}, {}),
        ({}, {"prompt_cache_key": "mine"}),
        ({"X-Session-ID": "other"}, {"session_id": "mine"}),
        ({"X-Session-ID": "mine"}, {"prompt_cache_key": "other"}),
    ],
)
async def test_a_session_can_be_named_in_three_ways(
    server: Any, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    assert await outcome(server, headers, **fields) == "new"
    assert await outcome(server, session_id="mine") == "tokens"
    assert await outcome(server, session_id="other") == "new"


@pytest.mark.parametrize(
    ("headers", "fields"),
    [({}, {}), ({"X-Session-ID": ""}, {}), ({}, {"prompt_cache_key": "", "session_id": None})],
)
async def test_a_request_without_a_name_has_no_session(
    server: Any, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    assert await outcome(server, headers, **fields) is None


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"X-Session-ID": "x" * 257}, {}, "X-Session-ID"),
        ({}, {"session_id": "x" * 257}, "session_id"),
        ({}, {"session_id": 5}, "session_id"),
        ({}, {"prompt_cache_key": ["x"]}, "prompt_cache_key"),
    ],
)
async def test_invalid_session_names_are_refused(
    server: Any, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    status, reply = await server.post(NATIVE, body(**fields), headers=headers)
    assert (status, reply["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
async def test_every_reply_says_where_its_prompt_came_from(server: Any, path: str) -> None:
    asked = body(session_id="mine")
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
    first = (await server.ok(path, asked))["cache"]
    assert first["computed"] > 100
    assert first | {"computed": 0} == {
        **{"cells": 0, "ram": 0, "disk": 0, "computed": 0, "miss": "cold", "diverged_at": None},
        **{"session_match": "new", "approximate_tokens": 0},
    }
    *_, last = [event for event in await server.stream(path, asked) if isinstance(event, dict) and "cache" in event]
    assert (last["cache"]["computed"], last["cache"]["miss"]) == (1, None)
    assert last["cache"]["cells"] == first["computed"] - 1


async def test_a_request_with_several_prompts_has_no_session(server: Any) -> None:
    reply = await server.ok(NATIVE, body(prompt=["a", "b"], session_id="mine"))
    assert [each["cache"]["session_match"] for each in reply] == [None, None]


async def test_a_session_is_deleted_once(server: Any) -> None:
    await outcome(server, session_id="mine/of 1")
    async with server.session.delete(server.url + "/sessions/mine/of%201") as response:
        assert response.status == 200
        reply = await response.json()
    assert reply.pop("dropped_tokens") > 100
    assert reply == {"id": "mine/of 1", "deleted": True, "dropped_ram_tokens": 0, "dropped_disk_tokens": 0}
    async with server.session.delete(server.url + "/sessions/mine/of%201") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")


async def test_a_session_belongs_to_its_namespace(start: Any) -> None:
    server = await start(
        backend=FakeBackend(n_ctx=4096, n_slots=2, n_reserved=6),
        api_keys=("one", "two"),
        cache_salt_from_api_key=True,
    )
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    assert await outcome(server, one, session_id="mine") == "new"
    assert await outcome(server, two, session_id="mine") == "new"
    assert await outcome(server, one, session_id="mine", cache_salt="s") == "new"
    for headers, salt in ((two, {}), (one, {}), (one, {"cache_salt": "s"})):
        async with server.session.delete(server.url + "/sessions/mine", headers=headers, json=salt) as response:
            assert response.status == 200, await response.text()
    async with server.session.delete(server.url + "/sessions/mine", headers=one) as response:
        assert response.status == 404
    async with server.session.delete(server.url + "/sessions/mine") as response:
        assert response.status == 401


async def test_the_cache_and_the_metrics_count_sessions(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=4096, n_slots=2, n_reserved=6), metrics=True)
    reply = await server.ok(NATIVE, body(session_id="mine"))
    await server.ok(NATIVE, body(session_id="mine", prompt=HELLO + reply["content"] + "</s>more"))
    _, cache = await server.get("/cache")
    assert cache["sessions"]["known"] == 1
    assert cache["sessions"]["bytes"] > len(HELLO)
    assert cache["requests"]["in_session"] == 1
    assert cache["miss_reasons"] == {"cold": 1}
    async with server.session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    assert "llamaslot_sessions 1.0" in lines
    assert "llamaslot_prefix_cache_session_requests_total 1.0" in lines
    assert 'llamaslot_prefix_cache_miss_reason_requests_total{reason="cold"} 1.0' in lines
