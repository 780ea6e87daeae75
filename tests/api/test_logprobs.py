"""Log-probabilities in OpenAI's and llama-server's formats, streamed and whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from llamaslot.protocol.bodies import MAX_PROBS, MAX_TOP_LOGPROBS
from tests.fake_backend import FakeBackend

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
HELLO = {
    "prompt": "Hello", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0,
    "ignore_eos": True,
}  # fmt: skip


def rows_of(reply: Any, path: str) -> list[Any]:
    """The probabilities in llama-server's format."""
    if path == NATIVE:
        return reply["completion_probabilities"]
    return reply["choices"][0]["logprobs"]["content"]


def text_of(reply: Any, path: str) -> str:
    if path == NATIVE:
        return reply["content"]
    choice = reply["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def body_of(path: str, n_top: int, **fields: Any) -> dict[str, Any]:
    asked = {CHAT: {"logprobs": True, "top_logprobs": n_top}, TEXT: {"logprobs": n_top}, NATIVE: {"n_probs": n_top}}
    return {**HELLO, **asked[path], **fields}


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_each_token_has_its_own_and_the_most_likely_ones(server: Any, path: str) -> None:
    reply = await server.ok(path, body_of(path, 3))
    rows = rows_of(reply, path)
    assert len(rows) == 8
    assert "".join(row["token"] for row in rows) == text_of(reply, path)
    for row in rows:
        assert bytes(row["bytes"]).decode() == row["token"]
        assert bytes([row["id"]]).decode() == row["token"]
        assert (row["logprob"], [top["logprob"] for top in row["top_logprobs"]]) == (-1, [-1, -2, -3])
        assert (row["top_logprobs"][0]["id"], len({top["id"] for top in row["top_logprobs"]})) == (row["id"], 3)
        assert set(row) == {"id", "token", "bytes", "logprob", "top_logprobs"}


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize("fields", [{}, {"stop": ["q", "ab"]}, {"ignore_eos": False, "max_tokens": 200}], ids=str)
async def test_the_stream_adds_up_to_the_whole(server: Any, path: str, fields: dict[str, Any]) -> None:
    for prompt in ("Hello", "another", "é"):
        asked = body_of(path, 2, **fields, prompt=prompt, timings_per_token=True, return_tokens=True)
        asked["messages"] = [{"role": "user", "content": prompt}]
        whole = await server.ok(path, asked)
        events = [event for event in await server.stream(path, asked) if event != "[DONE]"]
        if path == NATIVE:
            *parts, end = events
            assert "completion_probabilities" not in end
            assert all(len(part["completion_probabilities"]) == 1 == len(part["tokens"]) for part in parts)
            rows = [row for part in parts for row in part["completion_probabilities"]]
            assert [row["id"] for row in rows] == whole["tokens"]
            text = "".join(part["content"] for part in parts)
        else:
            choices = [event["choices"][0] for event in events]
            with_text = [each for each in choices if each.get("delta", each).get("content", each.get("text"))]
            assert all(each["logprobs"] is not None for each in with_text)
            parts = [each["logprobs"] for each in choices if each.get("logprobs")]
            rows = [row for part in parts for row in part["content"]]
            text = "".join(each.get("delta", each).get("content", each.get("text")) or "" for each in choices)
        assert rows == rows_of(whole, path)
        assert text == text_of(whole, path)
        if path == TEXT:
            logprobs = whole["choices"][0]["logprobs"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert list(itertools.chain.from_iterable(part[name] for part in parts)) == logprobs[name]


async def test_text_completions_have_openais_fields(server: Any) -> None:
    reply = await server.ok(TEXT, {**HELLO, "logprobs": 2})
    logprobs, text = reply["choices"][0]["logprobs"], reply["choices"][0]["text"]
    assert logprobs["tokens"] == list(text)
    assert logprobs["token_logprobs"] == [-1] * 8
    assert logprobs["text_offset"] == list(range(8))
    for token, top in zip(text, logprobs["top_logprobs"], strict=True):
        assert top[token] == -1
        assert list(top.values()) == [-1, -2]
    for name in set(logprobs["top_logprobs"][0]) - set(text):
        assert len(name) == 1 or name == "" or name.startswith("bytes:\\x")
    reply = await server.ok(TEXT, {**HELLO, "logprobs": 0})
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{token: -1} for token in reply["choices"][0]["text"]]
    for off in (None, False):
        assert (await server.ok(TEXT, {**HELLO, "logprobs": off}))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_a_stop_string_cuts_tokens_and_probabilities_alike(server: Any, path: str) -> None:
    free = text_of(await server.ok(path, HELLO), path)
    for start, end in ((3, 4), (3, 5), (1, 6)):
        stop = free[start:end]
        reply = await server.ok(path, body_of(path, 1, stop=[stop], return_tokens=True))
        assert text_of(reply, path) == free[: free.index(stop)]
        assert "".join(row["token"] for row in rows_of(reply, path)) == free[: free.index(stop)]
        if path == NATIVE:
            assert bytes(reply["tokens"]).decode() == free[: free.index(stop)]
            assert reply["tokens_predicted"] == free.index(stop) + len(stop)


async def test_choices_have_their_own(server: Any) -> None:
    asked = {**HELLO, "n": 3, "temperature": 1, "seed": 3, "logprobs": 1}
    whole = (await server.ok(TEXT, asked))["choices"]
    assert len({choice["text"] for choice in whole}) > 1
    events = [event["choices"][0] for event in await server.stream(TEXT, asked) if event != "[DONE]"]
    for i, choice in enumerate(whole):
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        parts = [event["logprobs"] for event in events if event["index"] == i and event["logprobs"]]
        for name, values in choice["logprobs"].items():
            assert list(itertools.chain.from_iterable(part[name] for part in parts)) == values


async def test_probabilities_after_sampling_have_other_names(server: Any) -> None:
    reply = await server.ok(NATIVE, {**HELLO, "n_probs": 2, "post_sampling_probs": True})
    for row in reply["completion_probabilities"]:
        assert set(row) == {"id", "token", "bytes", "prob", "top_probs"}
        assert {name for top in row["top_probs"] for name in top} == {"id", "token", "bytes", "prob"}
    settings = reply["generation_settings"]
    assert (settings["n_probs"], settings["post_sampling_probs"]) == (2, True)


class SplitCharacters(FakeBackend):
    """Generates characters of several tokens, the last one incomplete."""

    def __init__(self) -> None:
        super().__init__(n_ctx=1024)
        self._bytes = "aé€".encode() + b"\xe2\x82"

    def _draw(self, rows: Any, sampler: Any, index: int) -> int:
        token = super()._draw(rows, sampler, index)
        sampler.scores[:] = [type(each)(self._next(sampler), -1.0, [token], [-1.0]) for each in sampler.scores]
        return self._next(sampler)

    def _next(self, sampler: Any) -> int:
        return self._bytes[sampler.n_drawn - 1]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_a_character_of_several_tokens_is_the_last_ones(start: Any, path: str) -> None:
    server = await start(backend=SplitCharacters())
    reply = await server.ok(path, body_of(path, 1))
    rows = rows_of(reply, path)
    assert [row["token"] for row in rows] == ["a", "", "é", "", "", "€", "", ""]
    assert [row["bytes"] for row in rows] == [[byte] for byte in "aé€".encode() + b"\xe2\x82"]
    assert text_of(reply, path) == "aé€�"
    if path == TEXT:
        logprobs = reply["choices"][0]["logprobs"]
        assert logprobs["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
        assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 3]


async def test_limits(server: Any) -> None:
    async def status(path: str, **fields: Any) -> tuple[int, str]:
        code, reply = await server.post(path, {**HELLO, **fields})
        return code, "" if code == 200 else reply["error"]["param"]

    for path in (CHAT, TEXT, NATIVE):
        assert await status(path, n_probs=MAX_PROBS) == (200, "")
        assert await status(path, n_probs=MAX_PROBS + 1) == (400, "n_probs")
        assert await status(path, n_probs=-1) == (400, "n_probs")
        assert await status(path, logprobs="yes") == (400, "logprobs")
        assert await status(path, logprobs=-1) == (400, "logprobs")
    assert await status(CHAT, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS) == (200, "")
    assert await status(CHAT, logprobs=True, top_logprobs=MAX_TOP_LOGPROBS + 1) == (400, "top_logprobs")
    assert await status(CHAT, logprobs=True, top_logprobs=0) == (200, "")
    assert await status(CHAT, top_logprobs=2) == (400, "top_logprobs")
    assert await status(CHAT, logprobs=False, top_logprobs=2) == (400, "top_logprobs")
    assert await status(CHAT, logprobs=3) == (400, "logprobs")
    for path in (TEXT, NATIVE):
        assert await status(path, logprobs=MAX_PROBS) == (200, "")
        assert await status(path, logprobs=MAX_PROBS + 1) == (400, "logprobs")
        assert await status(path, logprobs=1, top_logprobs=2) == (400, "top_logprobs")


async def test_a_chat_that_names_no_number_gets_llama_servers(server: Any) -> None:
    reply = await server.ok(CHAT, {**HELLO, "logprobs": True})
    assert {len(row["top_logprobs"]) for row in rows_of(reply, CHAT)} == {MAX_TOP_LOGPROBS}
    reply = await server.ok(CHAT, {**HELLO, "logprobs": True, "top_logprobs": 0})
    assert {len(row["top_logprobs"]) for row in rows_of(reply, CHAT)} == {0}
    assert "logprobs" not in (await server.ok(CHAT, HELLO))["choices"][0]
