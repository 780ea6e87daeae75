"""Streams of responses, checked event by event and put together."""

from __future__ import annotations

import json
from typing import Any

RESPONSES = "/v1/responses"


async def events_of(server: Any, body: dict[str, Any], path: str = RESPONSES) -> list[dict[str, Any]]:
    """The events of a streamed response, whose names are their types."""
    sent = {**body, "stream": True}
    async with server.session.post(server.url + path, json=sent) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        blocks = (await response.text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that the events add up to; each item must be complete before the next one begins."""
    created, in_progress, *others, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    response = created["response"]
    assert in_progress["response"] == response
    assert (response["status"], response["output"]) == ("in_progress", [])
    output: list[dict[str, Any]] = []
    opened: dict[str, Any] | None = None
    for event in others:
        kind = event["type"].removeprefix("response.")
        if kind == "in_progress":
            assert event["prompt_progress"]
            assert not output
            continue
        assert event["output_index"] == len(output)
        if kind == "output_item.added":
            assert opened is None
            opened = event["item"]
            assert opened["status"] == "in_progress"
            continue
        assert opened is not None
        if kind == "output_item.done":
            assert {**opened, "status": event["item"]["status"]} == _without_encoded(event["item"], opened)
            output.append(event["item"])
            opened = None
        else:
            assert event["item_id"] == opened["id"]
            _take(kind, event, opened)
    assert opened is None
    final = last["response"]
    assert last["type"] == f"response.{final['status']}"
    assert final["output"] == output
    assert {name: final[name] for name in ("id", "created_at", "model", "tools", "instructions")} == {
        name: response[name] for name in ("id", "created_at", "model", "tools", "instructions")
    }
    return final


def _take(kind: str, event: dict[str, Any], item: dict[str, Any]) -> None:
    """Take an event within an item."""
    match kind:
        case "content_part.added":
            assert item["content"] == []
            item["content"].append(event["part"])
        case "output_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
            item["content"][event["content_index"]]["logprobs"] += event["logprobs"]
        case "reasoning_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
        case "output_text.done":
            assert item["content"][0]["text"] == event["text"]
            assert item["content"][0]["logprobs"] == event["logprobs"]
        case "reasoning_text.done":
            assert item["content"][0]["text"] == event["text"]
        case "content_part.done":
            assert item["content"][0] == event["part"]
        case "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        case "function_call_arguments.done":
            assert item["arguments"] == event["arguments"]
        case "custom_tool_call_input.delta":
            item["input"] += event["delta"]
        case "custom_tool_call_input.done":
            assert item["input"] == event["input"]
        case _:
            raise AssertionError(kind)


def _without_encoded(item: dict[str, Any], opened: dict[str, Any]) -> dict[str, Any]:
    """An item without what is known at its end only."""
    left_out = {"encrypted_content"} | ({"action"} if item["type"] == "local_shell_call" else set())
    kept = {key: value for key, value in item.items() if key not in left_out}
    return {**kept, **{key: opened[key] for key in left_out if key in opened}}


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two runs: ids and times."""
    left_out = {"id", "created_at", "completed_at", "timings", "cache", "usage"}
    kept = {key: value for key, value in response.items() if key not in left_out}
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
    ]
    return {**kept, "output": output}


def kinds(response: dict[str, Any]) -> list[str]:
    """The types of a response's items."""
    return [item["type"] for item in response["output"]]


def text_of(item: dict[str, Any]) -> str:
    """The text of a message or of reasoning."""
    return "".join(part["text"] for part in item["content"])
