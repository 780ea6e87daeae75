"""The size of a reply, which its client chooses, costs others nothing: it is bounded, and made in pieces."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from PIL import Image

from llamaslot.api import bodies
from llamaslot.base.errors import MAX_MESSAGE_CHARS, QueueFullError
from llamaslot.service import limits
from llamaslot.service.limits import MAX_REPLY_BYTES, ReplyBudget
from tests.fake_backend import FakeBackend
from tests.image_bodies import base64_of, file_of

NOISE = file_of(Image.frombytes("L", (100, 100), random.Random(1).randbytes(10_000)))
"""An image that cannot be compressed."""
MESSAGES = [{"role": "user", "content": "abc"}]
SHORT = {"ignore_eos": True, "seed": 1}
MANY: dict[str, tuple[str, dict[str, Any], str]] = {
    "native": ("/completion", {"prompt": "abc", "n": 5, "n_predict": 20, "n_probs": 9}, "n_probs"),
    "text": ("/v1/completions", {"prompt": "abc", "n": 5, "max_tokens": 20, "logprobs": 9}, "logprobs"),
    "best of": ("/v1/completions", {"prompt": "abc", "best_of": 50, "max_tokens": 20}, "logprobs"),
    "prompts": ("/v1/completions", {"prompt": ["abc"] * 5, "max_tokens": 20, "logprobs": 9}, "logprobs"),
    "echo": ("/v1/completions", {"prompt": "abcd" * 50, "echo": True, "max_tokens": 1, "logprobs": 9}, "logprobs"),
    "echo in a stream": (
        "/v1/completions",
        {"prompt": "abcd" * 50, "echo": True, "max_tokens": 1, "logprobs": 9, "stream": True, "verbose": True},
        "logprobs",
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "n": 5, "max_tokens": 20, "logprobs": True, "top_logprobs": 9},
        "top_logprobs",
    ),
    "stored stream": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 99,
            "logprobs": True,
            "top_logprobs": 9,
            "stream": True,
            "store": True,
        },
        "top_logprobs",
    ),
    "responses": ("/v1/responses", {"input": "abc", "max_output_tokens": 25, "top_logprobs": 9}, "top_logprobs"),
    "responses stream": (
        "/v1/responses",
        {"input": "abc", "max_output_tokens": 25, "top_logprobs": 9, "stream": True},
        "top_logprobs",
    ),
    "no limit of tokens": ("/completion", {"prompt": "abc", "n_probs": 9, **SHORT}, "n_probs"),
    "infill": (
        "/infill",
        {"input_prefix": "a", "input_suffix": "b", "n": 5, "n_predict": 20, "n_probs": 9},
        "n_probs",
    ),
}


@pytest.mark.parametrize("name", MANY)
async def test_too_many_probabilities_are_refused_by_name(start: Any, name: str) -> None:
    server = await start(max_reply_probs=900)
    path, body, param = MANY[name]
    status, reply = await server.post(path, body)
    if name == "infill" and status == 501:
        return
    assert status == 400, reply
    error = reply["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert "--max-reply-probs" in error["message"]
    await server.idle()


async def test_what_cannot_be_known_ahead_ends_with_an_error(start: Any) -> None:
    server = await start(max_reply_probs=50)
    status, reply = await server.post(
        "/completion", {"prompt": "abc", "n_probs": 4, "temperature": 0, "t_max_predict_ms": 60_000, "n": 9}
    )
    assert status == 400, reply
    assert "already has" in reply["error"]["message"]


async def test_a_stream_that_keeps_nothing_has_no_limit(start: Any) -> None:
    server = await start(max_reply_probs=10)
    for path, body in (
        ("/completion", {"prompt": "abc", "n_predict": 20, "n_probs": 9}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 20, "logprobs": 9}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, "logprobs": True, "top_logprobs": 9}),
    ):
        assert len(await server.stream(path, {**body, **SHORT})) > 10


LARGE = [
    ("/completion", {"prompt": "abc", "n": 3, "n_predict": 60, "n_probs": 20}),
    ("/completion", {"prompt": "abc", "n": 3, "n_predict": 60, "n_probs": 20, "post_sampling_probs": True}),
    (
        "/completion",
        {
            "prompt": "abc",
            "n_predict": 60,
            "n_probs": 20,
            "response_fields": ["content", "completion_probabilities"],
        },
    ),
    ("/v1/completions", {"prompt": "abc", "n": 2, "max_tokens": 60, "logprobs": 20, "echo": True, "verbose": True}),
    ("/v1/completions", {"prompt": "abc", "best_of": 3, "max_tokens": 60, "logprobs": 5}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "max_tokens": 60, "logprobs": True, "verbose": True}),
    ("/v1/responses", {"input": "abc", "max_output_tokens": 60, "top_logprobs": 20}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 60}),
]


def without_times(value: Any) -> Any:
    """A reply without what differs each time."""
    if isinstance(value, dict):
        names = ("timings", "id", "created", "created_at", "completed_at", "cache", "usage", "id_slot")
        return {name: without_times(value[name]) for name in value if name not in names}
    return [without_times(each) for each in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), LARGE, ids=[f"{path} {i}" for i, (path, _) in enumerate(LARGE)])
async def test_a_reply_in_pieces_is_the_same(
    start: Any, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start()
    await server.post(path, {**body, **SHORT})
    whole = await server.ok(path, {**body, **SHORT})
    monkeypatch.setattr(bodies, "_CHUNK_BYTES", 100)
    async with server.session.post(server.url + path, json={**body, **SHORT}) as response:
        assert response.headers["Transfer-Encoding"] == "chunked"
        assert response.content_type == "application/json"
        assert without_times(await response.json()) == without_times(whole)


async def test_a_stored_chat_has_all_pieces(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_CHUNK_BYTES", 100)
    server = await start()
    path, body = "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30, "logprobs": True, "store": True}
    sent = await server.ok(path, {**body, "metadata": {"a": "b"}})
    status, stored = await server.get(f"{path}/{sent['id']}")
    assert (status, stored) == (200, {**sent, "metadata": {"a": "b"}})
    streamed = await server.stream(path, body)
    status, page = await server.get(path)
    assert [each["id"] for each in page["data"]] == [sent["id"], streamed[0]["id"]]
    probs = [
        prob for event in streamed[:-1] for prob in (event["choices"][0].get("logprobs") or {}).get("content", [])
    ]
    assert page["data"][1]["choices"][0]["logprobs"]["content"] == probs
    async with server.session.head(server.url + path) as response:
        assert response.status == 200


@pytest.mark.slow
async def test_the_prompt_of_a_stream_comes_in_parts(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaslot.base.generation.token_probs._PART_ENTRIES", 10)
    server = await start()
    body = {"prompt": "abcdefghij" * 10, "max_tokens": 3, "echo": True, "logprobs": 3, **SHORT}
    whole = (await server.ok("/v1/completions", body))["choices"][0]
    events = (await server.stream("/v1/completions", body))[:-1]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert len(choices) > 20
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        parts = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        assert [item for part in parts for item in part] == whole["logprobs"][name]


async def test_what_replies_take_is_released(start: Any) -> None:
    server = await start()
    for path, body in LARGE:
        await server.post(path, {**body, **SHORT})
        if path != "/completion":
            async with server.session.post(server.url + path, json={**body, **SHORT, "stream": True}) as response:
                await response.content.readany()
    await server.ok("/tokenize", {"content": "abc" * 1000})
    await server.idle()
    for _ in range(200):
        if not server.service.reply_budget.n_bytes:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(server.service.reply_budget.n_bytes)


def test_an_owner_takes_as_much_memory_as_it_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REPLY_BYTES", 1000)
    memory = ReplyBudget()
    memory.charge("a", 5000)
    memory.charge("a", -5000)
    memory.charge("a", 400)
    memory.charge("a", 100, n_own=400)
    with pytest.raises(QueueFullError):
        memory.charge("a", 1, n_own=100)
    memory.charge("b", 250)
    with pytest.raises(QueueFullError):
        memory.charge("b", 10)
    memory.charge("c", 100)
    memory.charge("a", -500)
    memory.charge("b", 10)
    assert memory.n_bytes == 360


async def test_a_request_fails_whose_client_has_too_many_replies(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start()
    monkeypatch.setattr(limits, "MAX_REPLY_BYTES", 20_000)
    server.service.reply_budget.charge("other", 100)
    body = {"prompt": "abc", "n": 8, "n_predict": 50, "n_probs": 10, **SHORT}
    status, reply = await server.post("/completion", body)
    assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
    await server.idle()
    assert server.service.reply_budget.n_bytes == 100
    assert MAX_REPLY_BYTES == 64 * 2**20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"role": "user", "content": "hi", "junk": "x" * 10_000}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi", "junk": "x" * 10_000}], "store": True},
        ),
        (
            "/completion",
            {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [base64_of(NOISE)]}, "n_predict": 1},
        ),
    ],
    ids=["items", "stored chat", "image"],
)
async def test_what_is_kept_of_a_body_is_counted(
    start: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    server = await start(backend=FakeBackend(n_ctx=1024, projector=True))
    monkeypatch.setattr(limits, "MAX_REPLY_BYTES", 20_000)
    server.service.reply_budget.charge("other", 15_000)
    status, reply = await server.post(path, body)
    assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
    await server.idle()
    assert server.service.reply_budget.n_bytes == 15_000
    server.service.reply_budget.charge("other", -15_000)
    assert (await server.post(path, body))[0] == 200


LONG = "x" * 400_000
ECHOED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"type": LONG, "function": {"name": "f"}}]}),
    ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": {"type": LONG}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": LONG}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "store": True, "metadata": {LONG: LONG}}),
    ("/completion", {"prompt": "a", "grammar": LONG}),
    ("/completion", {"prompt": "a", "json_schema": {"$ref": LONG}}),
    ("/completion", {"prompt": "a", "json_schema": {"type": LONG}}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "tools": [{"type": LONG}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": LONG}]}], "max_tokens": 1}),
    ("/v1/responses", {"input": [{"type": LONG}]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": LONG}]}),
    ("/v1/responses", {"input": "a", "previous_response_id": LONG}),
    ("/v1/responses", {"input": "a", "tools": [{"type": LONG}]}),
    ("/tokenize", {"content": {LONG: 1}}),
]


@pytest.mark.parametrize(("path", "body"), ECHOED, ids=[f"{path} {i}" for i, (path, _) in enumerate(ECHOED)])
async def test_an_error_does_not_repeat_a_long_field(server: Any, path: str, body: Any) -> None:
    status, reply = await server.post(path, body)
    # Some fields are taken as they are.
    assert status in (200, 400, 404, 501), reply
    assert len(json.dumps(reply)) < 2 * MAX_MESSAGE_CHARS


@pytest.mark.parametrize("with_pieces", [False, True])
async def test_a_text_of_too_many_tokens_is_refused(
    server: Any, with_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamaslot.protocol.request_reader._MAX_TOKENS", 1000)
    monkeypatch.setattr("llamaslot.protocol.request_reader._MAX_REPLY_BYTES", 20_000)
    for body in (
        {"content": "a" * 2000, "with_pieces": with_pieces},
        {"prompt": "a" * 2000, "return_token_strs": with_pieces},
        {"messages": [{"role": "user", "content": "a" * 2000}], "return_token_strs": with_pieces},
        {"content": "a" * 1000, "with_pieces": True},
    ):
        status, reply = await server.post("/tokenize", body)
        assert status == 400, reply
        assert "limit" in reply["error"]["message"]
    for path, body in (
        ("/detokenize", {"tokens": [97] * 30_000}),
        ("/apply-template", {"messages": [{"role": "user", "content": "a" * 30_000}]}),
    ):
        status, reply = await server.post(path, body)
        assert status == 400, (path, reply)


async def test_a_page_ends_before_it_is_large(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaslot.protocol.responses._MAX_PAGE_BYTES", 400)
    items = [{"role": "user", "content": str(i) * 50} for i in range(9)]
    stored = await server.ok("/v1/responses", {"input": items, "max_output_tokens": 1})
    seen: list[str] = []
    path = f"/v1/responses/{stored['id']}/input_items?order=asc&limit=100"
    page = (await server.get(path))[1]
    while page["has_more"]:
        assert 1 <= len(page["data"]) < 4
        seen += [each["id"] for each in page["data"]]
        page = (await server.get(f"{path}&after={page['last_id']}"))[1]
    assert len([*seen, *page["data"]]) == 9


async def test_a_request_for_61_mb_of_probabilities_is_refused_by_default(server: Any) -> None:
    body = {"prompt": "abc", "n": 128, "n_predict": 50, "ignore_eos": True, "n_probs": 128}
    status, reply = await server.post("/completion", body)
    assert (status, reply["error"]["param"]) == (400, "n_probs")
    assert "524288" in reply["error"]["message"]
