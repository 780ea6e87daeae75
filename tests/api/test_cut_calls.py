"""Calls that the model, a limit or a stop string cuts: no API returns them as complete, whole or streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamaslot.formats.recognition import format_of
from tests.api.response_events import events_of, put_together
from tests.api.test_messages import blocks
from tests.api.test_messages import events as message_events
from tests.api.test_tools import BODY, CHAT, CITY, NOW, PARAMETERS, WEATHER, calling_weather, joined, plain, served
from tests.formats.messages import EXCERPTS

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
INPUT = {
    "input": "How is the weather?",
    "tools": [{"type": "function", **each["function"]} for each in (WEATHER, NOW)],
}
MESSAGE = {
    "messages": BODY["messages"],
    "max_tokens": 400,
    "tools": [
        {"name": "get_weather", "input_schema": PARAMETERS},
        {"name": "now", "input_schema": {"type": "object"}},
    ],
}
CUT_FAMILIES = [
    name for name in EXCERPTS if name not in ("qwen3.5", "glm-4.7", "granite-4", "deepseek-v3.1", "lfm2")
]
"""Each way to write calls once."""
FEW = ["hermes", "qwen3-coder", "generic", "mistral-small", "gpt-oss", "kimi-k2"]


def begun(family: str, end: str) -> str:
    """The beginning of a call, through the first `end`, at which the model ends its turn."""
    text = calling_weather(family)
    return text[: text.index(end) + len(end)]


async def all_replies(server: Any) -> list[tuple[str, Any]]:
    """Why each API's reply ended, and the arguments of each call that it has as a complete one.

    In the order chat completion, response, message; each whole and as a stream.
    """
    replies: list[tuple[str, Any]] = []
    choice = (await server.ok(CHAT, BODY))["choices"][0]
    streamed, reasons = joined(await server.stream(CHAT, BODY))
    assert plain({"content": "", **streamed}) == plain({**choice["message"], "content": ""})
    assert reasons == [choice["finish_reason"]]
    assert not choice["message"]["content"]
    calls = choice["message"].get("tool_calls", [])
    replies.append((reasons[0], [call["function"]["arguments"] for call in calls]))
    whole = await server.ok(RESPONSES, INPUT)
    events = await events_of(server, INPUT)
    final = put_together(events)
    assert events[-1]["type"] == f"response.{whole['status']}"
    for response in (whole, final):
        done = [item["arguments"] for item in response["output"] if item.get("status") == "completed"]
        replies.append((response["status"], [json.loads(each) for each in done]))
    message = await server.ok(MESSAGES, MESSAGE)
    replies.append((message["stop_reason"], [block["input"] for block in message["content"]]))
    _, *parts, delta, _ = await message_events(server, MESSAGE)
    replies.append((delta["delta"]["stop_reason"], [block["input"] for block in blocks(parts)]))
    return replies


@pytest.mark.slow
@pytest.mark.parametrize("family", CUT_FAMILIES)
async def test_a_call_that_the_model_leaves_is_one_that_a_limit_cuts(start: Any, family: str) -> None:
    """In the middle of a string."""
    text = begun(family, "Zü")
    server = await served(start, family, *[text] * 6)
    (reason, arguments), *others = await all_replies(server)
    assert reason == "length"
    assert all(each.replace(" ", "") == '{"city":"Zü' for each in arguments)
    assert others == [("incomplete", []), ("incomplete", []), ("max_tokens", []), ("max_tokens", [])]


@pytest.mark.parametrize("family", FEW)
async def test_after_its_name_alone_there_is_no_call(start: Any, family: str) -> None:
    server = await served(start, family, *[begun(family, "get_weather")] * 6)
    (reason, arguments), *others = await all_replies(server)
    assert (reason, arguments) in [("length", []), ("length", ["{"])]
    assert others == [("incomplete", []), ("incomplete", []), ("max_tokens", []), ("max_tokens", [])]


@pytest.mark.parametrize("family", ["hermes", "llama-pythonic", "gemma4", "gpt-oss", "mistral-nemo"])
async def test_brackets_that_are_missing_are_closed(start: Any, family: str) -> None:
    """After a whole value."""
    text = begun(family, "Zürich")
    closing = calling_weather(family)[len(text) :].partition(",")[0]
    server = await served(start, family, *[text + closing] * 6)
    (reason, arguments), *others = await all_replies(server)
    assert (reason, [json.loads(each) for each in arguments]) == ("tool_calls", [{"city": "Zürich"}])
    done = [{"city": "Zürich"}]
    assert others == [("completed", done), ("completed", done), ("tool_use", done), ("tool_use", done)]


@pytest.mark.parametrize("family", FEW)
async def test_a_forced_call_that_a_limit_cuts_has_no_content(start: Any, family: str) -> None:
    """Its beginning is no text of the reply, nor is a tag behind it."""
    server = await served(start, family)
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    body = {**BODY, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    for n in range(1, 120, 7):
        choice = (await server.ok(CHAT, {**body, "max_tokens": n}))["choices"][0]
        assert not choice["message"]["content"], n
        assert "reasoning_content" not in choice["message"]
        if choice["finish_reason"] == "tool_calls":
            assert plain(choice["message"])["tool_calls"] == [("get_weather", '{"city": "Rome"}')]
        else:
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("logprobs", [False, True])
async def test_the_first_delta_of_a_call_has_its_name_and_no_arguments(start: Any, logprobs: bool) -> None:
    """As OpenAI's; one part of a call in a chunk, also if the call arrives at once."""
    text = "\n".join([calling_weather("hermes")] * 2)
    server = await served(start, "hermes", *[text] * 3)
    chunks = await server.stream(CHAT, {**BODY, "logprobs": logprobs})
    deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    parts = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(each) == 1 for each in parts)
    for index in range(2):
        first, *others = [part for (part,) in parts if part["index"] == index]
        assert {**first, "id": ""} == {
            "index": index, "id": "", "type": "function", "function": {"name": "get_weather", "arguments": ""}
        }  # fmt: skip
        assert "".join(part["function"]["arguments"] for part in others) == CITY
        assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in others)
    added = [each for each in await events_of(server, INPUT) if each["type"] == "response.output_item.added"]
    assert [(each["item"]["name"], each["item"]["arguments"]) for each in added] == [("get_weather", "")] * 2
    begun = [each for each in await message_events(server, MESSAGE) if each["type"] == "content_block_start"]
    assert [(each["content_block"]["name"], each["content_block"]["input"]) for each in begun] == [
        ("get_weather", {})
    ] * 2


def test_each_way_to_write_calls_is_cut() -> None:
    assert {format_of(EXCERPTS[name], {}).name for name in CUT_FAMILIES} == {
        format_of(excerpt, {}).name for excerpt in EXCERPTS.values()
    }
