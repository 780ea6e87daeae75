"""Tools of a chat request: what the model is told about them, and which ones its reply may or must call.

For chat templates that ignore tools or calls, these become text of the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.tools import Tool
from llamaslot.base.json_schemas import without_reference
from llamaslot.formats.calls import ToolCall, is_object
from llamaslot.formats.format import Format
from llamaslot.protocol.bodies import ChatBody
from llamaslot.text.conversation import Conversation, Message, clean_message, clean_tool, joined, parsed_arguments
from llamaslot.text.template import ChatTemplate

Mode: TypeAlias = Literal["none", "auto", "required"]
_MODES: Mapping[str, Mode] = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
"""Values of `tool_choice`. `any` is Mistral's, which some clients send."""
_INTRODUCTION = (
    "You can call functions. Each of the following lines describes one, with the schema of its parameters:"
)
_EXAMPLE = ToolCall("name", '{"parameter": "value"}')


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools, and their use in a reply.

    The prompt describes all tools whatever `mode` is, so that requests with another `tool_choice` share its prefix.
    """

    definitions: tuple[dict[str, Any], ...] = ()
    """Tools in the form that chat templates read."""
    tools: tuple[Tool, ...] = ()
    """Tools that may be called."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Field of the request that has the schema of each tool, by the tool's name."""
    strict: frozenset[str] = frozenset()
    """Names of tools whose arguments must follow their schema."""
    mode: Mode = "none"
    parallel: bool = True
    """True if a reply may have several calls."""


def read_tools(body: ChatBody) -> ToolUse:
    """Return the tools of a request; raises `InvalidRequestError`."""
    raw = body.tools or []
    definitions = tuple(clean_tool(tool, index) for index, tool in enumerate(raw))
    functions = [definition["function"] for definition in definitions]
    places: dict[str, str] = {}
    for index, function in enumerate(functions):
        where = places.setdefault(function["name"], f"tools[{index}].function.parameters")
        if not isinstance(function["parameters"], dict):
            raise InvalidRequestError(f"'{where}' must be a JSON schema, an object", param=where)
    known = {function["name"] for function in functions}
    choice = body.tool_choice
    mode, names = _choice(choice, known)
    is_named = isinstance(choice, dict) and choice.get("type") != "allowed_tools"
    return ToolUse(
        definitions,
        tuple(
            Tool(function["name"], without_reference(function["parameters"]))
            for function in functions
            if names is None or function["name"] in names
        ),
        places,
        frozenset(each["function"]["name"] for each in raw if each["function"].get("strict") is True),
        mode if definitions else "none",
        parallel=body.parallel_tool_calls is not False and not is_named,
    )


def _choice(choice: Any, known: set[str]) -> tuple[Mode, set[str] | None]:
    """Return the mode of a `tool_choice`, and the names of the tools that it allows (None for all)."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidRequestError(f"'tool_choice' must be one of {', '.join(_MODES)}", param="tool_choice")
        if _MODES[choice] == "required" and not known:
            raise InvalidRequestError("'tool_choice' needs 'tools'", param="tool_choice")
        return _MODES[choice], None
    if not isinstance(choice, dict):
        raise InvalidRequestError("'tool_choice' must be a text or an object", param="tool_choice")
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        named = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        mode = _MODES.get(named) if isinstance(named, str) else None
        if not isinstance(listed, list) or not listed or mode is None:
            raise InvalidRequestError(
                "'tool_choice.allowed_tools' must have a 'mode' and a list of 'tools'", param="tool_choice"
            )
        return mode, {_name(each, known) for each in listed}
    return "required", {_name(choice, known)}


def _name(choice: Any, known: set[str]) -> str:
    """Return the name in `{"type": "function", "function": {"name": ...}}`, or in `{"type": ..., "name": ...}`."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError("'tool_choice' must name a function", param="tool_choice")
    if name not in known:
        raise InvalidRequestError(f"'tool_choice': '{name}' is not among the 'tools'", param="tool_choice")
    return name


def with_text_of_tools(
    template: ChatTemplate,
    format_: Format,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> Sequence[Mapping[str, Any]]:
    """Return messages with the tools and calls that the template ignores as text; unchanged if there are none.

    Calls are written as models of the format write them. Raises `InvalidRequestError` for invalid messages.
    """
    adds_tools = bool(tools) and not template.takes_tools
    has_calls = any(
        isinstance(each, Mapping) and (each.get("tool_calls") or each.get("function_call")) for each in messages
    )
    adds_calls = has_calls and not template.takes_calls
    if not (adds_tools or adds_calls):
        return messages
    conversation = [clean_message(message, index) for index, message in enumerate(messages)]
    if adds_calls:
        conversation = [_with_calls(message, format_) for message in conversation]
    return _with_tools(conversation, format_, tools) if adds_tools else conversation


def _with_calls(message: Message, format_: Format) -> Message:
    calls = message.pop("tool_calls", ())
    if not calls:
        return message
    rendered = format_.render([_call(call) for call in calls])
    text = joined(message["content"], "\n")
    return {**message, "content": f"{text}\n{rendered}" if text else rendered}


def _call(call: Message) -> ToolCall:
    arguments = call["function"]["arguments"]
    if not is_object(arguments):
        arguments = json.dumps(parsed_arguments(arguments), ensure_ascii=False)
    return ToolCall(call["function"]["name"], arguments, call.get("id"))


def _with_tools(conversation: Conversation, format_: Format, tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """Add a description of the tools at the start of the conversation's system message."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join(
        [_INTRODUCTION, *lines, "To call a function, reply with nothing but this form:", format_.render([_EXAMPLE])]
    )
    if conversation and conversation[0]["role"] in {"system", "developer"}:
        first, *rest = conversation
        return [{**first, "content": f"{text}\n\n{joined(first['content'], chr(10))}"}, *rest]
    return [{"role": "system", "content": text}, *conversation]
