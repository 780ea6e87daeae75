"""Agents of a soak: tool loops over chats, Anthropic's Messages and OpenAI's Responses, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any, TypeAlias

from bench.soak.clients import PAUSE_S, Load

MAX_STEPS = 4
MAX_TOKENS = 80
"""Enough for one call of the tool."""
_SYSTEM = "You plan walks with the weather in mind. " * 20
_CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Perth", "Quito")
_NAME, _ABOUT = "forecast", "The weather of a city."
_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": [*_CITIES]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
_FUNCTION = {"name": _NAME, "description": _ABOUT, "parameters": _PARAMETERS}

Json: TypeAlias = dict[str, Any]


async def call_in_chat(load: Load) -> None:
    """Run a tool loop over `/v1/chat/completions`."""
    headers = load.headers()
    messages: list[Json] = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": load.words(20)}]
    for is_last in _steps(load):
        body = {
            "messages": messages,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "auto" if is_last else "required",
            "parallel_tool_calls": False,
            "max_tokens": MAX_TOKENS,
            "stream": load.chance.random() < 0.5,
        }
        events = await _ask(load, "/v1/chat/completions", body, headers)
        if is_last or not events:
            return
        calls = _chat_calls(events)
        if not _is_call(load, "chat", [call["function"]["arguments"] for call in calls]):
            return
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": load.words(load.chance.randint(1, 80))}
            for call in calls
        ]


async def call_in_messages(load: Load) -> None:
    """Run a tool loop over `/v1/messages`."""
    headers = load.headers()
    messages: list[Json] = [{"role": "user", "content": load.words(20)}]
    for is_last in _steps(load):
        body = {
            "model": "any",
            "system": _SYSTEM,
            "messages": messages,
            "tools": [{"name": _NAME, "description": _ABOUT, "input_schema": _PARAMETERS}],
            "tool_choice": {"type": "auto" if is_last else "any", "disable_parallel_tool_use": True},
            "max_tokens": MAX_TOKENS,
            "stream": load.chance.random() < 0.5,
        }
        events = await _ask(load, "/v1/messages", body, headers)
        if is_last or not events:
            return
        blocks = _message_blocks(events)
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if not _is_call(load, "Messages", [json.dumps(call["input"]) for call in calls]):
            return
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": load.words(load.chance.randint(1, 80))}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


async def call_in_responses(load: Load) -> None:
    """Run a tool loop over `/v1/responses`, with stored responses or with the whole conversation in each body."""
    headers, is_stored = load.headers(), load.chance.random() < 0.5
    items: list[Json] = [{"role": "user", "content": load.words(20)}]
    previous = None
    for is_last in _steps(load):
        body: Json = {
            "instructions": _SYSTEM,
            "input": items,
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": "auto" if is_last else "required",
            "parallel_tool_calls": False,
            "max_output_tokens": MAX_TOKENS,
            "store": is_stored,
            "stream": load.chance.random() < 0.5,
        }
        body |= {"previous_response_id": previous} if previous else {}
        events = await _ask(load, "/v1/responses", body, headers)
        if is_last or not events:
            return
        response = events[-1].get("response") or events[-1]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if not _is_call(load, "Responses", [call["arguments"] for call in calls]):
            return
        results = [
            {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": load.words(load.chance.randint(1, 80)),
            }
            for call in calls
        ]
        items = results if is_stored else [*items, *response["output"], *results]
        previous = response["id"] if is_stored else None


AGENTS = (call_in_chat, call_in_messages, call_in_responses)


def _steps(load: Load) -> Iterable[bool]:
    """The steps of a loop: false for those that have to call a tool, true for the last, which answers."""
    return (*(False for _ in range(load.chance.randint(1, MAX_STEPS))), True)


async def _ask(load: Load, path: str, body: Json, headers: dict[str, str]) -> list[Json]:
    await load.open.wait()
    events = await load.events(path, body, headers=headers)
    await asyncio.sleep(load.chance.random() * PAUSE_S)
    return events


def _is_call(load: Load, api: str, arguments: list[str]) -> bool:
    """Count a step by whether it called the tool as its schema says; a required call that did not is unexpected."""
    try:
        is_valid = bool(arguments) and all(json.loads(each)["city"] in _CITIES for each in arguments)
    except (ValueError, KeyError, TypeError):
        is_valid = False
    load.note("called" if is_valid else "no call", "" if is_valid else f"{api}: {arguments}")
    return is_valid


def _chat_calls(events: list[Json]) -> list[Json]:
    """The tool calls of a chat, from its whole reply or put together from its chunks."""
    calls: dict[int, Json] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        message = choice.get("message") or choice.get("delta") or {}
        for i, part in enumerate(message.get("tool_calls") or ()):
            call = calls.setdefault(
                part.get("index", i), {"type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = part.get("id") or call.get("id")
            for name in ("name", "arguments"):
                call["function"][name] += part["function"].get(name) or ""
    return [calls[index] for index in sorted(calls)]


def _message_blocks(events: list[Json]) -> list[Json]:
    """The content blocks of a message, from its whole reply or put together from its events."""
    if "content" in events[0]:
        return list(events[0]["content"])
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"], json=""))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1]["json"] += delta.get("partial_json", "")
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    blocks[-1][name] = blocks[-1].get(name, "") + delta[name]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return blocks
