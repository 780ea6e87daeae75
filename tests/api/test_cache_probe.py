"""`POST /cache/probe`: it says what a request then finds, and runs nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from llamaslot.backend.llama import self_test
from llamaslot.base.model import StateKind
from tests.fake_backend import FakeBackend

CHAT = "/v1/chat/completions"
LONG = "Tell me all that you know about the history of the city. " * 6
MESSAGES = [{"role": "system", "content": LONG}, {"role": "user", "content": "Begin."}]


async def agree(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The probe of a body, which must be what the request itself reports."""
    await server.idle()
    probe = await server.ok("/cache/probe", body)
    reply = await server.ok(path, {**body, "max_tokens": 2})
    cache = reply["cache"]
    for name in ("cells", "ram", "disk", "computed", "miss", "diverged_at", "session_match", "approximate_tokens"):
        # A short reply may end before the place where its prompt departs is found.
        assert probe[name] == cache[name] or (name == "diverged_at" and cache[name] is None), name
    usage = reply["usage"]
    assert (
        probe["prompt_tokens"]
        == usage["prompt_tokens"]
        == sum(probe[each] for each in ("cells", "ram", "disk", "computed"))
    )
    return probe


async def test_a_probe_says_what_the_request_then_finds(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=4096, n_slots=1))
    assert (await agree(server, CHAT, {"messages": MESSAGES}))["miss"] == "cold"
    assert (await agree(server, CHAT, {"messages": MESSAGES}))["computed"] == 1
    other = [MESSAGES[0], {"role": "user", "content": "Never mind."}]
    assert (await agree(server, CHAT, {"messages": other}))["miss"] == "diverged"
    assert (await agree(server, "/v1/completions", {"prompt": LONG}))["miss"] in {"cold", "diverged"}
    assert (await agree(server, CHAT, {"messages": MESSAGES, "cache_prompt": False}))["miss"] == "off"
    assert (await agree(server, CHAT, {"messages": MESSAGES, "cache_salt": "s"}))["miss"] == "salted"
    session = {"messages": MESSAGES, "session_id": "mine"}
    assert (await agree(server, CHAT, session))["session_match"] == "new"
    assert (await agree(server, CHAT, session))["session_match"] in {"exact", "tokens"}


@pytest.mark.parametrize("kind", [StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID])
async def test_a_probe_agrees_where_a_prompt_continues_from_a_checkpoint(start: Any, kind: StateKind) -> None:
    server = await start(backend=FakeBackend(n_ctx=4096, n_slots=1, kind=kind), engine={"checkpoint_bytes": 10**6})
    assert (await agree(server, CHAT, {"messages": MESSAGES}))["miss"] == "cold"
    assert (await agree(server, CHAT, {"messages": MESSAGES}))["cells"] > 300
    others = [[MESSAGES[0], {"role": "user", "content": text}] for text in ("Never mind.", "Now this.", "Or that.")]
    probes = [await agree(server, CHAT, {"messages": other}) for other in others]
    assert probes[-1]["cells"] > 300


async def test_a_probe_finds_nothing_while_the_self_test_is_pending(start: Any) -> None:
    backend = FakeBackend(n_ctx=4096, n_slots=1, kind=StateKind.HYBRID)
    backend.info = msgspec.structs.replace(backend.info, self_test="pending")
    backend.run_self_test = lambda should_stop=lambda: False: False  # type: ignore[method-assign]
    server = await start(backend=backend, engine={"checkpoint_bytes": 10**6})
    for _ in range(2):
        assert (await agree(server, CHAT, {"messages": MESSAGES}))["miss"] == "self_test_pending"


@pytest.mark.parametrize("outcome", ["pending", "failed"])
async def test_a_reply_names_the_flag_that_overrides_the_self_test(start: Any, outcome: Any) -> None:
    """Also if it failed at start, after which the model keeps no checkpoints."""
    backend = FakeBackend(n_ctx=4096, n_slots=1, kind=StateKind.HYBRID)
    backend.info = self_test.applied(backend.info, self_test.SelfTestResult(outcome))
    backend.run_self_test = lambda should_stop=lambda: False: False  # type: ignore[method-assign]
    server = await start(backend=backend, engine={"checkpoint_bytes": 10**6})
    flag = "--reuse-self-test on"
    for path, body in (
        (CHAT, {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": LONG}),
        ("/completion", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
    ):
        cache = (await server.ok(path, body | {"max_tokens": 1}))["cache"]
        assert (cache["miss"], cache["miss_flag"]) == (f"self_test_{outcome}", flag)
    assert (await server.ok("/cache/probe", {"messages": MESSAGES}))["miss"] == f"self_test_{outcome}"
    server = await start(backend=FakeBackend(n_ctx=4096))
    assert "miss_flag" not in (await server.ok(CHAT, {"messages": MESSAGES, "max_tokens": 1}))["cache"]


async def test_a_probe_runs_nothing_and_keeps_nothing(start: Any) -> None:
    backend = FakeBackend(n_ctx=4096)
    server = await start(backend=backend)
    for _ in range(3):
        assert (await server.ok("/cache/probe", {"messages": MESSAGES}))["computed"] > 300
    assert (await server.idle()).n_decode_calls == 0
    # The prompt is released once the reply is sent.
    async with asyncio.timeout(10):
        while server.local.prompts.n_kept:
            await asyncio.sleep(0.01)
    _, cache = await server.get("/cache")
    assert cache["cells"]["used"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"prompt": "a", "session_id": 5}, "session_id"),
    ],
    ids=str,
)
async def test_wrong_bodies_are_refused_by_field(server: Any, body: dict[str, Any], param: str) -> None:
    status, reply = await server.post("/cache/probe", body)
    assert (status, reply["error"]["param"]) == (400, param)
    assert server.local.prompts.n_kept == 0


async def test_a_prompt_that_is_too_long_is_refused(server: Any) -> None:
    status, reply = await server.post("/cache/probe", {"prompt": "x" * 100_000})
    assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")
