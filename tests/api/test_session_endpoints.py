"""Sessions over HTTP: the ways to name them, their fields in replies, branches, and dropping them."""

from __future__ import annotations

import asyncio
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
        ({"x-claude-code-session-id": "mine"}, {"prompt_cache_key": "other"}),
        ({"x-claude-code-session-id": "mine", "x-claude-code-agent-id": ""}, {}),
        ({"session-id": "mine"}, {"prompt_cache_key": "other"}),
        ({"session_id": "mine"}, {}),
        ({"x-opencode-session": "mine"}, {}),
        ({"x-smg-routing-key": "mine"}, {"prompt_cache_key": "other"}),
        ({"x-smg-routing-key": "other", "x-opencode-session": "mine"}, {}),
        ({"x-opencode-session": "other", "X-Session-ID": "mine", "session-id": "other"}, {}),
        ({"X-Session-ID": "", "session-id": "mine"}, {}),
        ({"X-Session-ID": "mine", "x-claude-code-agent-id": "a"}, {}),
    ],
)
async def test_a_session_can_be_named_in_several_ways(
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
        ({"X-Opencode-Session": "x" * 257}, {}, "X-Opencode-Session"),
        (
            {"x-claude-code-session-id": "x" * 200, "x-claude-code-agent-id": "x" * 56},
            {},
            "X-Claude-Code-Session-Id",
        ),
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
        **{"cells": 0, "ram": 0, "disk": 0, "remote": 0, "computed": 0, "miss": "cold", "diverged_at": None},
        **{"session_match": "new", "approximate_tokens": 0, "restored_tokens": 0},
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


async def test_a_sub_agent_of_claude_code_has_a_session_of_its_own(server: Any) -> None:
    main = {"x-claude-code-session-id": "mine"}
    agent = main | {"x-claude-code-agent-id": "a1"}
    assert [await outcome(server, headers) for headers in (main, agent, main, agent)] == [
        "new",
        "new",
        "tokens",
        "tokens",
    ]
    assert await outcome(server, session_id="mine/a1") == "tokens"


MAIN = [
    {"role": "system", "content": "You are a coding agent who answers at length. " * 8},
    {"role": "user", "content": "What does this function do? " * 8},
]
TITLE = [{"role": "system", "content": "Name the conversation in three words."}, MAIN[1]]
SUB_AGENT = [MAIN[0], {"role": "user", "content": "Find all callers of this function. " * 4}]


async def chat(server: Any, messages: list[dict[str, str]], name: str = "mine") -> tuple[str, dict[str, Any]]:
    """The reply, and where the prompt's tokens came from."""
    fields = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "temperature": 0, "session_id": name}
    reply = await server.ok(CHAT, fields)
    return reply["choices"][0]["message"]["content"], reply["cache"]


@pytest.mark.parametrize("others", [[TITLE], [SUB_AGENT], [TITLE, SUB_AGENT, TITLE]])
async def test_requests_of_others_between_two_turns_cost_the_conversation_nothing(
    start: Any, others: list[list[dict[str, str]]]
) -> None:
    """In the one slot, the pool keeps the conversation's KV in a spare sequence, and the session its tokens."""
    server = await start(backend=FakeBackend(n_ctx=4096, n_slots=1, n_reserved=6))
    text, first = await chat(server, MAIN)
    assert first["session_match"] == "new"
    for messages in others:
        _, other = await chat(server, messages)
        assert other["session_match"] == ("tokens" if other["computed"] == 1 else "new")
    turn = [*MAIN, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    text, second = await chat(server, turn)
    assert second["session_match"] == "extend"
    assert second["cells"] >= first["computed"] + 7, "the prompt and the reply but its last token"
    assert second["miss"] is None
    for messages in others:
        _, again = await chat(server, messages)
        assert again["computed"] == 1
    _, third = await chat(server, [*turn, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}])
    assert third["session_match"] == "extend"


async def test_a_session_is_deleted_with_the_kv_of_its_branches(server: Any) -> None:
    for messages in (MAIN, TITLE, SUB_AGENT):
        await chat(server, messages)
    # The last reply is remembered after it was sent.
    async with asyncio.timeout(10):
        while (await server.get("/cache"))[1]["sessions"]["known"] != 3:
            await asyncio.sleep(0.01)
    async with server.session.delete(server.url + "/sessions/mine") as response:
        assert response.status == 200
    _, cache = await server.get("/cache")
    assert cache["sessions"]["known"] == 0
    for messages in (MAIN, TITLE, SUB_AGENT):
        _, again = await chat(server, messages)
        assert again["session_match"] == "new"
        await server.session.delete(server.url + "/sessions/mine")
        assert again["cells"] < 16, "the template's head at most"


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
