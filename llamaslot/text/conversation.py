"""Messages and tools of a request, checked and converted to the form that chat templates expect.

Every cleaned value is a new object, which the caller may change. `InvalidRequestError`s name the invalid message or
tool. Templates themselves refuse wrong roles and orders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from llamaslot.text.json_fields import checked_list, checked_object, object_of, refuse_field, text_of

Message: TypeAlias = dict[str, Any]
Conversation: TypeAlias = list[Message]

SYSTEM_ROLES = ("system", "developer")
"""Roles of instructions."""
_ANY_ARGUMENTS: Message = {"type": "object", "properties": {}}


def clean_message(message: Mapping[str, Any], index: int) -> Message:
    """Return a message with its role, its content (text or text parts, never null) and other fields of templates.

    OpenAI's older `function_call` becomes a call without an id, and a message of the role `function` its result.
    """
    where = f"messages[{index}]"
    checked_object(message, where)
    role = text_of(message, "role", where)
    if role == "function":
        role = "tool"
    if role == "assistant" and isinstance(message.get("function_call"), Mapping) and not message.get("tool_calls"):
        message = {**message, "tool_calls": [{"type": "function", "function": message["function_call"]}]}
    is_reply = role == "assistant" and bool(message.get("tool_calls") or message.get("reasoning_content"))
    if "content" not in message and not (is_reply or role == "tool"):
        extra = " or 'tool_calls'" if role == "assistant" else ""
        refuse_field(where, f"must contain 'content'{extra}")
    content = message.get("content")
    if content is None and role not in ("assistant", "tool"):
        refuse_field(
            f"{where}.content", "must be text or a list of parts; it may be null only for assistant and tool"
        )
    clean: Message = {"role": role, "content": _content(content, f"{where}.content")}
    for key in ("reasoning_content", "name", "tool_call_id"):
        if message.get(key):
            clean[key] = text_of(message, key, where)
    if message.get("tool_calls"):
        calls = checked_list(message["tool_calls"], f"{where}.tool_calls")
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return clean


def clean_tool(tool: Mapping[str, Any], index: int) -> Message:
    """Return a tool with a name, a description and parameters."""
    where = f"tools[{index}]"
    function = _function(tool, where)
    parameters = function.get("parameters")
    return {
        "type": "function",
        "function": {
            "name": text_of(function, "name", f"{where}.function"),
            "description": function.get("description") or "",
            # The schema `true` is the same as none.
            "parameters": parameters if parameters and parameters is not True else dict(_ANY_ARGUMENTS),
        },
    }


def joined(content: str | Sequence[Mapping[str, Any]], separator: str) -> str:
    """Return content as one text."""
    return content if isinstance(content, str) else separator.join(part["text"] for part in content)


def _content(content: Any, where: str) -> str | list[Message]:
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(checked_list(content, where))] or ""


def _part(part: Any, where: str) -> Message:
    checked_object(part, where)
    kind = text_of(part, "type", where)
    if kind == "refusal":
        # OpenAI's clients send back a model's refusal.
        return {"type": "text", "text": text_of(part, "refusal", where)}
    if kind != "text":
        refuse_field(where, f"is of type '{kind}': only text is supported")
    return {"type": "text", "text": text_of(part, "text", where)}


def _call(call: Any, where: str) -> Message:
    function = _function(call, where)
    arguments = function.get("arguments", "")
    clean: Message = {
        "type": "function",
        "function": {
            "name": text_of(function, "name", f"{where}.function"),
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        },
    }
    if call.get("id"):
        clean["id"] = text_of(call, "id", where)
    return clean


def _function(value: Any, where: str) -> Mapping[str, Any]:
    """Return the function of a tool or of a tool call."""
    if not isinstance(value, Mapping) or value.get("type") != "function":
        refuse_field(where, "must be an object of type 'function'")
    return object_of(value, "function", where)
