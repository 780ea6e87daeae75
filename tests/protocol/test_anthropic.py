"""Anthropic's bodies become the chat bodies that stand for the same conversation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llamaslot.base.errors import LlamaslotError
from llamaslot.protocol.anthropic import CountTokensBody, chat_of
from llamaslot.protocol.bodies import ChatBody, decode

HI = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
EDIT = {"type": "clear_thinking_20251015"}


def chat(messages: Any = (HI,), **fields: Any) -> ChatBody:
    return chat_of(decode(msgspec.json.encode({"messages": messages, **fields}), CountTokensBody))


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "read", "input": arguments}


def call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "read", "arguments": arguments}}


def result(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_texts_and_the_system_prompt() -> None:
    assert chat(system="Be brief.").messages == [{"role": "system", "content": "Be brief."}, HI]
    blocks = [{**block, **CACHED} for block in text("a", "b")]
    assert chat([user(*blocks)], system=blocks[:1]).messages == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": text("a", "b")},
    ], "cache_control moves from turn to turn: nothing of it is left"


def test_a_tool_turn() -> None:
    messages = [
        HI,
        assistant(
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "abc"},
            *text("Let me see."),
            use("1", path="ü", n=[1.5, None]),
            use("2", path="b"),
            *text(" Wait."),
        ),
        user(
            {**result("1", content="one"), **CACHED},
            result("2", content=text("two", "parts"), is_error=False),
            *text("Go on.", "Please."),
        ),
    ]
    assert chat(messages).messages == [
        HI,
        {
            "role": "assistant",
            "content": "Let me see. Wait.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("1", '{"path": "ü", "n": [1.5, null]}'), call("2", '{"path": "b"}')],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": text("two", "parts")},
        {"role": "user", "content": text("Go on.", "Please.")},
    ]


def test_texts_stay_in_their_place_among_results() -> None:
    messages = [HI, assistant(use("1")), user(*text("a"), result("1"), *text("b"))]
    assert chat(messages).messages[2:] == [
        {"role": "user", "content": "a"},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "user", "content": "b"},
    ]


def test_an_error_without_words_is_told() -> None:
    results = [
        result("1", is_error=True),
        result("2", is_error=True, content=[]),
        result("3", is_error=True, content="no"),
    ]
    found = chat([HI, assistant(use("1"), use("2"), use("3")), user(*results)]).messages[2:]
    assert [message["content"] for message in found] == ["The tool failed.", "The tool failed.", "no"]


def test_tools_that_a_search_found_are_named() -> None:
    found = [{"type": "tool_reference", "tool_name": "read"}, *text("That is all.")]
    messages = chat([HI, assistant(use("1")), user(result("1", content=found))]).messages
    assert messages[-1]["content"] == text("The tool read is available.", "That is all.")


def test_messages_of_one_role_are_one_turn() -> None:
    messages = [
        HI,
        user(*text("there")),
        assistant(*text("a"), use("1")),
        assistant({"type": "thinking", "thinking": "Hm."}, *text("b"), use("2")),
        user(result("1", content="one")),
        user(result("2", content="two")),
        user(*text("c")),
        {"role": "user", "content": "d"},
    ]
    assert chat(messages).messages == [
        {"role": "user", "content": text("Hi", "there")},
        {
            "role": "assistant",
            "content": "a\nb",
            "reasoning_content": "Hm.",
            "tool_calls": [call("1", "{}"), call("2", "{}")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "user", "content": text("c", "d")},
    ]


def test_instructions_within_the_conversation_stay_in_their_place() -> None:
    system = {"role": "system", "content": "Be brief."}
    messages = [
        system,
        HI,
        system,
        assistant(use("1")),
        user(result("1")),
        {**system, "content": text("Be brief.")},
    ]
    assert chat(messages, system="You are.").messages == [
        {"role": "system", "content": text("You are.", "Be brief.")},
        HI,
        system,
        {"role": "assistant", "content": "", "tool_calls": [call("1", "{}")]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        system,
    ]


@pytest.mark.parametrize("messages", [[], [assistant({"type": "redacted_thinking", "data": "x"})], [assistant()]])
def test_a_conversation_without_messages_has_an_empty_one(messages: Any) -> None:
    assert chat(messages, system="s").messages[1:] == [{"role": "user", "content": ""}]


def test_tools() -> None:
    tools = [{**TOOL, **CACHED}, {"type": "custom", "name": "f", "input_schema": {}, "strict": True}]
    tools.append({**TOOL, "input_examples": [{"path": "a"}], "eager_input_streaming": True, "defer_loading": True})
    functions = [tool["function"] for tool in chat(tools=tools).tools or ()]
    assert functions[0] == {"name": "read", "description": "Reads.", "parameters": SCHEMA}
    assert functions[1] == {"name": "f", "description": "", "parameters": {}, "strict": True}
    assert functions[2]["parameters"] == {**SCHEMA, "examples": [{"path": "a"}]}
    assert chat(tools=[]).tools is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any) -> None:
    found = chat(tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == (expected, "disable_parallel_tool_use" not in choice)


def test_options() -> None:
    body = chat(
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        max_tokens=7,
        min_p=0.1,
        cache_salt="s",
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        context_management={"edits": []},
        model="claude",
    )
    assert (body.stop, body.temperature, body.top_k, body.top_p, body.max_tokens) == (["END"], 0.5, 3, 0.9, 7)
    assert (body.min_p, body.cache_salt, body.thinking_budget_tokens) == (0.1, "s", 1024)
    assert body.reasoning_effort == "high"
    assert body.chat_template_kwargs == {"enable_thinking": True}
    assert body.response_format is not None
    assert body.response_format.json_schema is not None
    assert body.response_format.json_schema.schema == SCHEMA
    older = chat(output_format={"type": "json_schema", "schema": SCHEMA}, thinking={"type": "disabled"})
    assert older.response_format == body.response_format
    assert older.chat_template_kwargs == {"enable_thinking": False}
    assert chat(thinking={"type": "adaptive"}).chat_template_kwargs == {"enable_thinking": True}
    assert chat().chat_template_kwargs is None, "the server's default holds"


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, ["", "", "c", "d"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ["", "b", "c", "d"]),
        ({"keep": "all"}, ["a", "b", "c", "d"]),
        ({"keep": {"type": "all"}}, ["a", "b", "c", "d"]),
    ],
)
def test_thinking_of_earlier_turns_is_cleared_if_the_client_wants_it(keep: dict[str, Any], left: list[str]) -> None:
    turns = [assistant({"type": "thinking", "thinking": each}, use(each)) for each in "abcd"]
    messages = [HI, turns[0], user(result("a"), *text("on")), turns[1], HI, turns[2], user(result("c")), turns[3]]
    found = chat(messages, context_management={"edits": [{**EDIT, **keep}]}).messages
    assert [each.get("reasoning_content", "") for each in found if each["role"] == "assistant"] == left


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [HI, {"role": "user", "content": 5}]}, "messages[1].content"),
        (
            {"messages": [HI, user(*text("a"), {"type": "image", "source": {}})]},
            "messages[1].content[1].source.type",
        ),
        ({"messages": [user({"type": "document"})]}, "messages[0].content[0].type"),
        ({"messages": [user(use("1"))]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "thinking", "thinking": "x"})]}, "messages[0].content[0].type"),
        ({"messages": [assistant(result("1"))]}, "messages[0].content[0].type"),
        ({"messages": [assistant({"type": "server_tool_use"})]}, "messages[0].content[0].type"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        (
            {"messages": [user(result("1", content=[{"type": "image"}]))]},
            "messages[0].content[0].content[0].source",
        ),
        ({"messages": [user(result("1", content={}))]}, "messages[0].content[0].content"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [assistant({**use("1"), "input": "x"})]}, "messages[0].content[0].input"),
        ({"messages": [assistant({**use("1"), "name": None})]}, "messages[0].content[0].name"),
        ({"messages": "x"}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 5}, "system"),
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{**EDIT, "keep": 0}]}}, "context_management.edits[0].keep"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"n_probs": 0}, "n_probs"),
        ({"return_tokens": True}, "return_tokens"),
    ],
    ids=str,
)
def test_what_is_wrong_or_missing_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(LlamaslotError) as error:
        chat(**fields)
    assert error.value.param == param
    assert f"'{param}'" in error.value.message


def test_what_changes_nothing_is_accepted() -> None:
    chat(n=1, logprobs=False, return_tokens=False, mcp_servers=[], betas=["x"], speed="fast", container={"id": "x"})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read"}])
def test_a_forced_call_is_made_without_thinking_unless_that_is_asked_for(choice: dict[str, str]) -> None:
    forced = {"tools": [TOOL], "tool_choice": choice}
    assert chat(**forced).chat_template_kwargs == {"enable_thinking": False}
    own = chat(**forced, chat_template_kwargs={"enable_thinking": True})
    assert own.chat_template_kwargs == {"enable_thinking": True}
    asked = chat(**forced, thinking={"type": "enabled", "budget_tokens": 1024})
    assert asked.chat_template_kwargs == {"enable_thinking": True}
    for free in ({"type": "auto"}, {"type": "none"}):
        assert chat(tools=[TOOL], tool_choice=free).chat_template_kwargs is None
