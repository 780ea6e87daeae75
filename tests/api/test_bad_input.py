"""Every invalid request gets one error body that names the field, and does not affect other requests."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import pytest

from llamaslot.base.backend import Status
from tests.fake_backend import FakeBackend

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
INVALID = (400, "invalid_request_error")
UNBUILT = (400, "not_supported_error")

SAMPLING = [
    ("temperature", -0.1),
    ("temperature", 1e9),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("top_p", 1.5),
    ("top_p", -1),
    ("min_p", 2),
    ("typical_p", -0.5),
    ("top_k", 1.5),
    ("top_k", -2),
    ("top_k", 10**30),
    ("top_k", 10**400),
    ("top_k", 1e30),
    ("repeat_penalty", 0),
    ("repeat_penalty", 1e-50),
    ("repeat_penalty", 1e300),
    ("repeat_last_n", -2),
    ("presence_penalty", 1e30),
    ("frequency_penalty", -1e30),
    ("seed", "lucky"),
    ("seed", 2**64),
    ("seed", 0.5),
    ("max_tokens", -2),
    ("max_tokens", 2**31),
    ("max_tokens", 2.5),
    ("max_completion_tokens", True),
    ("n_predict", "many"),
    ("n", 0),
    ("n", -1),
    ("n", 10**6),
    ("n", 1.5),
    ("stop", 5),
    ("stop", {"word": "x"}),
    ("stop", ["x"] * 1000),
    ("stream", "yes"),
    ("stream_options", 1),
    ("cache_prompt", 1),
    ("speculate", "auto"),
    ("id_slot", 4),
    ("id_slot", -2),
    ("lora", [{"id": 0, "scale": 1}]),
    ("ignore_eos", "no"),
    ("logit_bias", 5),
    ("logit_bias", [[258, 1]]),
    ("logit_bias", {"1000000000": 1}),
    ("logit_bias", {"65": True}),
    ("logit_bias", {"65": "x"}),
    ("response_format", {"type": "sound"}),
]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize(("field", "value"), SAMPLING, ids=str)
async def test_a_wrong_value_is_refused_by_field(server: Any, path: str, field: str, value: Any) -> None:
    body = {**HELLO, "prompt": "Hello", field: value}
    await expect(server, path, body, INVALID, "response_format.type" if field == "response_format" else field)


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({}, INVALID, "messages"),
        ({"messages": None}, INVALID, "messages"),
        ({"messages": []}, INVALID, "messages"),
        ({"messages": "Hello"}, INVALID, "messages"),
        ({"messages": ["Hello"]}, INVALID, "messages[0]"),
        ({"messages": [{"content": "Hello"}]}, INVALID, "messages[0].role"),
        ({"messages": [{"role": "pope", "content": "Hello"}]}, INVALID, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "Hello"}]}, INVALID, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, INVALID, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, INVALID, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            INVALID,
            "messages[0].content[0].image_url",
        ),
        ({"messages": HELLO["messages"], "chat_template_kwargs": []}, INVALID, "chat_template_kwargs"),
        ({"messages": HELLO["messages"], "continue_final_message": True}, INVALID, "continue_final_message"),
        (
            {"messages": HELLO["messages"], "continue_final_message": True, "add_generation_prompt": True},
            INVALID,
            "continue_final_message",
        ),
    ],
)
async def test_a_wrong_conversation_is_refused_by_field(
    server: Any, body: Any, kind: tuple[int, str], param: str
) -> None:
    await expect(server, CHAT, body, kind, param)
    await expect(server, "/apply-template", body, kind, param)


@pytest.mark.parametrize("path", [TEXT, NATIVE])
@pytest.mark.parametrize(
    ("prompt", "kind", "param"),
    [
        (None, INVALID, "prompt"),
        (5, INVALID, "prompt"),
        ([], INVALID, "prompt"),
        ([[]], INVALID, "prompt[0]"),
        (["a", []], INVALID, "prompt[1]"),
        ([1.5], INVALID, "prompt[0]"),
        ([-1], INVALID, "prompt[0]"),
        ([258], INVALID, "prompt"),
        ([2**31], INVALID, "prompt[0]"),
        ([1, ["a"]], INVALID, "prompt"),
        ([1, "a", None], INVALID, "prompt[2]"),
        ({"text": "a"}, INVALID, "prompt.prompt_string"),
        ({"prompt_string": "a", "multimodal_data": ["AAAA"]}, UNBUILT, "prompt.multimodal_data[0]"),
    ],
    ids=str,
)
async def test_a_wrong_prompt_is_refused_by_field(
    server: Any, path: str, prompt: Any, kind: tuple[int, str], param: str
) -> None:
    await expect(server, path, {"prompt": prompt}, kind, param)


@pytest.mark.parametrize("path", [CHAT, NATIVE])
async def test_best_of_is_for_openais_completions(server: Any, path: str) -> None:
    await expect(server, path, {**HELLO, "prompt": "Hello", "best_of": 2}, UNBUILT, "best_of")


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("suffix", "the end"),
        ("samplers", ["top_k", "infill"]),
        ("samplers", "ki"),
        ("modalities", ["text", "audio"]),
        ("moderation", {"model": "m", "policy": {"input": {"mode": "score"}, "output": {"mode": "block"}}}),
    ],
)
async def test_an_unsupported_feature_is_refused_by_field(server: Any, path: str, field: str, value: Any) -> None:
    await expect(server, path, {**HELLO, "prompt": "Hello", field: value}, UNBUILT, field)


async def test_fields_that_leave_a_reply_as_it_is_are_accepted(server: Any) -> None:
    scored = {"model": "m", "policy": {"input": {"mode": "score"}, "output": None}}
    more = {
        "functions": [{"name": "f"}], "function_call": "none", "modalities": ["text"], "moderation": scored,
        "audio": {"format": "wav", "voice": "x"}, "metadata": {"a": 1}, "user": "u", "safety_identifier": "s",
        "service_tier": "flex", "verbosity": "low", "prediction": {"type": "content", "content": "x"},
        "prompt_cache_retention": "24h", "web_search_options": {"search_context_size": "low"},
    }  # fmt: skip
    fields = {"max_tokens": 4, "temperature": 0}
    plain, given = [await server.ok(CHAT, {**HELLO, **fields, **each}) for each in ({}, more)]
    assert given["choices"] == plain["choices"]
    assert given["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": ["a", 999]}, "content"),
        ("/tokenize", {"content": "a", "with_pieces": "yes"}, "with_pieces"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [65, 258]}, "tokens"),
        ("/detokenize", {"tokens": [65, -1]}, "tokens[1]"),
    ],
)
async def test_wrong_token_ids_are_refused(server: Any, path: str, body: Any, param: str) -> None:
    await expect(server, path, body, INVALID, param)


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0", b"{", b"nonsense", "{}".encode("utf-16"), b'{"prompt": NaN}', b'{"prompt": "\xff"}',
     b'{"prompt": "\\ud800"}', b"[]", b'"a"', b'{"prompt": "a"} trailing',
     b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    ids=lambda raw: raw[:20],
)  # fmt: skip
@pytest.mark.parametrize("path", [TEXT, NATIVE])
async def test_a_body_that_is_not_a_json_object_is_refused(server: Any, path: str, raw: bytes) -> None:
    async with server.session.post(server.url + path, data=raw) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (400, 400, "invalid_request_error")
        assert "body" in error["message"]


DEEP = "a value of any depth"
FUNCTION = {"name": "f", "parameters": DEEP, "input_schema": DEEP}
TOOL = {**FUNCTION, "function": FUNCTION}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": DEEP}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": DEEP}


PLACES = pytest.mark.parametrize(
    ("path", "fields"),
    [
        *[(path, {"tools": [{**TOOL, "type": "function"}]}) for path in (CHAT, "/apply-template", "/cache/probe")],
        ("/v1/messages", {"tools": [TOOL]}),
        ("/v1/responses", {"tools": [{**TOOL, "type": "function"}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}, *HELLO["messages"]]}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [USE]}, *HELLO["messages"]]}),
    ],
    ids=str,
)
"""Places of the value in bodies, by path."""


@pytest.mark.slow
@PLACES
async def test_tools_and_arguments_of_any_depth_are_taken_or_refused(
    server: Any, path: str, fields: dict[str, Any]
) -> None:
    """Each of the functions that handle them ends at another depth."""
    body = json.dumps({**HELLO, "input": "x", **fields})
    statuses = set()
    for depth in range(900, 1000):
        data = body.replace(json.dumps(DEEP), '{"a":' * depth + "1" + "}" * depth).encode()
        async with server.session.post(server.url + path, data=data) as response:
            statuses.add(response.status)
            assert response.status in (200, 400), (depth, await response.text())
    assert 400 in statuses


@PLACES
@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400], ids=("large", "negative", "huge"))
async def test_tools_and_arguments_may_have_integers_of_any_size(
    server: Any, path: str, fields: dict[str, Any], number: int
) -> None:
    data = json.dumps({**HELLO, "input": "x", "max_tokens": 4, **fields})
    data = data.replace(json.dumps(DEEP), json.dumps({"type": "object", "properties": {"a": {"const": number}}}))
    async with server.session.post(server.url + path, data=data.encode()) as response:
        assert response.status in (200, 400), await response.text()
        assert response.status == 200 or number == 10**400, await response.text()


async def test_a_body_with_a_wrong_content_encoding_is_refused(server: Any) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with server.session.post(server.url + TEXT, data=b'{"prompt": "a"}', headers=headers) as response:
        assert response.status == 415
        assert (await response.json())["error"]["type"] == "unsupported_media_type_error"


async def test_error_messages_are_sentences(server: Any) -> None:
    async def message(**fields: Any) -> str:
        return (await server.post(CHAT, {**HELLO, **fields}))[1]["error"]["message"]

    assert await message(temperature="hot") == "'temperature': expected a number or null, got a string"
    assert await message(top_p=1.5) == "'top_p': expected a number <= 1.0"
    assert (await server.post(CHAT, {}))[1]["error"]["message"] == "'messages' is required"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(start: Any, stream: bool) -> None:
    server = await start(backend=FakeBackend(n_ctx=64, n_slots=1))
    status, reply = await server.post(TEXT, {"prompt": "x" * 100, "stream": stream})
    error = reply["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (101, 64)


async def test_the_refusal_of_one_prompt_refuses_the_request(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=64, n_slots=1))
    for text in ("x" * 100, "x" * 9999, [1] * 100):
        status, reply = await server.post(TEXT, {"prompt": ["fits", text], "ignore_eos": True})
        assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")
        assert reply["error"]["param"] == "prompt[1]"
    await server.idle()


async def test_a_body_over_the_limit_is_refused(start: Any) -> None:
    server = await start(max_body_bytes=1000)
    status, reply = await server.post(TEXT, {"prompt": "x" * 2000})
    assert (status, reply["error"]["type"]) == (413, "request_too_large_error")
    await server.ok(TEXT, {"prompt": "x" * 500, "max_tokens": 1})


async def test_the_number_of_biases_is_limited(start: Any) -> None:
    server = await start(max_logit_bias_entries=3)
    for entries in ({"a": 1, "b": 1, "c": 1}, [["a", 1], [5, 1], ["c", 1]]):
        await server.ok(NATIVE, {"prompt": "x", "n_predict": 1, "logit_bias": entries})
    for entries in ({"a": 1, "b": 1, "c": 1, "d": 1}, [["a", 1]] * 4):
        status, reply = await server.post(NATIVE, {"prompt": "x", "logit_bias": entries})
        assert (status, reply["error"]["param"]) == (400, "logit_bias")
        assert "--max-logit-bias-entries" in reply["error"]["message"]


async def test_a_million_prompts_are_refused_before_they_are_looked_at(start: Any) -> None:
    server = await start(max_queue=2)
    prompts = ["x"] * 6
    await server.ok(TEXT, {"prompt": prompts, "max_tokens": 1})
    body = io.BytesIO(json.dumps({"prompt": ["x"] * 1_000_000}).encode())
    started = time.process_time()
    async with server.session.post(server.url + TEXT, data=body) as response:
        assert response.status == 400
    assert time.process_time() - started < 2
    await server.idle()


async def test_a_full_queue_is_answered_with_retry_after(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=1), max_queue=1)
    endless = {"prompt": "x", "ignore_eos": True}
    running = [asyncio.create_task(server.post(NATIVE, endless)) for _ in range(2)]
    try:
        await server.state_where(lambda state: state.n_queued == 1)
        async with server.session.post(server.url + NATIVE, json=endless) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (429, "rate_limit_error")
            assert int(response.headers["Retry-After"]) >= 1
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    await server.idle()
    await server.ok(NATIVE, {"prompt": "x", "max_tokens": 1})


async def test_a_request_whose_choices_exceed_the_queue_starts_none(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=1), max_queue=2, metrics=True)
    running = asyncio.create_task(server.post(NATIVE, {"prompt": "x", "ignore_eos": True}))
    await server.state_where(lambda state: state.slots[0].n_generated > 0)
    for path, body, status in (
        (TEXT, {"prompt": ["x", "y"], "n": 2}, 400),
        (NATIVE, {"prompt": ["x"] * 1000, "n": 128}, 400),
        (TEXT, {"prompt": "x", "n": 3}, 429),
        (NATIVE, {"prompt": ["x", "y", "z"]}, 429),
    ):
        assert (await server.post(path, body))[0] == status
        assert server.service.capacity.n_in_flight == 1
        async with server.session.get(server.url + "/metrics") as response:
            assert "cancelled" not in await response.text()
    running.cancel()
    await asyncio.wait([running])


async def test_unknown_addresses_and_methods_are_refused(server: Any) -> None:
    status, reply = await server.get("/v1/nothing")
    assert (status, reply["error"]["type"]) == (404, "not_found_error")
    assert "GET /openapi.json" in reply["error"]["message"]
    async with server.session.get(server.url + TEXT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == 405


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_model_is_reported(start: Any, stream: bool) -> None:
    backend = FakeBackend()
    server = await start(backend=backend)
    backend.failures.extend([(Status.OK, 1)] * 3 + [(Status.FATAL, 0)])
    body = {"prompt": "x", "ignore_eos": True, "max_tokens": 8, "temperature": 0, "stream": stream}
    async with server.session.post(server.url + TEXT, json=body) as response:
        text = await response.text()
    if stream:
        assert response.status == 200
        *_, last, rest = text.split("\n\n")
        assert last.startswith('data: {"error":{"code":500,')
        assert rest == ""
        assert "[DONE]" not in text
    else:
        assert response.status == 500
        assert '"type":"server_error"' in text
    assert len((await server.ok(TEXT, {**body, "stream": False}))["choices"][0]["text"]) == 8


async def expect(server: Any, path: str, body: Any, kind: tuple[int, str], param: str) -> None:
    """Check that the request is refused with an error that names the field."""
    status, reply = await server.post(path, body)
    error = reply["error"]
    assert (status, error["type"]) == kind, error
    assert error["code"] == status
    assert error["param"] == param
    assert param in error["message"]
