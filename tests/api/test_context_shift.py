"""Context shift over HTTP: replies that go on beyond their context say so, where the server is started for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_backend import FakeBackend

BODY = {"prompt": "word " * 30, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "word " * 30}], "ignore_eos": True, "temperature": 0}


async def test_a_reply_goes_on_beyond_its_context(start: Any) -> None:
    server = await start(backend=FakeBackend(n_slots=2, n_ctx=256), context_shift=True, keep=7)
    reply = await server.ok("/completion", {**BODY, "n_predict": 400, "n_discard": 9})
    assert (reply["tokens_predicted"], reply["truncated"], reply["stop_type"]) == (400, True, "limit")
    assert reply["timings"]["predicted_n"] == 400
    assert (reply["generation_settings"]["n_keep"], reply["generation_settings"]["n_discard"]) == (7, 9)
    within = await server.ok("/completion", {**BODY, "n_predict": 20, "n_keep": -1})
    assert (within["truncated"], within["generation_settings"]["n_keep"]) == (False, -1)
    assert within["content"] == reply["content"][:20]
    chat = await server.ok("/v1/chat/completions", {**CHAT, "max_tokens": 300})
    assert chat["usage"]["completion_tokens"] == 300
    _, cache = await server.get("/cache")
    assert cache["context_shifts"] >= 2
    _, props = await server.get("/props")
    assert props["default_generation_settings"]["params"]["n_keep"] == 7


async def test_ollamas_name_of_the_tokens_to_keep(start: Any) -> None:
    server = await start(backend=FakeBackend(n_slots=1, n_ctx=256), context_shift=True)
    options = {"num_predict": 300, "num_keep": 4, "ignore_eos": True, "temperature": 0}
    body = {"prompt": BODY["prompt"], "raw": True, "stream": False, "options": options}
    reply = await server.ok("/api/generate", body)
    assert reply["eval_count"] == 300
    native = await server.ok("/completion", {**BODY, "n_predict": 300, "n_keep": 4})
    assert reply["response"] == native["content"]


@pytest.mark.parametrize("backend", [{}, {"can_trim": False}])
async def test_where_it_is_off_or_impossible_a_full_context_ends_it(start: Any, backend: dict[str, Any]) -> None:
    server = await start(backend=FakeBackend(n_slots=1, n_ctx=256, **backend), context_shift=bool(backend))
    reply = await server.ok("/completion", {**BODY, "n_predict": 400})
    assert reply["tokens_evaluated"] + reply["tokens_predicted"] == 256
    assert (reply["truncated"], reply["stop_type"]) == (True, "limit")
    short = await server.ok("/completion", {**BODY, "n_predict": 64})
    assert (short["tokens_predicted"], short["truncated"]) == (64, False)


async def test_a_prompt_that_does_not_fit_is_refused_as_before(start: Any) -> None:
    server = await start(backend=FakeBackend(n_slots=1, n_ctx=256), context_shift=True)
    status, reply = await server.post("/completion", {"prompt": "x" * 300, "n_predict": 4})
    assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")


async def test_each_api_says_that_the_limit_of_tokens_ended_the_reply(start: Any) -> None:
    server = await start(backend=FakeBackend(n_slots=1, n_ctx=256), context_shift=True)
    messages = {"messages": CHAT["messages"], "temperature": 0, "ignore_eos": True}
    chat = await server.ok("/v1/chat/completions", {**messages, "max_tokens": 300})
    assert (chat["choices"][0]["finish_reason"], chat["usage"]["completion_tokens"]) == ("length", 300)
    text = await server.ok("/v1/completions", {**BODY, "max_tokens": 300})
    assert (text["choices"][0]["finish_reason"], text["usage"]["completion_tokens"]) == ("length", 300)
    message = await server.ok("/v1/messages", {**messages, "max_tokens": 300})
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 300)
    response = await server.ok(
        "/v1/responses", {"input": BODY["prompt"], "max_output_tokens": 300, "temperature": 0, "ignore_eos": True}
    )
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 300)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    options = {"num_predict": 300, "temperature": 0, "ignore_eos": True}
    ollama = await server.ok("/api/chat", {"messages": CHAT["messages"], "options": options, "stream": False})
    assert (ollama["done_reason"], ollama["eval_count"]) == ("length", 300)


@pytest.mark.parametrize("context_shift", [True, False])
async def test_probabilities_beyond_the_context_count_before_the_reply(start: Any, *, context_shift: bool) -> None:
    server = await start(
        backend=FakeBackend(n_slots=1, n_ctx=256), context_shift=context_shift, max_reply_probs=1000
    )
    status, reply = await server.post("/completion", {**BODY, "n_predict": 600, "n_probs": 1})
    if context_shift:
        assert (status, reply["error"]["param"]) == (400, "n_probs")
        assert "would have 1200 probabilities" in reply["error"]["message"]
    else:
        assert (status, reply["stop_type"]) == (200, "limit")
