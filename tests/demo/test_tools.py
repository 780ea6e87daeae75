"""The embedded model calls tools: the right one, with the right arguments, and answers with what it returned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.demo.tool_talk import ToolDialogue, held_out_calls, held_out_without_call, openai_form
from tests.live import Server

CHAT = "/v1/chat/completions"


def reply(demo: Server, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that answers a conversation, unconstrained and greedy."""
    body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 200}
    message: dict[str, Any] = demo.post(CHAT, body)["choices"][0]["message"]
    return message


def calls_and_answers(demo: Server, dialogue: ToolDialogue) -> tuple[bool, bool]:
    """True if the call is the expected one; True if the answer to its result has the result in it."""
    messages, tools = openai_form(dialogue.messages)
    message = reply(demo, messages, tools)
    expected = json.loads(dialogue.call.split("\n")[1])
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    found = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
    if found != [expected]:
        return False, False
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": dialogue.result}
    answer = reply(demo, [*messages, message, result], tools)
    return True, answer["content"] == dialogue.answer and not answer.get("tool_calls")


def test_the_server_reads_and_renders_tools_as_hermes_does(demo: Server) -> None:
    assert demo.get("/props")["chat_format"] == "hermes"


@pytest.mark.slow
def test_it_calls_the_right_tool_and_uses_the_result(demo: Server) -> None:
    outcomes = [calls_and_answers(demo, dialogue) for dialogue in held_out_calls(40, 2)]
    assert sum(called for called, _ in outcomes) >= 36
    assert sum(answered for _, answered in outcomes) >= 35


@pytest.mark.slow
def test_it_calls_no_tool_where_none_is_needed(demo: Server) -> None:
    right = 0
    for dialogue in held_out_without_call(20, 2):
        messages, tools = openai_form(dialogue.messages)
        message = reply(demo, messages, tools)
        right += message["content"] == dialogue.answer and not message.get("tool_calls")
    assert right >= 19
