"""`best_of` on `/v1/completions`: the best of several completions, by their mean log-probability."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Start

TEXT = "/v1/completions"
HELLO = {"prompt": "Hello", "max_tokens": 6, "seed": 7, "temperature": 1, "ignore_eos": True}


@pytest.mark.parametrize(
    ("fields", "n"),
    [({"best_of": 4}, 1), ({"best_of": 4, "n": 2}, 2), ({"best_of": 3, "n": 3}, 3), ({"best_of": 0, "n": 2}, 2)],
    ids=str,
)
async def test_so_many_are_computed_and_the_best_are_returned(server: Any, fields: dict[str, Any], n: int) -> None:
    reply = await server.ok(TEXT, {**HELLO, **fields})
    computed = max(fields["best_of"], n)
    assert [choice["index"] for choice in reply["choices"]] == list(range(n))
    assert reply["usage"]["completion_tokens"] == 6 * computed
    assert all(choice["logprobs"] is None for choice in reply["choices"]), "nobody asked for them"
    candidates = await server.ok(TEXT, {**HELLO, "n": computed})
    texts = {choice["text"] for choice in candidates["choices"]}
    assert len(texts) == computed
    assert {choice["text"] for choice in reply["choices"]} <= texts


async def test_each_prompt_has_its_own_best(server: Any) -> None:
    prompts = ["Hello", "another"]
    reply = await server.ok(TEXT, {**HELLO, "prompt": prompts, "best_of": 3, "n": 2, "echo": True, "logprobs": 0})
    choices = reply["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice, prompt in zip(choices, [prompts[0]] * 2 + [prompts[1]] * 2, strict=True):
        assert choice["text"].startswith(prompt)
        assert len(choice["logprobs"]["tokens"]) == 1 + len(choice["text"]), "the BOS too"


async def test_an_echoed_prompt_is_not_scored_only_to_find_the_best(server: Any) -> None:
    await server.ok(TEXT, {**HELLO, "prompt": "Hello " * 20})
    reply = await server.ok(TEXT, {**HELLO, "prompt": "Hello " * 20, "best_of": 2, "echo": True})
    assert reply["choices"][0]["text"].startswith("Hello Hello")
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 120


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 2, "n": 3}, "'best_of' must be at least 'n', which is 3"),
        ({"best_of": 2, "stream": True}, "'best_of' above 'n' cannot be streamed"),
        ({"best_of": 9}, "9 completions requested, and the limit is 8 (--max-choices)"),
        ({"best_of": 3, "prompt": ["a", "b", "c"]}, "9 completions requested, and the limit is"),
        ({"best_of": -1}, "'best_of'"),
        ({"best_of": "two"}, "'best_of'"),
    ],
    ids=str,
)
async def test_what_cannot_be_is_refused(start: Start, fields: dict[str, Any], message: str) -> None:
    server = await start(max_choices=8)
    status, reply = await server.post(TEXT, {**HELLO, **fields})
    assert (status, reply["error"]["type"], reply["error"]["param"]) == (400, "invalid_request_error", "best_of")
    assert reply["error"]["message"].startswith(message)


async def test_a_stream_with_as_many_as_it_returns_is_streamed(server: Any) -> None:
    events = await server.stream(TEXT, {**HELLO, "best_of": 2, "n": 2})
    assert {choice["index"] for event in events if event != "[DONE]" for choice in event["choices"]} == {0, 1}
