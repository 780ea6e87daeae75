"""Tools of a chat request: what the model is told about them, and which ones its reply may or must call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.tools import Tool
from llamaslot.formats.schema_types import without_reference
from llamaslot.protocol.bodies import ChatBody
from llamaslot.text.conversation import clean_tool

Mode: TypeAlias = Literal["none", "auto", "required"]
_MODES: Mapping[str, Mode] = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
"""Values of `tool_choice`. `any` is Mistral's, which some clients send."""


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
    mode, names = _choice(body.tool_choice, known)
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
        body.parallel_tool_calls is not False and not _is_named(body.tool_choice),
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


def _is_named(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") != "allowed_tools"


def _name(choice: Any, known: set[str]) -> str:
    """Return the name in `{"type": "function", "function": {"name": ...}}`, or in `{"type": ..., "name": ...}`."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError("'tool_choice' must name a function", param="tool_choice")
    if name not in known:
        raise InvalidRequestError(f"'tool_choice': '{name}' is not among the 'tools'", param="tool_choice")
    return name
