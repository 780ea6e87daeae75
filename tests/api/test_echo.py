"""`echo`: texts begin with their prompts, whose tokens have log-probabilities too."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from llamaslot.protocol.bodies import MAX_TOP_LOGPROBS
from tests.fake_backend import FakeBackend, FakeVocab, prompt_score

TEXT = "/v1/completions"
PROMPT = "A prompt of more tokens than one step scores, é €."
GREEDY = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "echo": True}


def expected(tokens: list[int], n_top: int) -> list[Any]:
    """The scores of all tokens but the first, by the tokens before each."""
    pairs = list(enumerate(tokens))
    return [prompt_score(pairs[:i], tokens[i], n_top) for i in range(1, len(tokens))]


def tokens_of(text: str) -> list[int]:
    return FakeVocab().tokenize(text, add_special=True, parse_special=True).tolist()


async def test_the_text_begins_with_the_prompt(server: Any) -> None:
    plain = await server.ok(TEXT, {**GREEDY, "echo": False})
    reply = await server.ok(TEXT, GREEDY)
    assert reply["choices"][0]["text"] == PROMPT + plain["choices"][0]["text"]
    assert reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "without scores it reuses what is cached"


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", [PROMPT, "x"])
async def test_prompts_are_scored(server: Any, prompt: str, max_tokens: int) -> None:
    asked = {**GREEDY, "prompt": prompt, "max_tokens": max_tokens}
    generated = (await server.ok(TEXT, {**asked, "echo": False, "logprobs": 2}))["choices"][0]
    choice = (await server.ok(TEXT, {**asked, "logprobs": 2}))["choices"][0]
    logprobs, tokens = choice["logprobs"], tokens_of(prompt)
    n = len(tokens)
    scores = expected(tokens, 2)
    assert logprobs["token_logprobs"][:n] == [None, *(score.value for score in scores)]
    assert logprobs["top_logprobs"][0] is None
    for top, score in zip(logprobs["top_logprobs"][1:n], scores, strict=True):
        assert sorted(top.values(), reverse=True)[:2] == score.top_values
        assert score.value in top.values()
    assert logprobs["tokens"][:2] == ["<s>", prompt[0]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "content"):
        assert logprobs[name][len(logprobs[name]) - max_tokens :] == generated["logprobs"][name]
    assert len(logprobs["content"]) == max_tokens
    assert choice["text"] == prompt + generated["text"]
    lengths = [0, 0, *(len(prompt.encode()[:i].decode(errors="ignore")) for i in range(1, n - 1))]
    assert logprobs["text_offset"] == [*lengths, *range(len(prompt), len(prompt) + max_tokens)]


async def test_token_ids_are_scored_without_bos(server: Any) -> None:
    ids = list(b"abcdefghijkl")
    reply = await server.ok(TEXT, {**GREEDY, "prompt": ids, "max_tokens": 0, "logprobs": 0})
    choice = reply["choices"][0]
    assert choice["text"] == "abcdefghijkl"
    assert choice["logprobs"]["tokens"] == list("abcdefghijkl")
    assert choice["logprobs"]["text_offset"] == list(range(12))
    values = [score.value for score in expected(ids, 0)]
    assert choice["logprobs"]["token_logprobs"] == [None, *values]
    assert choice["logprobs"]["top_logprobs"][1:] == [
        {chr(token): value} for token, value in zip(ids[1:], values, strict=True)
    ]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_the_stream_adds_up_to_the_whole(server: Any, logprobs: int | None) -> None:
    prompts = ["One prompt of some length", list(b"another"), ["x", 97]]
    for n in (1, 2):
        asked = {**GREEDY, "prompt": prompts, "n": n, "temperature": 1, "seed": 4, "logprobs": logprobs}
        whole = (await server.ok(TEXT, asked))["choices"]
        *events, _ = await server.stream(TEXT, asked)
        assert len(whole) == 3 * n
        for i, choice in enumerate(whole):
            parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == i]
            assert "".join(part["text"] for part in parts) == choice["text"]
            if logprobs is None:
                assert not any(part["logprobs"] for part in parts)
                continue
            for name, values in choice["logprobs"].items():
                streamed = [part["logprobs"][name] for part in parts if part["logprobs"]]
                assert list(itertools.chain.from_iterable(streamed)) == values


async def test_a_scored_prompt_neither_uses_nor_feeds_the_cache(server: Any) -> None:
    await server.ok(TEXT, {**GREEDY, "echo": False})
    scored = {**GREEDY, "logprobs": 1}
    first = await server.ok(TEXT, scored)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["cache"]["miss"] == "off"
    assert (await server.ok(TEXT, scored))["choices"] == first["choices"]
    fresh = await server.ok(TEXT, {**GREEDY, "prompt": "Another " + PROMPT, "logprobs": 1})
    again = await server.ok(TEXT, {**GREEDY, "prompt": "Another " + PROMPT, "echo": False})
    assert fresh["choices"][0]["text"] == "Another " + PROMPT + again["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(tokens_of("A")), (
        "only BOS and A are shared"
    )


async def test_several_at_once_share_the_rows_of_logits(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=1024, n_spare_rows=3, n_ubatch=64))
    prompts = [f"{i} and some more text" for i in range(6)]
    plain = [{**GREEDY, "prompt": prompt * 5, "echo": False} for prompt in prompts]
    scored = [{**GREEDY, "prompt": prompt, "logprobs": 1} for prompt in prompts]
    replies = await asyncio.gather(*(server.ok(TEXT, body) for body in [*plain, *scored]))
    for prompt, reply in zip(prompts, replies[6:], strict=True):
        values = reply["choices"][0]["logprobs"]["token_logprobs"]
        scores = expected(tokens_of(prompt), 0)
        assert values[: len(scores) + 1] == [None, *(score.value for score in scores)]


async def test_limits(server: Any) -> None:
    for logprobs, status in ((MAX_TOP_LOGPROBS, 200), (MAX_TOP_LOGPROBS + 1, 400)):
        code, reply = await server.post(TEXT, {**GREEDY, "logprobs": logprobs})
        assert code == status
    assert reply["error"]["param"] == "logprobs"
    for path in ("/completion", "/v1/chat/completions"):
        code, reply = await server.post(path, {**GREEDY, "messages": [{"role": "user", "content": "Hi"}]})
        assert (code, reply["error"]["param"]) == (400, "echo")
