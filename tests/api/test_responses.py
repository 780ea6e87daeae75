"""`POST /v1/responses`, whole and streamed; grammars lead the fake model to write what is wanted."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from llamaslot.api.generation.reply_parts import Prob
from llamaslot.api.responses.responses import _TokenTexts
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.recognition import format_of
from llamaslot.protocol.responses import MAX_REPEATED_BYTES
from tests.api.response_events import RESPONSES, events_of, kinds, plain, put_together, text_of
from tests.api.test_tools import CALL, CITY, PARAMETERS, leading_to, served, template
from tests.fake_backend import FakeBackend
from tests.formats.messages import EXCERPTS

WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
NOW = {"type": "function", "name": "now", "description": "The time."}
BODY = {"input": "How is the weather?", "tools": [WEATHER, NOW]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
PATCH_TEXT = '*** Begin Patch\n+"ünï"\n'
COUNT = "/v1/messages/count_tokens"
SHARED = ("model", "max_output_tokens", "temperature", "tools", "tool_choice", "text", "metadata", "instructions")


def calling(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def both(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    """The response to a body that is sent twice, the second time streamed: both must be the same."""
    whole = await server.ok(RESPONSES, body)
    streamed = put_together(await events_of(server, body))
    assert plain(streamed) == plain(whole)
    for name in ("input_tokens", "output_tokens", "output_tokens_details"):
        assert streamed["usage"][name] == whole["usage"][name]
    return whole  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
async def test_calls_of_every_family_are_items_whole_and_streamed(start: Any, family: str) -> None:
    text = format_of(EXCERPTS[family], {}).render([ToolCall("get_weather", CITY, "a1b2c3d4e")])
    server = await served(start, family, text, text)
    response = await both(server, BODY)
    (call,) = response["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert json.loads(call["arguments"]) == json.loads(CITY)
    assert call["id"].startswith("fc_")
    assert call["call_id"]
    assert response["status"] == "completed"


async def test_reasoning_text_and_calls_are_items_in_their_order(start: Any) -> None:
    text = f"<think>Hm, {{.\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('Zürich', 'Rome')}"
    server = await served(start, "hermes-thinking", text, text, text)
    response = await both(server, BODY)
    reasoning, message, *calls = response["output"]
    assert (reasoning["type"], text_of(reasoning), reasoning["summary"]) == ("reasoning", "Hm, {.", [])
    assert (message["type"], message["role"], text_of(message)) == ("message", "assistant", "Let me see.")
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Zürich", "Rome"]
    assert "encrypted_content" not in reasoning
    assert len({item["id"] for item in response["output"]}) == 4
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < response["usage"]["output_tokens"]
    one = await server.ok(RESPONSES, {**BODY, "parallel_tool_calls": False})
    assert kinds(one) == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("logprobs", [False, True], ids=["plain", "logprobs"])
async def test_items_alternate_as_the_model_writes_them(start: Any, logprobs: bool) -> None:
    parts = ["<|channel|>commentary<|message|>First.<|end|>", "<|start|>assistant<|channel|>analysis<|message|>Hm"]
    text = f"{parts[0]}{parts[1]}<|end|><|start|>assistant<|channel|>final<|message|>Done."
    server = await served(start, "gpt-oss", text, text)
    # Without log-probabilities, all that a grammar forces comes in one event.
    response = await both(server, {**BODY, "include": ["message.output_text.logprobs"] if logprobs else []})
    assert [(item["type"], text_of(item)) for item in response["output"]] == [
        ("message", "First."),
        ("reasoning", "Hm"),
        ("message", "Done."),
    ]
    if logprobs:
        messages = [item["content"][0] for item in response["output"] if item["type"] == "message"]
        for message in messages:
            assert "".join(each["token"] for each in message["logprobs"]) == message["text"]


async def test_logprobs_cover_the_text_of_messages(start: Any) -> None:
    server = await served(start, "hermes", f"Let me see.\n{CALL}", f"Let me see.\n{CALL}")
    response = await both(server, {**BODY, "top_logprobs": 2, "seed": 1})
    message, call = response["output"]
    rows = message["content"][0]["logprobs"]
    assert "".join(row["token"] for row in rows) == "Let me see."
    assert {len(row["top_logprobs"]) for row in rows} == {2}
    assert call["type"] == "function_call"
    assert response["top_logprobs"] == 2


async def test_a_stop_string_ends_text_and_logprobs_alike(start: Any) -> None:
    server = await start(engine=leading_to("one two three", "one two three", "x"))
    response = await both(server, {"input": "Hi", "stop": ["two"], "include": ["message.output_text.logprobs"]})
    (message,) = response["output"]
    assert text_of(message) == "one "
    assert "".join(row["token"] for row in message["content"][0]["logprobs"]) == "one "


async def test_a_call_that_a_stop_string_cuts_is_incomplete(start: Any) -> None:
    server = await served(start, "hermes", *[CALL] * 4)
    response = await both(server, {**BODY, "stop": ["rich"]})
    (call,) = response["output"]
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"city": "Zü')
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    (call,) = (await both(server, {**BODY, "stop": ["</tool_call>"]}))["output"]
    assert (call["status"], call["arguments"]) == ("completed", CITY)


@pytest.mark.slow
def test_the_tokens_of_a_long_text_are_found_in_linear_time() -> None:
    n, texts = 200_000, _TokenTexts()
    probs = [Prob(i, "eight...", []) for i in range(n)]
    started = time.process_time()
    found = list(texts.add("eight..." * n + "rest", probs))
    assert time.process_time() - started < 3, "copying the text for each token takes ten times as long"
    assert [piece for piece, _ in found] == ["eight..."] * n
    assert texts.rest() == "rest"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "x" * MAX_REPEATED_BYTES),
        ("safety_identifier", "x" * MAX_REPEATED_BYTES),
        ("tool_choice", {"type": "function", "name": "now", "x": "x" * MAX_REPEATED_BYTES}),
        ("reasoning", {"effort": "x" * MAX_REPEATED_BYTES}),
    ],
)
async def test_what_the_reply_repeats_is_limited(server: Any, field: str, value: Any) -> None:
    status, reply = await server.post(RESPONSES, {"input": "Hello", "tools": [NOW], field: value})
    assert (status, reply["error"]["param"]) == (400, field)


async def test_what_tools_have_beside_what_is_in_the_prompt_is_limited_by_the_context(server: Any) -> None:
    tools = [{**NOW, "more": "x" * 10**6}]
    status, reply = await server.post(RESPONSES, {"input": "Hello", "tools": tools, "store": False})
    assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")


async def test_the_reply_repeats_the_request(start: Any) -> None:
    server = await start()
    body = {
        "model": "any",
        "instructions": "Be brief.",
        "input": "Hello",
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.5,
        "tools": [NOW],
        "tool_choice": "none",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "flex",
        "truncation": "disabled",
        "store": False,
        "seed": 1,
        "ignore_eos": True,
    }
    response = await both(server, body)
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"]) == ("response", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 5
    assert response["model"] == "fake.gguf"
    same = set(body) - {"model", "input", "tools", "service_tier", "seed", "ignore_eos"}
    assert {name: response[name] for name in same} == {name: body[name] for name in same}
    assert response["tools"] == [{**NOW, "strict": False}]
    assert response["service_tier"] == "default"


async def test_a_reply_without_text_has_an_empty_message(start: Any) -> None:
    server = await served(start, "hermes-thinking", "<think>Hm.</think>", "<think>Hm.</think>")
    reasoning, message = (await both(server, BODY))["output"]
    assert (text_of(reasoning), text_of(message)) == ("Hm.", "")


async def test_a_conversation_of_items_is_the_prompt_of_a_chat(start: Any) -> None:
    server = await served(start, "hermes")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    other = {**call, "id": "call_2"}
    messages = [
        {"role": "system", "content": "Be brief.\n\nNo jokes."},
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
    ]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "No jokes."}]},
        {"type": "message", "role": "user", "content": "How is the weather?"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        *[{"type": "function_call", "name": "get_weather", "arguments": '{"city":"Rome"}', "call_id": each["id"]}
          for each in (call, other)],
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {key: NOW[key] for key in ("name", "description")}}]
    chat = await server.ok("/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 2})
    body = {"instructions": "Be brief.", "input": items, "tools": [NOW], "max_output_tokens": 2}
    response = await server.ok(RESPONSES, body)
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == chat["usage"]["prompt_tokens"] - 1
    assert (await server.ok(f"{RESPONSES}/input_tokens", body)) == {
        "object": "response.input_tokens",
        "input_tokens": chat["usage"]["prompt_tokens"],
    }


LATER = [
    {"role": "developer", "content": "Rules"},
    {"role": "user", "content": "Place"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "developer", "content": "New rules"},
    {"role": "user", "content": "Go on"},
]
NEW_RULES = "<system-reminder>\nNew rules\n</system-reminder>"


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        (
            "false",
            ["system: Rules", "user: Place", "user: Hi", "assistant: Yes?", "system: New rules", "user: Go on"],
        ),
        (
            "loop.index0 and m.role == 'system'",
            ["system: Rules", "user: Place", "user: Hi", "assistant: Yes?", f"user: {NEW_RULES}", "user: Go on"],
        ),
        (
            "loop.index0 and (m.role == 'system' or m.role == loop.previtem.role)",
            ["system: Rules", "user: Place\n\nHi", "assistant: Yes?", f"user: {NEW_RULES}\n\nGo on"],
        ),
    ],
    ids=["any order", "system first", "alternating"],
)
async def test_messages_fit_the_roles_of_the_template(start: Any, refused: str, expected: list[str]) -> None:
    server = await start(
        template=f"{{% for m in messages %}}{{% if {refused} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    prompt = "".join(f"{line}\n" for line in expected)
    count = await server.ok(f"{RESPONSES}/input_tokens", {"input": LATER})
    assert count["input_tokens"] == 1 + len(prompt), "with BOS"
    chat = await server.ok("/apply-template", {"messages": LATER})
    assert chat["prompt"] == prompt
    # In Anthropic's API, messages of the user that follow each other are one.
    first, _, *others = LATER
    count = await server.ok("/v1/chat/completions/input_tokens", {"messages": [first, *others]})
    later = [{**each, "role": each["role"].replace("developer", "system")} for each in others]
    assert await server.ok(COUNT, {"system": first["content"], "messages": later}) == count


async def test_a_custom_tool_is_called_with_a_text(start: Any) -> None:
    call = calling("apply_patch", {"input": PATCH_TEXT})
    server = await served(start, "hermes", call, call, "<tool_call>", call)
    body = {"input": "Edit it.", "tools": [PATCH, NOW]}
    (item,) = (await both(server, body))["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH_TEXT)
    assert item["id"].startswith("ctc_")
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    again = await server.ok(RESPONSES, {**body, "input": [{"role": "user", "content": "Edit it."}, item, output]})
    assert again["status"] == "completed"
    choice = {**body, "tool_choice": {"type": "custom", "name": "apply_patch"}}
    assert (await server.ok(RESPONSES, choice))["tool_choice"] == choice["tool_choice"]


async def test_input_of_a_custom_tool_that_is_cut_is_returned_as_it_is(start: Any) -> None:
    call = calling("apply_patch", {"input": PATCH_TEXT})
    server = await served(start, "hermes", call, call)
    response = await both(server, {"input": "Edit it.", "tools": [PATCH], "max_output_tokens": 80})
    (item,) = response["output"]
    assert (response["status"], item["status"], item["type"]) == ("incomplete", "incomplete", "custom_tool_call")
    assert item["input"].startswith('{"input": "***')


async def test_local_shell_is_called_with_a_command(start: Any) -> None:
    call = calling("local_shell", {"command": ["ls", "-l"], "working_directory": "/tmp"})
    server = await served(start, "hermes", call, call)
    body = {"input": "List it.", "tools": [{"type": "local_shell"}]}
    (item,) = (await both(server, body))["output"]
    assert item["type"] == "local_shell_call"
    assert item["action"] == {
        "type": "exec",
        "command": ["ls", "-l"],
        "env": {},
        "timeout_ms": None,
        "working_directory": "/tmp",
        "user": None,
    }
    output = {"type": "local_shell_call_output", "id": item["call_id"], "output": "a.txt"}
    again = await server.ok(RESPONSES, {**body, "input": [item, output], "max_output_tokens": 2})
    assert again["usage"]["input_tokens"] > 20


async def test_functions_of_a_namespace_are_called_by_their_names(start: Any) -> None:
    call = calling("mcp__files__read", {"path": "a"})
    server = await served(start, "hermes", call, call)
    read = {"type": "function", "name": "read", "parameters": {"properties": {"path": {"type": "string"}}}}
    space = {"type": "namespace", "name": "mcp__files__", "description": "?", "tools": [read]}
    response = await both(server, {"input": "Read it.", "tools": [space, NOW]})
    (item,) = response["output"]
    assert (item["name"], item["namespace"]) == ("read", "mcp__files__")
    assert response["tools"] == [space, {**NOW, "strict": False}]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "text"}
    again = await server.ok(RESPONSES, {"input": [item, output], "max_output_tokens": 1, "ignore_eos": True})
    assert again["status"] == "incomplete"


async def test_a_web_search_is_not_offered_to_the_model(start: Any) -> None:
    server = await served(start, "hermes")
    search = {"type": "web_search", "external_web_access": False}
    with_search = await server.ok(RESPONSES, {**BODY, "tools": [search, WEATHER], "max_output_tokens": 1})
    without = await server.ok(RESPONSES, {**BODY, "tools": [WEATHER], "max_output_tokens": 1})
    assert with_search["usage"]["input_tokens"] == without["usage"]["input_tokens"]
    assert [tool["type"] for tool in with_search["tools"]] == ["function"]
    only = await server.ok(RESPONSES, {**BODY, "tools": [search], "tool_choice": "auto", "max_output_tokens": 1})
    assert only["tools"] == []


async def test_reasoning_comes_back_encoded(start: Any) -> None:
    text = f"<think>Hm, é.</think>\n\n{CALL}"
    with_reasoning = template("hermes-thinking").replace(
        "{{ m.content }}", "{{ m.content }}[{{ m.reasoning_content }}]"
    )
    server = await start(
        backend=FakeBackend(n_ctx=4096, n_slots=1),
        template=with_reasoning,
        engine=leading_to(text, text, *["x"] * 4),
    )
    reasoning, call = (await both(server, {**BODY, "include": ["reasoning.encrypted_content"]}))["output"]
    assert reasoning["encrypted_content"]
    user = {"role": "user", "content": BODY["input"]}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    # Codex does not send the content of reasoning back.
    forms = [
        [reasoning],
        [{key: reasoning[key] for key in ("type", "summary", "encrypted_content")}],
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm, é."}]}],
        [],
        [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABfromelsewhere"}],
    ]
    # Without the cache, no message is restored: reasoning that the client left out is missing.
    uncached = {**BODY, "cache_prompt": False}
    counts = [
        (await server.ok(f"{RESPONSES}/input_tokens", {**uncached, "input": [user, *form, call, output]}))
        for form in forms
    ]
    n_with, n_without = counts[0]["input_tokens"], counts[3]["input_tokens"]
    assert n_with == n_without + len("Hm, é.".encode())
    assert [count["input_tokens"] for count in counts] == [n_with, n_with, n_with, n_without, n_without]


async def test_text_in_a_schema(start: Any) -> None:
    server = await start()
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    for _ in range(2):
        (message,) = (await server.ok(RESPONSES, {"input": "A number", "text": {"format": form}}))["output"]
        assert json.loads(text_of(message))["n"] in {1, 2}
    response = await server.ok(RESPONSES, {"input": "A number", "text": {"format": form}})
    assert response["text"]["format"] == form
    (call,) = (
        await server.ok(RESPONSES, {**BODY, "tools": [NOW], "tool_choice": {"type": "function", "name": "now"}})
    )["output"]
    assert (call["name"], call["arguments"]) == ("now", "{}")


async def test_progress_and_timings(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=1024))
    body = {"input": "This is a test" * 10, "max_output_tokens": 8, "ignore_eos": True}
    events = await events_of(server, {**body, "timings_per_token": True, "return_progress": True})
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] > 100
    assert all("timings" in event for event in events if event["type"] == "response.output_text.delta")
    assert events[-1]["timings"]["predicted_n"] == 8
    assert put_together(events)["cache"]["computed"] > 100
    events = await events_of(server, body)
    assert not any("timings" in event for event in events[:-1])


async def test_on_llama_servers_path_a_limit_ends_the_stream_with_completed(start: Any) -> None:
    server = await start()
    body = {"input": "Hello", "max_output_tokens": 2, "ignore_eos": True}
    last = (await events_of(server, body, path="/responses"))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.completed", "incomplete")
    assert (await events_of(server, body))[-1]["type"] == "response.incomplete"


@pytest.mark.slow
async def test_an_error_in_a_stream_is_an_event_and_ends_the_response(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=60_000), request_timeout=1)
    created, *_, error, failed = await events_of(server, {"input": "x", "ignore_eos": True})
    assert created["type"] == "response.created"
    assert (error["type"], error["code"]) == ("error", "timeout_error")
    assert "--request-timeout" in error["message"]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    status, _ = await server.get(f"{RESPONSES}/{failed['response']['id']}")
    assert status == 404, "it is not stored"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "pope", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "a"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [NOW, NOW]}, "tools[1]"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0]"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["everything"]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_by_field(start: Any, changes: dict[str, Any], param: str) -> None:
    server = await served(start, "hermes")
    # Tokens are counted whatever the reply would have to match.
    paths = [RESPONSES] if param == "text.format.schema" else [RESPONSES, f"{RESPONSES}/input_tokens"]
    for path in paths:
        status, reply = await server.post(path, {**BODY, **changes, "stream": True})
        assert (status, reply["error"]["param"]) == (400, param), reply
        assert "messages" not in reply["error"]["message"]


async def test_a_schema_that_cannot_be_followed_is_refused_unless_tokens_are_counted(start: Any) -> None:
    server = await served(start, "hermes")
    body = {**BODY, "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}
    status, reply = await server.post(RESPONSES, body)
    assert (status, reply["error"]["param"]) == (400, "text.format.schema"), reply
    counted = await server.ok(f"{RESPONSES}/input_tokens", body)
    assert counted == await server.ok(f"{RESPONSES}/input_tokens", BODY)


async def test_no_values_stand_for_the_defaults(start: Any) -> None:
    server = await start()
    names = (
        "instructions",
        "previous_response_id",
        "include",
        "text",
        "reasoning",
        "tools",
        "tool_choice",
        "store",
    )
    off = {"background": False, "conversation": None, "truncation": None, "metadata": None, "stream": None}
    body = {"input": "Hello", "max_output_tokens": 2, **dict.fromkeys(names), **off}
    assert (await server.ok("/responses", body))["store"] is True


async def test_a_prompt_that_is_too_long_is_refused_before_the_stream(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=64))
    status, reply = await server.post(RESPONSES, {"input": "x" * 200, "stream": True})
    assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")
