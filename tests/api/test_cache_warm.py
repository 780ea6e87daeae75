"""`POST /cache/warm`: later requests find what was computed, and what is pinned stays."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from llamaslot.backend.llama import self_test
from llamaslot.base.model import StateKind
from llamaslot.kvcache import pins
from tests.fake_backend import FakeBackend

CHAT = "/v1/chat/completions"
LONG = "Tell me all that you know about the history of the city. " * 6
SYSTEM = {"role": "system", "content": LONG}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def cached(server: Any, path: str, body: dict[str, Any]) -> int:
    """Tokens that a request finds."""
    reply = await server.ok(path, {**body, "max_tokens": 2, "max_output_tokens": 2})
    usage = reply["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


BODIES = {
    "chat": (CHAT, {"messages": [SYSTEM]}, {"messages": [SYSTEM, question("Begin.")]}),
    "tools": (
        CHAT,
        {"messages": [SYSTEM], "tools": [TOOL]},
        {"messages": [SYSTEM, question("Begin.")], "tools": [TOOL]},
    ),
    "messages": (
        "/v1/messages",
        {"system": LONG, "messages": [], "max_tokens": 9},
        {"system": LONG, "messages": [question("Begin.")]},
    ),
    "responses": ("/v1/responses", {"instructions": LONG, "input": []}, {"instructions": LONG, "input": "Begin."}),
    "text": ("/v1/completions", {"prompt": LONG}, {"prompt": LONG + "And then?"}),
    "whole": (CHAT, {"messages": [SYSTEM, question("Begin.")]}, {"messages": [SYSTEM, question("Begin.")]}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_later_request_finds_all_that_was_warmed(start: Any, name: str) -> None:
    server = await start(backend=FakeBackend(n_ctx=4096))
    path, body, later = BODIES[name]
    # What is about the reply has no effect.
    ignored = {"stream": True, "n": 1, "stop": ["e"], "temperature": 1.5, "session_id": "s"}
    warmed = await server.ok("/cache/warm", {**body, **ignored})
    assert warmed == {
        "tokens": warmed["tokens"],
        "cached": 0,
        "computed": warmed["tokens"],
        "pinned": False,
    }
    assert warmed["tokens"] > len(LONG) - 2
    assert await cached(server, path, later) == warmed["tokens"] - (name == "whole")
    again = await server.ok("/cache/warm", body)
    assert (again["tokens"], again["cached"], again["computed"]) == (warmed["tokens"], warmed["tokens"] - 1, 1)
    state = await server.idle()
    assert state.cache.sessions.known == 0


async def test_a_conversation_is_warmed_up_to_the_next_question(server: Any) -> None:
    history = [SYSTEM, question("Begin."), {"role": "assistant", "content": "It began."}]
    warmed = await server.ok("/cache/warm", {"messages": history})
    assert await cached(server, CHAT, {"messages": [*history, question("Go on.")]}) == warmed["tokens"]


async def test_a_probe_takes_the_bodies_of_all_apis(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=4096))
    for _, body, later in BODIES.values():
        await server.ok("/cache/warm", body)
        assert (await server.ok("/cache/probe", later))["computed"] < 40


@pytest.mark.parametrize("kind", [StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID])
async def test_models_with_checkpoints_continue_from_what_was_warmed(start: Any, kind: StateKind) -> None:
    server = await start(backend=FakeBackend(n_ctx=4096, n_slots=2, kind=kind), engine={"checkpoint_bytes": 10**6})
    warmed = await server.ok("/cache/warm", {"messages": [SYSTEM], "pin": True})
    for text in ("Begin.", "And you?", "Never mind."):
        assert await cached(server, CHAT, {"messages": [SYSTEM, question(text)]}) > warmed["tokens"] - 40


async def test_warming_is_a_request_with_the_limits_of_one(start: Any) -> None:
    backend = FakeBackend(n_ctx=4096, n_slots=1)
    server = await start(backend=backend, max_queue=0)
    stream = asyncio.create_task(
        server.post(CHAT, {"messages": [question("Hi")], "max_tokens": 4000, "ignore_eos": True})
    )
    await server.state_where(lambda state: any(slot.request_id for slot in state.slots))
    status, reply = await server.post("/cache/warm", {"messages": [SYSTEM]})
    assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
    stream.cancel()
    await server.idle()
    warmed = await server.ok("/cache/warm", {"messages": [SYSTEM], "cache_salt": "pepper"})
    body = {"messages": [SYSTEM, question("Begin.")]}
    assert await cached(server, CHAT, {**body, "cache_salt": "pepper"}) == warmed["tokens"]
    assert await cached(server, CHAT, body) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [SYSTEM], "pin": "yes"}, "pin"),
        ({"messages": [SYSTEM], "cache_prompt": False}, "cache_prompt"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [], "system": 5}, "system"),
        ({"input": [], "instructions": ""}, "input"),
    ],
    ids=str,
)
async def test_wrong_bodies_are_refused_by_field(server: Any, body: dict[str, Any], param: str) -> None:
    status, reply = await server.post("/cache/warm", body)
    assert (status, reply["error"]["param"]) == (400, param), reply
    assert server.local.prompts.n_kept == 0


async def test_a_model_of_which_nothing_is_reused_is_not_warmed(start: Any) -> None:
    backend = FakeBackend(n_ctx=4096, n_slots=1, kind=StateKind.HYBRID)
    backend.info = self_test.applied(backend.info, self_test.SelfTestResult("failed"))
    server = await start(backend=backend, engine={"checkpoint_bytes": 10**6})
    status, reply = await server.post("/cache/warm", {"messages": [SYSTEM]})
    assert (status, reply["error"]["type"]) == (501, "not_supported_error")


async def fill(server: Any, n: int) -> None:
    """Fill the pool with other prompts."""
    for i in range(n):
        await server.ok("/v1/completions", {"prompt": f"{i}. " + "x" * 250, "max_tokens": 2})


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
async def test_a_pinned_prompt_outlasts_all_others(start: Any, ram_bytes: int) -> None:
    engine = {"ram_bytes": ram_bytes} if ram_bytes else {}
    server = await start(backend=FakeBackend(n_ctx=1024, n_slots=2), engine=engine)
    prompt, other = "p" * 400, "q" * 200
    assert (await server.ok("/cache/warm", {"prompt": prompt, "pin": True}))["pinned"]
    await server.ok("/cache/warm", {"prompt": other})
    await fill(server, 8)
    assert (await server.ok("/cache/probe", {"prompt": prompt}))["computed"] == 1
    assert ram_bytes or (await server.ok("/cache/probe", {"prompt": other}))["computed"] > 100
    # A request that needs all cells still gets them.
    await server.ok("/v1/completions", {"prompt": "z" * 900, "max_tokens": 100, "ignore_eos": True})
    _, state = await server.get("/cache")
    assert (state["pins"]["prefixes"], state["pins"]["max_tokens"]) == (1, 512)
    await server.ok("/cache/warm", {"prompt": prompt, "pin": False})
    _, state = await server.get("/cache")
    assert state["pins"]["prefixes"] == 0
    if not ram_bytes:
        await fill(server, 8)
        assert (await server.ok("/cache/probe", {"prompt": prompt}))["computed"] > 100


async def test_the_cache_lists_what_is_pinned_until_it_is_cleared(server: Any) -> None:
    await server.ok("/cache/warm", {"prompt": "p" * 200, "pin": True})
    await server.ok("/v1/completions", {"prompt": "p" * 200 + " and more", "max_tokens": 1})
    await server.ok("/v1/completions", {"prompt": "q" * 100, "max_tokens": 1})
    _, state = await server.get("/cache")
    found = {prefix["tokens"]: prefix["evicted_last"] for prefix in state["prefixes"]}
    # BOS, then what continues the pinned prompt in the same slot, and the other one.
    assert found == {1: True, 210: True, 101: False}
    assert state["pins"] == {"prefixes": 1, "tokens": 201, "max_tokens": 512}
    await server.ok("/cache/clear", None)
    _, state = await server.get("/cache")
    assert (state["pins"]["prefixes"], state["cells"]["used"]) == (0, 0)


async def test_pins_are_bounded(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "MAX_PINS", 3)
    server = await start(backend=FakeBackend(n_ctx=1024, n_slots=4))
    bodies = [{"prompt": f"{i}. " + "p" * 50, "pin": True} for i in range(9)]
    statuses = [
        status for status, _ in await asyncio.gather(*(server.post("/cache/warm", each) for each in bodies))
    ]
    assert sorted(statuses) == [200] * 3 + [400] * 6
    # One that is pinned already is no further one.
    first = bodies[statuses.index(200)]
    assert (await server.ok("/cache/warm", first))["pinned"]
    status, reply = await server.post("/cache/warm", bodies[statuses.index(400)])
    assert (status, reply["error"]["param"]) == (400, "pin")
    await server.ok("/cache/warm", {**first, "pin": False})
    status, reply = await server.post("/cache/warm", {"prompt": "p" * 450, "pin": True})
    assert (status, reply["error"]["param"]) == (400, "pin")
    assert "the limit is 512" in reply["error"]["message"]
    assert (await server.ok("/cache/warm", {"prompt": "p" * 450}))["pinned"] is False


async def test_only_administrators_pin(start: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("chief admin\nother user\n")
    server = await start(api_key_file=str(keys))
    body = {"messages": [question("Hi" * 20), {"role": "assistant", "content": "Yes"}]}
    allowed = ("other", None), ("chief", True), ("chief", False)
    for key, pin in (*allowed, ("other", True), ("other", False)):
        headers = {"Authorization": f"Bearer {key}"}
        status, _ = await server.post("/cache/warm", {**body, "pin": pin}, headers=headers)
        assert status == (200 if (key, pin) in allowed else 403)


async def test_a_prompt_that_is_isolated_is_not_pinned(start: Any) -> None:
    """Its KV was not trusted, and is private."""
    backend = FakeBackend(n_ctx=1024, n_slots=1)
    backend.info = msgspec.structs.replace(backend.info, self_test="pending", self_test_reason="untested")
    backend.run_self_test = lambda should_stop=lambda: False: False  # type: ignore[method-assign]
    server = await start(backend=backend)
    status, _ = await server.post("/cache/warm", {"prompt": "p" * 100, "pin": True})
    assert status == 501
