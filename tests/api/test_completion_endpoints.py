"""`POST /v1/completions` in OpenAI's format and `POST /completion` in llama-server's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_backend import EOS, FakeBackend

GREEDY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 8}


async def test_openai_reply(server: Any) -> None:
    reply = await server.ok("/v1/completions", GREEDY)
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    [choice] = reply["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert len(choice["text"]) == 8
    assert reply["usage"]["prompt_tokens"] == 17
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert reply["timings"]["prompt_n"] == 17
    again = await server.ok("/v1/completions", GREEDY)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert again["choices"] == reply["choices"]


async def test_openai_stream_has_a_choice_in_every_chunk(server: Any) -> None:
    whole = await server.ok("/v1/completions", GREEDY)
    *chunks, done = await server.stream("/v1/completions", {**GREEDY, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == whole["choices"][0]["text"]
    assert texts[-1] == ""
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert chunks[-1]["timings"]["predicted_n"] == 8


async def test_prompts_and_choices_are_numbered_in_order(server: Any) -> None:
    body = {**GREEDY, "temperature": 1, "seed": 5, "n": 2, "cache_prompt": False}
    reply = await server.ok("/v1/completions", {**body, "prompt": ["one", "another"]})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    alone = [await server.ok("/v1/completions", {**body, "prompt": prompt}) for prompt in ("one", "another")]
    expected = [choice["text"] for part in alone for choice in part["choices"]]
    assert [choice["text"] for choice in reply["choices"]] == expected
    assert reply["usage"]["prompt_tokens"] == 1 + 3 + 1 + 7
    assert reply["usage"]["completion_tokens"] == 32

    *chunks, _ = await server.stream("/v1/completions", {**body, "prompt": ["one", "another"]})
    for i, text in enumerate(expected):
        parts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == i]
        assert "".join(parts) == text
    assert [i for i, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["usage"] == reply["usage"]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("abc", "<s>abc"),
        ([97, 98, 99], "abc"),
        ([97, "bc", 100], "abcd"),
        (["ab", 99], "<s>abc"),
        ({"prompt_string": "abc"}, "<s>abc"),
        (["abc"], "<s>abc"),
        ([[97, 98, 99]], "abc"),
    ],
)
async def test_every_shape_of_prompt(server: Any, prompt: Any, shown: str) -> None:
    reply = await server.ok("/completion", {**GREEDY, "prompt": prompt})
    assert reply["prompt"] == shown
    assert reply["tokens_evaluated"] == len(shown.replace("<s>", "."))


async def test_native_reply(server: Any) -> None:
    reply = await server.ok("/completion", {**GREEDY, "n_predict": 6, "return_tokens": True, "stop": ["\n\n"]})
    assert reply["stop"] is True
    assert (reply["stop_type"], reply["stopping_word"], reply["truncated"]) == ("limit", "", False)
    assert bytes(reply["tokens"]).decode() == reply["content"]
    assert (reply["tokens_predicted"], reply["tokens_evaluated"], reply["tokens_cached"]) == (6, 17, 22)
    assert reply["has_new_line"] is False
    assert reply["id_slot"] in range(4)
    settings = reply["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["stop"]) == (6, 0, ["\n\n"])
    assert settings["adaptive_target"] < 0 <= settings["adaptive_decay"]
    assert (await server.ok("/completions", GREEDY))["tokens"] == []


async def test_whole_numbers_may_be_written_as_fractions(server: Any) -> None:
    numbers = {"top_k": 40.0, "seed": 3.0, "id_slot": 2.0, "temperature": 1.0, "n_predict": 2.0}
    odd = {"prompt": {"prompt_string": "abc"}, "logit_bias": [[65, 2.5], ["B", False]], "stop": ["x"]}
    reply = await server.ok("/completion", {**odd, **numbers, "ignore_eos": True})
    assert (reply["tokens_predicted"], reply["id_slot"], reply["prompt"]) == (2, 2, "<s>abc")
    settings = reply["generation_settings"]
    assert [repr(settings[name]) for name in ("top_k", "seed", "n_predict")] == ["40", "3", "2"]
    assert settings["logit_bias"][:2] == [{"token": 65, "bias": 2.5}, {"token": 66, "bias": None}]
    whole = await server.ok("/v1/completions", {**GREEDY, "max_tokens": 3.0})
    assert whole["usage"]["completion_tokens"] == 3


async def test_native_list_of_prompts_gives_a_list(server: Any) -> None:
    one, other = await server.ok("/completion", {**GREEDY, "prompt": ["abc", [97, 98, 99]]})
    assert (one["index"], other["index"]) == (0, 1)
    assert (one["prompt"], other["prompt"]) == ("<s>abc", "abc")


async def test_native_stream_ends_with_stop_and_no_done(server: Any) -> None:
    whole = await server.ok("/completion", GREEDY)
    *parts, end = await server.stream("/completion", GREEDY)
    assert end["stop"] is True
    assert end["content"] == ""
    assert end["timings"]["predicted_n"] == 8
    assert end["generation_settings"]["stream"] is True
    assert all(part["stop"] is False and part["tokens"] for part in parts)
    assert {part["id_slot"] for part in parts} == {end["id_slot"]} <= set(range(4))
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == list(whole["content"].encode())


async def test_the_stop_type_is_reported(server: Any) -> None:
    text = (await server.ok("/completion", {**GREEDY, "max_tokens": 30}))["content"]
    stopped = await server.ok("/completion", {**GREEDY, "max_tokens": 30, "stop": ["\x00", text[9:12], ""]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", text[9:12])
    assert stopped["content"] == text[: text.index(text[9:12])]
    ended = await server.ok("/completion", {"prompt": "Once", "temperature": 0})
    assert ended["stop_type"] == "eos"


async def test_end_of_context_is_truncation(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=64, n_slots=1))
    reply = await server.ok("/completion", {**GREEDY, "max_tokens": -1})
    assert (reply["stop_type"], reply["truncated"]) == ("limit", True)


async def test_response_fields(server: Any) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing", "prompt/x"]
    reply = await server.ok("/completion", {**GREEDY, "response_fields": fields})
    assert set(reply) == {"content", "generation_settings/n_predict"}
    assert reply["generation_settings/n_predict"] == 8


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ([[65, 2.5], ["BC", False]], {65: 2.5, 66: None, 67: None}),
        ({"65": -1, "B": 3}, {65: -1, 66: 3}),
        ([["65", 1]], {54: 1, 53: 1}),
        ([], {}),
    ],
)
async def test_both_forms_of_logit_bias(server: Any, bias: Any, expected: dict[int, float | None]) -> None:
    reply = await server.ok("/completion", {**GREEDY, "ignore_eos": False, "logit_bias": bias})
    shown = reply["generation_settings"]["logit_bias"]
    assert {entry["token"]: entry["bias"] for entry in shown} == expected


async def test_ignored_ends_are_shown_as_biases(server: Any) -> None:
    reply = await server.ok("/completion", {**GREEDY, "ignore_eos": True, "logit_bias": {"65": 1}})
    shown = reply["generation_settings"]["logit_bias"]
    assert shown == [{"token": 65, "bias": 1}, {"token": EOS, "bias": None}]


async def test_a_slot_can_be_chosen(server: Any) -> None:
    for slot in (2, 0, 3):
        assert (await server.ok("/completion", {**GREEDY, "id_slot": slot}))["id_slot"] == slot


CHAT = {"messages": [{"role": "user", "content": "Once"}], "temperature": 0, "ignore_eos": True, "max_tokens": 8}
VERBOSE = [
    ("/v1/chat/completions", CHAT, "<s>user: Once\nassistant: "),
    ("/v1/completions", GREEDY, "<s>Once upon a time"),
    ("/v1/completions", {**GREEDY, "prompt": [97, 98], "echo": True}, "ab"),
]


@pytest.mark.parametrize(("path", "body", "prompt"), VERBOSE)
async def test_a_verbose_reply_contains_llama_servers_own(server: Any, path: str, body: Any, prompt: str) -> None:
    assert "__verbose" not in await server.ok(path, body)
    body = {**body, "n_probs": 2, "stop": ["zz"], "return_tokens": True, "verbose": True}
    reply = await server.ok(path, body)
    shown = reply["__verbose"]
    assert (shown["prompt"], shown["stop_type"], shown["tokens_predicted"]) == (prompt, "limit", 8)
    assert bytes(shown["tokens"]).decode() == shown["content"]
    choice = reply["choices"][0]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]).endswith(shown["content"])
    assert shown["generation_settings"]["stop"] == ["zz"]
    assert len(shown["completion_probabilities"]) == 8
    events = await server.stream(path, body)
    [streamed] = [event["__verbose"] for event in events if "__verbose" in event]
    assert (streamed["prompt"], streamed["content"]) == (prompt, shown["content"])


@pytest.mark.parametrize(("path", "body", "prompt"), VERBOSE[:2])
async def test_a_verbose_server_says_more_unless_told_otherwise(
    start: Any, path: str, body: Any, prompt: str
) -> None:
    server = await start(verbose=True)
    assert (await server.ok(path, body))["__verbose"]["prompt"] == prompt
    assert "__verbose" not in await server.ok(path, {**body, "verbose": False})
