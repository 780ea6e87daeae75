"""Tool calls and reasoning in chats, whole and streamed; grammars lead the fake model to write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from llamaslot.base.errors import InvalidRequestError
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.recognition import format_of
from llamaslot.prompts.tokenizer import Tokenizer
from tests.fake_backend import FakeBackend, FakeVocab
from tests.formats.messages import EXCERPTS
from tests.prompt_threads import prompt_thread

CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
QUESTION = [{"role": "user", "content": "How is the weather?"}]
CITY = '{"city": "Zürich", "days": 3}'
BODY = {"messages": QUESTION, "tools": [WEATHER, NOW]}
HARMONY_CALL = f" to=functions.get_weather<|channel|>commentary json<|message|>{CITY}<|call|>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'


def template(family: str) -> str:
    """A template of a family that writes everything, and mentions what the family is recognised by."""
    return (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %} calls {{ c.function.name }} {{ c.function.arguments }}{% endfor %}\n"
        "{% endfor %}{% for t in tools %}{{ t.function.name }} {% endfor %}assistant: {% if 0 %}"
        f"{{% raw %}}{EXCERPTS[family]}{{% endraw %}}{{% endif %}}"
    )


def leading_to(*texts: str) -> dict[str, Any]:
    """Engine settings with which the k-th request gets the k-th text as its reply."""
    return {"grammars": [f"start: {json.dumps(text)}" for text in texts]}


async def served(start: Any, family: str, *texts: str, **settings: Any) -> Any:
    """A server whose k-th request gets the k-th text; a single text would be for all of them."""
    backend = FakeBackend(n_ctx=4096, n_slots=1)
    engine = leading_to(*texts, "x") if texts else {}
    return await start(backend=backend, template=template(family), engine=engine, **settings)


def joined(chunks: Sequence[Any]) -> tuple[dict[str, Any], list[str | None]]:
    """The message that chunks add up to, and their finish reasons."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for part in value:
                        if part["index"] == len(calls):
                            assert part["type"] == "function"
                            calls.append(
                                {"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                            )
                        for key, text in part["function"].items():
                            calls[part["index"]]["function"][key] += text
                elif value is not None:
                    message[name] = message.get(name, "") + value
    if calls:
        message["tool_calls"] = calls
    reasons = [choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    return message, [reason for reason in reasons if reason]


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the ids of its calls, which are random, and without what is null."""
    result = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in result:
        result["tool_calls"] = [
            (call["function"]["name"], call["function"]["arguments"]) for call in result["tool_calls"]
        ]
    return result


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
async def test_calls_of_every_family_are_found_whole_and_streamed(start: Any, family: str) -> None:
    format_ = format_of(EXCERPTS[family], {})
    text = format_.render([ToolCall("get_weather", CITY, "a1b2c3d4e")])
    server = await served(start, family, text, text)
    whole = (await server.ok(CHAT, BODY))["choices"][0]
    streamed, reasons = joined(await server.stream(CHAT, BODY))
    assert (whole["finish_reason"], reasons) == ("tool_calls", ["tool_calls"])
    (call,) = whole["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == json.loads(CITY)
    assert call["id"]
    assert whole["message"]["content"] is None
    assert plain(streamed) == plain(whole["message"])
    assert (await server.get("/props"))[1]["chat_format"] == format_.name


async def test_text_reasoning_and_several_calls(start: Any) -> None:
    text = f"<think>Hm, {{.\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('Zürich', 'Rome')}"
    server = await served(start, "hermes-thinking", text, text, text, text)
    whole = (await server.ok(CHAT, BODY))["choices"][0]["message"]
    assert (whole["reasoning_content"], whole["content"]) == ("Hm, {.", "Let me see.")
    assert [json.loads(call["function"]["arguments"])["city"] for call in whole["tool_calls"]] == ["Zürich", "Rome"]
    assert len({call["id"] for call in whole["tool_calls"]}) == 2
    # Log-probabilities keep the server from appending what the grammar forces at once.
    chunks = await server.stream(CHAT, {**BODY, "logprobs": True})
    assert plain(joined(chunks)[0]) == plain(whole)
    assert sum("arguments" in json.dumps(chunk) for chunk in chunks) > 10
    one = (await server.ok(CHAT, {**BODY, "parallel_tool_calls": False}))["choices"][0]["message"]
    assert plain(one)["tool_calls"] == plain(whole)["tool_calls"][:1]
    none = (await server.ok(CHAT, {**BODY, "tool_choice": "none", "reasoning_format": "none"}))["choices"][0]
    assert (none["message"]["content"], none["finish_reason"]) == (text, "stop")


@pytest.mark.slow
@pytest.mark.parametrize("family", EXCERPTS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
async def test_a_call_can_be_forced(start: Any, family: str, choice: Any) -> None:
    server = await served(start, family)
    body = {**BODY, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 400, "parallel_tool_calls": False}
    body["tools"][0]["function"]["parameters"] = {
        **PARAMETERS, "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}}
    }  # fmt: skip
    for _ in range(2):
        reply = (await server.ok(CHAT, {**body, "chat_template_kwargs": {"enable_thinking": False}}))["choices"][0]
        assert reply["finish_reason"] == "tool_calls"
        (call,) = reply["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"])["city"] in {"Rome", "Oslo"}


async def test_a_strict_tool_gets_correct_arguments_and_text_is_still_allowed(start: Any) -> None:
    server = await served(start, "hermes")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    backend_free = await server.ok(CHAT, {**BODY, "tools": [strict], "max_tokens": 40})
    assert backend_free["choices"][0]["finish_reason"] in {"stop", "length", "tool_calls"}
    function = {"name": "f", "parameters": {"type": "object", "not": {}}, "strict": True}
    status, reply = await server.post(CHAT, {**BODY, "tools": [{"type": "function", "function": function}]})
    assert (status, reply["error"]["param"]) == (400, "tools[0].function.parameters")
    bad = {"type": "function", "function": {**function, "strict": False}}
    assert await server.ok(CHAT, {**BODY, "tools": [bad], "max_tokens": 4})
    status, reply = await server.post(CHAT, {**BODY, "tools": [bad], "tool_choice": "required"})
    assert (status, reply["error"]["param"]) == (400, "tools[0].function.parameters")


async def test_a_schema_that_cannot_be_followed_is_named_in_the_fields_of_each_api(start: Any) -> None:
    server = await served(start, "hermes")
    good = {**WEATHER["function"], "strict": True}
    bad = {"name": "f", "parameters": {"type": "object", "not": {}}, "strict": True}
    space = {"type": "namespace", "name": "n", "tools": [{"type": "function", **bad}]}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        (
            CHAT,
            "tools[1].function.parameters",
            {**BODY, "tools": [{"type": "function", "function": each} for each in (good, bad)]},
        ),
        (
            "/v1/responses",
            "tools[2].tools[0].parameters",
            {"input": "?", "tools": [{"type": "web_search"}, {"type": "function", **good}, space]},
        ),
        (
            "/v1/messages",
            "tools[1].input_schema",
            {
                "messages": QUESTION,
                "max_tokens": 4,
                "tools": [
                    {"name": each["name"], "input_schema": each["parameters"], "strict": True}
                    for each in (good, bad)
                ],
            },
        ),
    ]
    for path, param, body in asked:
        status, reply = await server.post(path, body)
        assert status == 400
        assert reply["error"]["message"] == f"'{param}': JSON Schema's 'not' is not supported"
        assert reply["error"].get("param", param) == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": [], "tools": [{"name": "now"}]}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"grammar": 'root ::= "x"'}, "grammar"),
        ({"reasoning_format": "loud"}, "reasoning_format"),
    ],
    ids=str,
)
async def test_wrong_tools_are_refused_by_field(start: Any, changes: dict[str, Any], param: str) -> None:
    server = await served(start, "hermes")
    status, reply = await server.post(CHAT, {**BODY, **changes})
    assert (status, reply["error"]["param"]) == (400, param)


async def test_only_allowed_tools_are_forced(start: Any) -> None:
    server = await served(start, "hermes")
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    for choice in ({"type": "allowed_tools", "allowed_tools": allowed}, {"type": "allowed_tools", **allowed}):
        reply = await server.ok(CHAT, {**BODY, "tool_choice": choice, "parallel_tool_calls": False})
        assert plain(reply["choices"][0]["message"])["tool_calls"] == [("now", "{}")]


async def test_content_in_a_schema_or_a_call(start: Any) -> None:
    server = await served(start, "hermes-thinking")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    body = {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        reply = await server.ok(CHAT, {**body, **off, **more})
        assert json.loads(reply["choices"][0]["message"]["content"])["n"] in {1, 2}
    replies = [
        (await server.ok(CHAT, {**body, **off, "tools": [NOW], "seed": seed}))["choices"][0]["message"]
        for seed in range(6)
    ]
    for message in replies:
        if message.get("tool_calls"):
            assert plain(message)["tool_calls"][0] == ("now", "{}")
        else:
            assert json.loads(message["content"])["n"] in {1, 2}


async def test_reasoning_that_the_prompt_opens(start: Any) -> None:
    opened = template("hermes-thinking").replace("assistant: {% if 0 %}", "assistant: <think>\n{% if 0 %}")
    text = "Hm.\n</think>\n\nHello"
    server = await start(template=opened, engine=leading_to(text, text, text), reasoning_format="none")
    default = (await server.ok(CHAT, {"messages": QUESTION}))["choices"][0]["message"]
    assert default["content"] == "<think>\n" + text
    asked = {"messages": QUESTION, "reasoning_format": "deepseek"}
    whole = (await server.ok(CHAT, asked))["choices"][0]["message"]
    assert (whole["reasoning_content"], whole["content"]) == ("Hm.", "Hello")
    assert plain(joined(await server.stream(CHAT, asked))[0]) == plain(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("opens", "continued", "field"),
    [
        (False, {"content": "It "}, "content"),
        (False, {"content": "<think>\nIt "}, "reasoning_content"),
        (False, {"content": "<think>It</think> is "}, "content"),
        (True, {"content": "It "}, "content"),
        (True, {"content": None, "reasoning_content": "It "}, "reasoning_content"),
        (True, {"content": "", "reasoning_content": ""}, "reasoning_content"),
    ],
)
@pytest.mark.parametrize("question", ["What does <think> mean?", "What does <think></think> mean?", "Hello"])
async def test_only_the_continued_message_opens_reasoning(
    start: Any, question: str, opens: bool, continued: dict[str, Any], field: str
) -> None:
    source = template("hermes-thinking")
    if opens:
        source = source.replace("assistant: {% if 0 %}", "assistant: <think>\n{% if 0 %}")
    server = await start(template=source, engine={"grammars": ['start: "hello"']})
    messages = [{"role": "user", "content": question}, {"role": "assistant", **continued}]
    message = (await server.ok(CHAT, {"messages": messages}))["choices"][0]["message"]
    assert message.pop("role") == "assistant"
    assert {name: text for name, text in message.items() if text} == {field: "hello"}


async def test_reasoning_has_a_budget(start: Any) -> None:
    opened = template("hermes-thinking").replace("assistant: {% if 0 %}", "assistant: <think>\n{% if 0 %}")
    server = await start(backend=FakeBackend(n_ctx=4096), template=opened, reasoning_budget=20)
    body = {"messages": QUESTION, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    for n, fields in ((20, {}), (7, {"reasoning_budget_tokens": 7}), (5, {"thinking_budget_tokens": 5})):
        whole = (await server.ok(CHAT, {**body, **fields, "reasoning_format": "none"}))["choices"][0]["message"]
        reasoning, end, content = whole["content"].removeprefix("<think>\n").partition("</think>")
        assert end
        assert len(reasoning.encode(errors="replace")) >= n
        assert content
        parsed = (await server.ok(CHAT, {**body, **fields}))["choices"][0]["message"]
        assert parsed["reasoning_content"] == reasoning.strip()
        assert plain(joined(await server.stream(CHAT, {**body, **fields}))[0]) == plain(parsed)
    called = {**body, **BODY, "tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False}
    message = (await server.ok(CHAT, called))["choices"][0]["message"]
    assert plain(message)["tool_calls"] == [("now", "{}")]
    for fields in ({"logprobs": True}, {"n_probs": 2}, {"grammar": "root ::= [a-z]{40}"}):
        status, reply = await server.post(CHAT, {**body, "reasoning_budget_tokens": 9, **fields})
        assert (status, reply["error"]["param"]) == (400, "reasoning_budget_tokens")
    # Beside them, the server's own budget is none.
    choice = (await server.ok(CHAT, {**body, "n_probs": 2}))["choices"][0]
    assert len(choice["logprobs"]["content"]) == 100
    assert "</think>" not in "".join(row["token"] for row in choice["logprobs"]["content"])
    message = (await server.ok(CHAT, {**body, "grammar": "root ::= [a-z]{40}"}))["choices"][0]["message"]
    assert len(message["reasoning_content"]) == 40


async def test_a_default_grammar_is_for_the_whole_reply_and_not_for_probes(start: Any) -> None:
    opened = template("hermes-thinking").replace("assistant: {% if 0 %}", "assistant: <think>\n{% if 0 %}")
    engine = {"grammars": ["root ::= [a-z]{40}", 'root ::= "second"', 'root ::= "third"']}
    server = await start(template=opened, reasoning_budget=20, engine=engine)
    for body in ({"messages": QUESTION}, {"prompt": "?"}):
        assert (await server.ok("/cache/probe", body))["prompt_tokens"]
    message = (await server.ok(CHAT, {"messages": QUESTION}))["choices"][0]["message"]
    assert len(message["reasoning_content"]) == 40
    assert (await server.ok("/completion", {"prompt": "?"}))["content"] == "second"


async def test_a_schema_comes_behind_the_reasoning_that_the_prompt_opens(start: Any) -> None:
    opened = template("hermes-thinking").replace("assistant: {% if 0 %}", "assistant: <think>\n{% if 0 %}")
    server = await start(backend=FakeBackend(n_ctx=4096), template=opened)
    # Bytes of random text are a tag once in a lifetime: the bias makes the first one begin it.
    body = {
        "messages": QUESTION,
        "json_schema": {"enum": [1, 2]},
        "logit_bias": {str(ord("<")): 100},
        "max_tokens": 40,
        "temperature": 0,
    }
    message = (await server.ok(CHAT, body))["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] in {"", "1", "2"}


async def test_a_template_without_tools_gets_them_in_the_system_message(start: Any) -> None:
    server = await start(template="{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
    ]
    prompt = (await server.ok("/apply-template", {"messages": messages, "tools": [WEATHER]}))["prompt"]
    system, user, assistant, *results, end = prompt.split("\n[")
    assert "get_weather" in system
    assert '"required": ["city"]' in system
    assert system.endswith("Be brief.")
    assert (user, end) == ("user]How is the weather?", "assistant]")
    assert assistant.count('{"name": "get_weather", "arguments": {"city": "Rome"}}') == 2
    assert [each.partition("]")[2] for each in results] == ["sunny", "rain"], "this template writes any role"


async def test_logprobs_cover_the_whole_text_beside_calls(start: Any) -> None:
    server = await served(start, "hermes", CALL, CALL)
    whole = (await server.ok(CHAT, {**BODY, "logprobs": True, "top_logprobs": 1}))["choices"][0]
    assert "".join(each["token"] for each in whole["logprobs"]["content"]) == CALL
    chunks = await server.stream(CHAT, {**BODY, "logprobs": True, "top_logprobs": 1})
    rows = [row for chunk in chunks[:-1] for row in (chunk["choices"][0].get("logprobs") or {}).get("content", [])]
    assert rows == whole["logprobs"]["content"]
    assert plain(joined(chunks)[0]) == plain(whole["message"])


async def test_one_grammar_leads_all_requests_and_a_request_may_bring_its_own(start: Any) -> None:
    server = await start(engine={"grammars": ['root ::= "yes"']})
    for body in ({"messages": QUESTION}, {"messages": QUESTION, "tools": [NOW]}):
        assert (await server.ok(CHAT, body))["choices"][0]["message"]["content"] == "yes"
    assert (await server.ok("/completion", {"prompt": "?"}))["content"] == "yes"
    assert (await server.ok("/completion", {"prompt": "?", "grammar": 'root ::= "no"'}))["content"] == "no"


def test_a_wrong_default_grammar_is_refused_by_name() -> None:
    tokenizer = Tokenizer(FakeVocab(), 100, min_match=0.5)
    with pytest.raises(InvalidRequestError, match="'grammar 0'"):
        prompt_thread(tokenizer, grammars=["root ::= missing"])


async def test_output_that_is_no_call_is_text(start: Any) -> None:
    for text in ("<tool_call>\nnot json\n</tool_call>", '<tool_call>{"name": 5}</tool_call>', "<tool_call>"):
        server = await served(start, "hermes", text)
        choice = (await server.ok(CHAT, BODY))["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_is_reported_with_length(start: Any) -> None:
    server = await served(start, "hermes", CALL, CALL)
    whole = (await server.ok(CHAT, {**BODY, "max_tokens": 60}))["choices"][0]
    assert whole["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    streamed, reasons = joined(await server.stream(CHAT, {**BODY, "max_tokens": 60}))
    assert (plain(streamed), reasons) == (plain(whole["message"]), ["length"])


CUT_FAMILIES = ("hermes", "qwen3-coder", "glm-4.6", "llama-pythonic", "mistral-small", "gpt-oss")
"""Families whose calls are written in each of the ways that there are."""


def calling_weather(family: str) -> str:
    """A call of the tool as models of the family write it."""
    if family == "gpt-oss":
        return HARMONY_CALL
    return format_of(EXCERPTS[family], {}).render([ToolCall("get_weather", CITY, "a1b2c3d4e")])


@pytest.mark.parametrize("family", CUT_FAMILIES)
async def test_a_call_that_a_stop_string_cuts_does_not_look_complete(start: Any, family: str) -> None:
    text = calling_weather(family)
    server = await served(start, family, text, text)
    body = {**BODY, "stop": ["rich"]}
    whole = (await server.ok(CHAT, body))["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert plain(whole["message"])["tool_calls"] == [("get_weather", '{"city": "Zü')]
    streamed, reasons = joined(await server.stream(CHAT, body))
    assert (plain(streamed), reasons) == (plain(whole["message"]), ["stop"])


@pytest.mark.parametrize(
    ("family", "stop"),
    [
        ("hermes", "</tool_call>"), ("qwen3-coder", "</function>"), ("glm-4.6", "</tool_call>"),
        ("llama-pythonic", "]"), ("gpt-oss", "<|call|>"),
    ],
)  # fmt: skip
async def test_a_call_is_complete_where_a_stop_string_follows_it(start: Any, family: str, stop: str) -> None:
    text = calling_weather(family)
    server = await served(start, family, text, text)
    body = {**BODY, "stop": [stop]}
    whole = (await server.ok(CHAT, body))["choices"][0]
    assert (whole["finish_reason"], plain(whole["message"])["tool_calls"]) == (
        "tool_calls",
        [("get_weather", CITY)],
    )
    streamed, reasons = joined(await server.stream(CHAT, body))
    assert (plain(streamed), reasons) == (plain(whole["message"]), ["tool_calls"])


OBJECTS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} calls {{ c.function.name }}"
    "{% for name, value in c.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}{% endfor %}\n"
    "{% endfor %}{% for t in tools %}{{ t.function.name }} {% endfor %}assistant: {# <tool_call> #}"
)
"""A template that reads arguments as an object."""
NO_CALLS = OBJECTS.replace("m.tool_calls", "m.nothing")


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (template("hermes").replace("arguments }}", "arguments + '' }}"), 'get_weather {"city": "Zütool:'),
        (OBJECTS, "get_weather city=Zütool:"),
        (NO_CALLS, '{"name": "get_weather", "arguments": {"city": "Zü"}}'),
    ],
    ids=["text", "object", "no calls"],
)
async def test_a_conversation_goes_on_behind_a_call_that_was_cut(start: Any, source: str, written: str) -> None:
    server = await start(
        backend=FakeBackend(n_ctx=4096, n_slots=1), template=source, engine=leading_to(CALL, *["x"] * 3)
    )
    n_before = len(CALL[: CALL.index("rich")].encode())
    choice = (await server.ok(CHAT, {**BODY, "max_tokens": n_before}))["choices"][0]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "The arguments were no JSON."}
    conversation = {**BODY, "messages": [*QUESTION, choice["message"], result]}
    assert written in (await server.ok("/apply-template", conversation))["prompt"]
    items = [
        {"role": "user", "content": QUESTION[0]["content"]},
        {"type": "function_call", "call_id": call["id"], **call["function"]},
        {"type": "function_call_output", "call_id": call["id"], "output": result["content"]},
    ]
    functions = [{"type": "function", **tool["function"]} for tool in BODY["tools"]]
    usage = (await server.ok(CHAT, conversation))["usage"]
    response = await server.ok("/v1/responses", {"input": items, "tools": functions})
    assert response["usage"]["input_tokens"] == usage["prompt_tokens"]


async def test_a_template_without_results_gets_them_in_messages_of_the_user(start: Any) -> None:
    server = await start(
        template="{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    )
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"sun {i}"} for i in range(2)]
    prompt = (await server.ok("/apply-template", {"messages": [*QUESTION, *results]}))["prompt"]
    _, _, told = prompt.split("[user]")
    assert told.count("tool_response") == 2
    assert told.index("sun 0") < told.index("sun 1")
