"""`POST /v1/chat/completions` and `/apply-template`."""

from __future__ import annotations

from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "Hello there"}]
PATH = "/v1/chat/completions"
GREEDY = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
PROMPT = "user: Hello there\nassistant: "


async def test_whole_reply_has_openai_fields(server: Any) -> None:
    reply = await server.ok(PATH, {**GREEDY, "max_tokens": 8})
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "fake.gguf"
    assert reply["system_fingerprint"].startswith("b")
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 8
    n_prompt = 1 + len(PROMPT)
    assert reply["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 8,
        "total_tokens": n_prompt + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    timings = reply["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, n_prompt, 8)
    assert timings["prompt_per_second"] == pytest.approx(1e3 * n_prompt / timings["prompt_ms"])
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 7)


async def test_the_path_without_a_version_is_the_same(server: Any) -> None:
    one = await server.ok(PATH, GREEDY | {"max_tokens": 4})
    other = await server.ok("/chat/completions", GREEDY | {"max_tokens": 4})
    assert one["choices"] == other["choices"]
    assert one["id"] != other["id"]


async def test_the_next_turn_reports_the_reused_tokens(server: Any) -> None:
    first = await server.ok(PATH, {**GREEDY, "max_tokens": 8})
    answer = first["choices"][0]["message"]["content"]
    turns = [*MESSAGES, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    second = await server.ok(PATH, {**GREEDY, "messages": turns, "max_tokens": 4})
    held = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == held
    assert second["timings"]["cache_n"] == held
    assert second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"] - held
    cold = await server.ok(PATH, {**GREEDY, "messages": turns, "max_tokens": 4, "cache_prompt": False})
    assert cold["timings"]["cache_n"] == 0
    assert cold["choices"] == second["choices"]


async def test_a_stream_adds_up_to_the_whole_reply(server: Any) -> None:
    body = {**GREEDY, "max_tokens": 8}
    whole = await server.ok(PATH, body)
    *chunks, done = await server.stream(PATH, body)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert choices[-1] == {"index": 0, "delta": {}, "finish_reason": "length"}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["timings"]["predicted_n"] == 8
    assert all("timings" not in chunk for chunk in chunks[:-1])


async def test_events_of_a_step_are_one_write(server: Any) -> None:
    body = {**GREEDY, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    writes = [b""]
    async with server.session.post(server.url + PATH, json=body) as response:
        async for data, ended in response.content.iter_chunks():
            writes[-1] += data
            if ended:
                writes.append(b"")
    assert writes.pop() == b""
    assert len(writes) <= 5
    assert b'"role":"assistant"' in writes[0]
    assert b'"content":"' in writes[0]
    assert b'"content":"' in writes[-1]
    assert b'"finish_reason":"length"' in writes[-1]
    assert writes[-1].endswith(b"data: [DONE]\n\n")


async def test_usage_is_streamed_when_asked_for(server: Any) -> None:
    body = {**GREEDY, "max_tokens": 4, "stream_options": {"include_usage": True}}
    *chunks, usage, done = await server.stream(PATH, body)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["timings"]["predicted_n"] == 4
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_timings_per_token(server: Any) -> None:
    *chunks, _ = await server.stream(PATH, {**GREEDY, "max_tokens": 4, "timings_per_token": True})
    counts = [c["timings"]["predicted_n"] for c in chunks if c["choices"][0]["delta"].get("content")]
    assert counts == [1, 2, 3, 4]


async def test_several_choices_share_one_reply_and_differ_by_seed(server: Any) -> None:
    body = {"messages": MESSAGES, "n": 3, "seed": 7, "max_tokens": 12, "ignore_eos": True, "cache_prompt": False}
    reply = await server.ok(PATH, body)
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert reply["usage"]["completion_tokens"] == 36
    assert reply["usage"]["prompt_tokens"] == 1 + len(PROMPT)
    for i, text in enumerate(texts):
        alone = await server.ok(PATH, {**body, "n": 1, "seed": 7 + i})
        assert alone["choices"][0]["message"]["content"] == text

    *chunks, usage, _ = await server.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    assert usage["usage"]["completion_tokens"] == 36
    for i, text in enumerate(texts):
        deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == i]
        assert "".join(delta["delta"].get("content") or "" for delta in deltas) == text
        assert [delta["delta"].get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


async def test_random_seeds_differ_and_a_given_one_repeats(server: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "ignore_eos": True, "cache_prompt": False}

    async def text(**fields: Any) -> str:
        return (await server.ok(PATH, body | fields))["choices"][0]["message"]["content"]

    assert await text() != await text()
    assert await text(seed=-1) != await text(seed=4294967295)
    assert await text(seed=3) == await text(seed=3)
    assert await text(seed=2**40) == await text(seed=2**40)


async def test_end_of_generation_and_stop_words_finish_with_stop(server: Any) -> None:
    text = (await server.ok(PATH, {**GREEDY, "max_tokens": 20}))["choices"][0]["message"]["content"]
    word = text[5:8]
    reply = await server.ok(PATH, {**GREEDY, "max_tokens": 20, "stop": word})
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"] == text[: text.index(word)]
    to_its_end = await server.ok(PATH, {**GREEDY, "ignore_eos": False})
    assert to_its_end["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
async def test_every_name_of_the_token_limit_works(server: Any, name: str) -> None:
    reply = await server.ok(PATH, {**GREEDY, name: 3})
    assert reply["usage"]["completion_tokens"] == 3


async def test_zero_tokens_may_be_asked_for(server: Any) -> None:
    reply = await server.ok(PATH, {**GREEDY, "max_tokens": 0})
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["finish_reason"] == "length"
    assert all(value >= 0 for value in reply["timings"].values())
    role, end, done = await server.stream(PATH, {**GREEDY, "max_tokens": 0})
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert end["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


async def test_server_defaults_apply_to_absent_fields(start: Any) -> None:
    server = await start(n_predict=5, alias="house-model", cache_prompt=False)
    for _ in range(2):
        reply = await server.ok(PATH, {**GREEDY, "max_tokens": None})
        assert reply["usage"]["completion_tokens"] == 5
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert reply["model"] == "house-model"


async def test_values_that_leave_unsupported_features_off_are_accepted(server: Any) -> None:
    await server.ok(
        PATH,
        {
            **GREEDY,
            "max_tokens": 1,
            "tools": [],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "grammar": "",
            "json_schema": None,
            "lora": [],
            "user": "somebody",
            "a_field_of_the_future": {"x": 1},
        },
    )


async def test_the_tokens_of_a_prompt_are_counted(server: Any) -> None:
    for fields in ({}, {"messages": [*MESSAGES, {"role": "assistant", "content": "Well,"}]}, {"max_tokens": 9}):
        body = {**GREEDY, **fields}
        for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
            counted = await server.ok(path, body)
        usage = (await server.ok(PATH, {**body, "max_tokens": 1}))["usage"]
        assert counted == {"input_tokens": usage["prompt_tokens"]}
    status, reply = await server.post("/chat/completions/input_tokens", {"messages": []})
    assert (status, reply["error"]["param"]) == (400, "messages")


async def test_apply_template_shows_the_prompt(server: Any) -> None:
    async def prompt(**fields: Any) -> str:
        return (await server.ok("/apply-template", {"messages": MESSAGES, **fields}))["prompt"]

    begun = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    assert await prompt() == PROMPT
    assert await prompt(add_generation_prompt=False) == "user: Hello there\n"
    assert await prompt(messages=begun, continue_final_message=True) == PROMPT + "Well,"


async def test_apply_template_shows_tools(start: Any) -> None:
    server = await start(template="{{ messages[0].content }}{% for t in tools %} {{ t.function.name }}{% endfor %}")
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "subtract")]
    for choice in ("auto", "required"):
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
        assert await server.ok("/apply-template", body) == {"prompt": "Hello there add subtract"}
    status, reply = await server.post("/apply-template", {"messages": MESSAGES, "tools": [{"type": "function"}]})
    assert (status, reply["error"]["param"]) == (400, "tools[0].function")


async def test_apply_template_takes_the_servers_default_of_reasoning(start: Any) -> None:
    for settings in ({"reasoning": False}, {"reasoning_budget": 0}):
        server = await start(template="{{ enable_thinking }}", **settings)
        for fields, shown in (({}, "False"), ({"chat_template_kwargs": {"enable_thinking": True}}, "True")):
            assert await server.ok("/apply-template", {"messages": MESSAGES, **fields}) == {"prompt": shown}


async def test_template_variables(start: Any) -> None:
    server = await start(template="{{ mood }} {{ reasoning_effort }} {{ enable_thinking }}")

    async def prompt(**fields: Any) -> str:
        return (await server.ok("/apply-template", {"messages": MESSAGES, **fields}))["prompt"]

    assert await prompt(chat_template_kwargs={"mood": "glad"}, reasoning_effort="high") == "glad high True"
    assert await prompt(reasoning_effort="none") == "  False"
