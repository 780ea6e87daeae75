"""Anthropic's Messages API, whole and streamed; grammars lead the fake model to write tool calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.api.anthropic import Block, BlockEvent, Blocks
from llamaslot.api.context import ApiSettings
from llamaslot.api.http_server import create_app, serve
from llamaslot.base.backend import Status
from llamaslot.base.errors import QueueFullError
from llamaslot.base.generation.tools import ParserOptions, encoded_tools
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.format import Format, ParsedMessage
from llamaslot.formats.recognition import format_of
from tests.api.test_tools import CALL, CITY, PARAMETERS, leading_to, served, template
from tests.fake_backend import FakeBackend
from tests.formats.messages import EXCERPTS, TOOLS, made
from tests.formats.test_chunking import cut, damaged_cases

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"name": "get_weather", "input_schema": PARAMETERS}
NOW = {"name": "now", "description": "The time.", "input_schema": {"type": "object"}}
PLAIN = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
BODY = {"messages": HELLO, "max_tokens": 400, "tools": [WEATHER, NOW]}


async def events(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each with its own name in front."""
    async with server.session.post(server.url + MESSAGES, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        text = await response.text()
    found = []
    *parts, rest = text.split("\n\n")
    assert rest == ""
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream add up to."""
    start, *middle, delta, stop = parts
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    message["content"] = blocks(middle)
    message |= delta["delta"]
    message["usage"] |= delta["usage"]
    return message


def blocks(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks that events add up to, by a reader of its own that insists on their order.

    Calls that are not complete are left out, as in a whole message.
    """
    content: list[dict[str, Any]] = []
    is_open, texts = False, [""]
    for part in parts:
        assert part["index"] == len(content) - (part["type"] != "content_block_start")
        assert is_open == (part["type"] != "content_block_start")
        match part["type"]:
            case "content_block_start":
                is_open, texts = True, []
                content.append(part["content_block"])
                assert not content[-1].get(content[-1]["type"])
                assert content[-1].get("input", {}) == {}
            case "content_block_delta":
                kind, text = part["delta"].values()
                assert kind in KINDS[content[-1]["type"]]
                assert "signature_delta" not in texts, "the signature is the last part"
                texts.append(kind if kind == "signature_delta" else text)
            case "content_block_stop":
                is_open, block = False, content[-1]
                match block["type"]:
                    case "tool_use":
                        block["input"] = parsed("".join(texts))
                    case "thinking":
                        assert texts.pop() == "signature_delta"
                        block["thinking"] = "".join(texts)
                    case "text":
                        block["text"] = "".join(texts)
    assert not is_open
    return [block for block in content if block.get("input", {}) is not None]


KINDS = {
    "text": ["text_delta"],
    "thinking": ["thinking_delta", "signature_delta"],
    "tool_use": ["input_json_delta"],
}


def parsed(arguments: str) -> Any:
    """The arguments of a call; None if they were cut."""
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def without_id(block: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key != "id"}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs between two requests: ids, and what was cached."""
    usage = message["usage"]
    total = sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))
    content = [without_id(block) for block in message["content"]]
    return {**message, "id": "", "content": content, "usage": [total, usage["output_tokens"]]}


async def test_a_text_and_its_usage(server: Any) -> None:
    first = await server.ok(MESSAGES, PLAIN)
    assert first["id"].startswith("msg_")
    assert (first["type"], first["role"], first["model"]) == ("message", "assistant", "fake.gguf")
    (block,) = first["content"]
    assert block["type"] == "text"
    assert block["text"]
    assert first["stop_reason"] in {"end_turn", "max_tokens"}
    assert "timings" not in first
    chat = await server.ok("/v1/chat/completions", PLAIN)
    n_prompt = chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["message"]["content"] == block["text"]
    usage = first["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (n_prompt, 0)
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    again = (await server.ok(MESSAGES, PLAIN))["usage"]
    assert (again["input_tokens"], again["cache_read_input_tokens"]) == (1, n_prompt - 1)
    assert usage["cache_creation_input_tokens"] == again["cache_creation_input_tokens"] == 0
    streamed = await events(server, PLAIN)
    assert streamed[0]["message"]["usage"]["cache_read_input_tokens"] == n_prompt - 1
    assert plain(joined(streamed)) == plain(first)


async def test_why_a_reply_ended(server: Any) -> None:
    body = {**PLAIN, "ignore_eos": True}
    text = (await server.ok(MESSAGES, body))["content"][0]["text"]
    for more, reason, word in (
        ({}, "max_tokens", None),
        ({"stop_sequences": ["\0", text[5:7]]}, "stop_sequence", text[5:7]),
        ({"max_tokens": 0}, "max_tokens", None),
    ):
        whole = await server.ok(MESSAGES, {**body, **more})
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, word)
        assert plain(joined(await events(server, {**body, **more}))) == plain(whole)
    assert whole["content"] == []
    for _ in range(20):
        ended = await server.ok(MESSAGES, {**PLAIN, "max_tokens": 1000, "temperature": 1})
        if ended["stop_reason"] == "end_turn":
            break
    assert ended["stop_reason"] == "end_turn"


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
async def test_calls_of_every_family_are_found_whole_and_streamed(start: Any, family: str) -> None:
    text = format_of(EXCERPTS[family], {}).render([ToolCall("get_weather", CITY, "a1b2c3d4e")])
    server = await served(start, family, text, text)
    whole = await server.ok(MESSAGES, BODY)
    (block,) = whole["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "get_weather", json.loads(CITY))
    assert block["id"]
    assert whole["stop_reason"] == "tool_use"
    assert plain(joined(await events(server, BODY))) == plain(whole)


async def test_thinking_text_and_several_calls(start: Any) -> None:
    text = f"<think>Hm, {{.\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('Zürich', 'Rome')}\nThat was it."
    server = await served(start, "hermes-thinking", *[text] * 6)
    whole = await server.ok(MESSAGES, BODY)
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use", "text"], "in the order of the output"
    assert whole["content"][0] == {"type": "thinking", "thinking": "Hm, {.", "signature": ""}
    assert [block["text"] for block in whole["content"] if block["type"] == "text"] == [
        "Let me see.",
        "That was it.",
    ]
    assert len({block["id"] for block in whole["content"] if block["type"] == "tool_use"}) == 2
    assert plain(joined(await events(server, BODY))) == plain(whole)
    omitted = {**BODY, "thinking": {"type": "adaptive", "display": "omitted"}}
    hidden = await server.ok(MESSAGES, omitted)
    assert hidden["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert plain(joined(await events(server, omitted))) == plain(hidden)
    one = await server.ok(MESSAGES, {**BODY, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use", "text"]
    none = await server.ok(MESSAGES, {**BODY, "tool_choice": {"type": "none"}})
    assert [block["type"] for block in none["content"]] == ["thinking", "text"]


async def test_numbers_in_arguments_are_kept_as_they_are_written(start: Any) -> None:
    arguments = '{"a": 1.0, "b": 1e400, "c": 123456789012345678901234567890}'
    text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
    server = await served(start, "hermes", text)
    async with server.session.post(server.url + MESSAGES, json=BODY) as response:
        assert f'"input":{arguments}' in await response.text()


async def test_a_call_that_is_cut_is_left_out(start: Any) -> None:
    server = await served(start, "hermes", CALL, CALL)
    body = {**BODY, "max_tokens": 60}
    whole = await server.ok(MESSAGES, body)
    assert (whole["stop_reason"], whole["content"]) == ("max_tokens", [])
    assert plain(joined(await events(server, body))) == plain(whole)


async def test_a_call_that_a_stop_sequence_cuts_does_not_look_complete(start: Any) -> None:
    server = await served(start, "hermes", CALL, CALL)
    body = {**BODY, "stop_sequences": ["rich"]}
    whole = await server.ok(MESSAGES, body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "rich")
    assert whole["content"] == []
    assert plain(joined(await events(server, body))) == plain(whole)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}], ids=str)
async def test_a_call_can_be_forced(start: Any, choice: Any) -> None:
    server = await served(start, "hermes")
    body = {**BODY, "tools": [NOW], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    reply = await server.ok(MESSAGES, body)
    assert [(block["type"], block["name"], block["input"]) for block in reply["content"]] == [
        ("tool_use", "now", {})
    ]
    assert reply["stop_reason"] == "tool_use"


async def test_text_by_a_schema(start: Any) -> None:
    server = await served(start, "hermes")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    body = {**PLAIN, "max_tokens": 60, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    reply = await server.ok(MESSAGES, body)
    assert json.loads(reply["content"][0]["text"])["n"] in {1, 2}


async def test_the_last_message_of_the_assistant_is_continued(server: Any) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    prompt = (await server.ok("/apply-template", {"messages": begun}))["prompt"]
    assert prompt.endswith("The answer is (")
    own = await server.ok("/completion", {"prompt": prompt, "n_predict": 20, "temperature": 0})
    reply = await server.ok(MESSAGES, {**PLAIN, "messages": begun, "temperature": 0})
    assert reply["content"][0]["text"] == own["content"]


async def test_thinking_can_be_turned_off(start: Any) -> None:
    source = "{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    server = await start(template=source, reasoning=False)
    turned_on = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    for more, word in (({}, "False"), (turned_on, "True"), ({"thinking": {"type": "disabled"}}, "False")):
        counted = await server.ok(COUNT, {"messages": HELLO, **more})
        tokenized = await server.ok("/tokenize", {"content": f"{word}Hello<think>", "add_special": True})
        assert counted == {"input_tokens": len(tokenized["tokens"])}


async def test_count_tokens_counts_the_prompt_of_the_same_body(start: Any) -> None:
    server = await start(template=template("hermes-thinking"), backend=FakeBackend(n_ctx=4096))
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]}
    asked = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Rome"}}
    thinking = {"type": "thinking", "thinking": "Let me ask.", "signature": ""}
    for messages in (
        HELLO,
        [*HELLO, {"role": "assistant", "content": [thinking, asked]}, {"role": "user", "content": [result]}],
    ):
        body = {"messages": messages, "system": "Be brief.", "tools": [WEATHER]}
        counted = await server.ok(COUNT, body)
        usage = (await server.ok(MESSAGES, {**body, "max_tokens": 1, "cache_prompt": False}))["usage"]
        assert counted == {"input_tokens": usage["input_tokens"]}
    async with asyncio.timeout(10):
        while server.local.prompts.n_kept:
            await asyncio.sleep(0.005)


async def test_count_tokens_counts_the_tokens_of_remembered_replies(start: Any) -> None:
    """A session's reply may have other tokens than its text."""
    server = await start()
    body = {**PLAIN, "session_id": "mine", "ignore_eos": True}
    text = (await server.ok(MESSAGES, body))["content"][0]["text"]
    more = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "More"}]
    counted = await server.ok(COUNT, {**body, "messages": more})
    usage = (await server.ok(MESSAGES, {**body, "messages": more}))["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] > 0


async def test_count_tokens_counts_whatever_the_reply_would_have_to_match(start: Any) -> None:
    server = await served(start, "hermes")
    tool = {**NOW, "input_schema": {"type": "object", "not": {}}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": {"type": "any"}}
    assert (await server.post(MESSAGES, {**body, "max_tokens": 5}))[0] == 400
    assert (await server.ok(COUNT, body)) == (await server.ok(COUNT, {**body, "tool_choice": None}))


async def test_count_tokens_takes_no_grammar_of_the_next_request(start: Any) -> None:
    server = await start(engine=leading_to("one", "two"))
    await server.ok(COUNT, {"messages": HELLO})
    assert [(await server.ok(MESSAGES, PLAIN))["content"][0]["text"] for _ in range(2)] == ["one", "two"]


@pytest.mark.slow
async def test_pings_are_events(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=20_000, n_slots=1))
    body = {"messages": HELLO, "max_tokens": 19_000, "ignore_eos": True, "stream": True, "sse_ping_interval": 1}
    async with server.session.post(server.url + MESSAGES, json=body) as first:
        await first.content.readuntil(b"content_block_delta")
        async with server.session.post(server.url + MESSAGES, json=body) as second:
            line = await asyncio.wait_for(second.content.readuntil(b"\n\n"), 30)
    assert line == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": HELLO}, 400, "'max_tokens' is required"),
        ({"max_tokens": 5}, 400, "'messages' is required"),
        ({**PLAIN, "temperature": "hot"}, 400, "'temperature': expected a number or null, got a string"),
        ({**PLAIN, "tools": [{**NOW, "type": "bash_20250124"}]}, 400, "'tools[0].type'"),
        ({**BODY, "tool_choice": {"type": "tool", "name": "other"}}, 400, "'tool_choice': 'other'"),
        (
            {
                **PLAIN,
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "not": {}}}},
            },
            400,
            "'output_config.format.schema'",
        ),
        ({**PLAIN, "messages": [{"role": "user", "content": "x" * 2000}]}, 400, "prompt is too long: 2"),
        ({**PLAIN, "messages": [{"role": "user", "content": "x" * 50_000}]}, 400, "prompt is too long: at least "),
        ({**PLAIN, "stop_sequences": ["x"] * 300}, 400, "'stop_sequences' has 300 strings"),
        ({**PLAIN, "stop": ["x"] * 300}, 400, "'stop' has 300 strings"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_errors_have_the_form_of_anthropic(server: Any, body: Any, status: int, message: str) -> None:
    async with server.session.post(server.url + MESSAGES, json=body) as response:
        reply = await response.json()
        assert response.headers["Request-Id"] == reply["request_id"] == response.headers["X-Request-Id"]
    assert (response.status, reply["type"], reply["error"]["type"]) == (status, "error", "invalid_request_error")
    assert message in reply["error"]["message"]
    assert reply.keys() == {"type", "error", "request_id"}


async def test_errors_of_the_middleware_have_it_too(start: Any) -> None:
    server = await start(api_keys=("secret",), max_body_bytes=1000)
    key = {"x-api-key": "secret", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    large = {**PLAIN, "messages": [{"role": "user", "content": "x" * 2000}]}

    async def refused(path: str = MESSAGES, body: Any = PLAIN, method: str = "POST", **headers: str) -> Any:
        async with server.session.request(method, server.url + path, json=body, headers=headers) as response:
            reply = await response.json()
        assert (reply["type"], reply["request_id"]) == ("error", response.headers["X-Request-Id"])
        return response.status, reply["error"]["type"]

    assert await refused() == (401, "authentication_error")
    assert await refused(**{"x-api-key": "wrong"}) == (401, "authentication_error")
    assert await refused(**key, Origin="https://example.org") == (403, "permission_error")
    assert await refused("/v1/messages/batches", **key) == (404, "not_found_error")
    assert await refused(method="PUT", **key) == (405, "invalid_request_error")
    assert await refused(body=large, **key) == (413, "request_too_large")
    assert await refused(COUNT, large, **key) == (413, "request_too_large")
    assert (await server.post(MESSAGES, PLAIN, headers=key))[0] == 200
    server.service.capacity.refusal = QueueFullError("too many", retry_after=1)
    assert await refused(**key) == (429, "rate_limit_error")


async def test_until_the_model_is_loaded_it_is_overloaded() -> None:
    listener = await serve(create_app(ApiSettings()), ["127.0.0.1"], 0)
    url = f"http://127.0.0.1:{listener.addresses[0][1]}{MESSAGES}"
    async with aiohttp.ClientSession() as session, session.post(url, json=PLAIN) as response:
        error = (await response.json())["error"]
    assert (response.status, error) == (503, {"type": "overloaded_error", "message": "Loading model"})
    await listener.close()


async def test_an_error_in_a_stream_is_its_last_event(start: Any) -> None:
    backend = FakeBackend()
    server = await start(backend=backend)
    backend.failures.extend([(Status.OK, 1)] * 3 + [(Status.FATAL, 0)])
    body = {"messages": HELLO, "max_tokens": 8, "ignore_eos": True, "stream": True}
    async with server.session.post(server.url + MESSAGES, json=body) as response:
        *_, last, rest = (await response.text()).split("\n\n")
    assert (response.status, rest) == (200, "")
    name, data = last.split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == ("event: error", "error", "api_error")
    assert error["request_id"] == response.headers["X-Request-Id"]


def written(
    format_: Format, tools: Any, pieces: list[str], options: dict[str, Any]
) -> tuple[list[BlockEvent], list[Block]]:
    """The events and the blocks of a message whose text arrives in pieces."""
    message = ParsedMessage(format_, ParserOptions(encoded_tools(tools), **options), "msg_1")
    writer = Blocks(omit_thinking=False)
    found = [each for piece in pieces for each in writer.add(message.push(piece))]
    return [*found, *writer.add(message.push("", "eos")), *writer.close()], writer.complete


@pytest.mark.parametrize("family", EXCERPTS)
@given(data=st.data(), cuts=st.lists(st.integers(0, 1000), max_size=12), none=st.booleans())
def test_a_stream_adds_up_to_the_whole(family: str, data: st.DataObject, cuts: list[int], none: bool) -> None:
    case, text = data.draw(damaged_cases(family))
    options = {**case.options, **({"reasoning_format": "none"} if none else {})}
    tools, format_ = options.pop("tools", TOOLS), made(family)
    whole = json.loads(msgspec.json.encode(written(format_, tools, [text], options)[1]))
    for pieces in (cut(text, cuts), list(text)):
        sent = [json.loads(msgspec.json.encode(each)) for each in written(format_, tools, pieces, options)[0]]
        assert [without_id(block) for block in blocks(sent)] == [without_id(block) for block in whole]
