"""Items of the Responses API as messages: which of them are one turn of the assistant."""

from __future__ import annotations

from typing import Any

from llamaslot.protocol.responses import ItemReader


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def output(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}"}


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def reasoned(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def turns(*items: dict[str, Any]) -> list[tuple[str, str, str, list[str]]]:
    """Role, content, reasoning and ids of calls of each message."""
    found = ItemReader()
    for i, item in enumerate(items):
        found.add(item, f"input[{i}]")
    return [
        (
            message["role"],
            message["content"],
            message.get("reasoning_content", ""),
            [each["id"] for each in message.get("tool_calls", ())],
        )
        for message in found.messages()
    ]


def test_reasoning_text_and_calls_are_one_turn() -> None:
    assert turns(reasoned("Hm."), said("assistant", "I look."), call(1), call(2), output(1), output(2)) == [
        ("assistant", "I look.", "Hm.", ["c1", "c2"]),
        ("tool", "result 1", "", []),
        ("tool", "result 2", "", []),
    ]


def test_a_turn_ends_with_the_result_of_a_call_and_with_a_message_of_another_role() -> None:
    for other, message in (
        (output(1), ("tool", "result 1", "", [])),
        (said("user", "And?"), ("user", "And?", "", [])),
        (said("developer", "Look."), ("developer", "Look.", "", [])),
    ):
        for item, expected in (
            (call(2), ("assistant", "", "", ["c2"])),
            (said("assistant", "So."), ("assistant", "So.", "", [])),
            (reasoned("Hm."), ("assistant", "", "Hm.", [])),
        ):
            assert turns(call(1), other, item) == [("assistant", "", "", ["c1"]), message, expected]


def test_a_second_text_and_reasoning_behind_text_or_calls_begin_another_turn() -> None:
    first, second = said("assistant", "One."), said("assistant", "Two.")
    assert turns(first, second) == [("assistant", "One.", "", []), ("assistant", "Two.", "", [])]
    assert turns(call(1), second) == [("assistant", "", "", ["c1"]), ("assistant", "Two.", "", [])]
    assert turns(first, reasoned("Hm."), call(1)) == [
        ("assistant", "One.", "", []),
        ("assistant", "", "Hm.", ["c1"]),
    ]
    assert turns(call(1), reasoned("Hm."), call(2)) == [
        ("assistant", "", "", ["c1"]),
        ("assistant", "", "Hm.", ["c2"]),
    ]
    assert turns(reasoned("One."), reasoned("Two."), second) == [
        ("assistant", "", "One.", []),
        ("assistant", "Two.", "Two.", []),
    ]
