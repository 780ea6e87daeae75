"""Conversion of a Responses request's tools to functions, the only tools that models know.

Calls of other tools are converted back to items of their type. Tools that OpenAI runs itself are refused, except
for web search: agents always offer it, so it is just not shown to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.responses import CallForm

LEFT_OUT = frozenset({"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"})
"""Types of tools that are not shown to the model."""
_HOSTED = {
    "file_search": "let the client search, in a function",
    "code_interpreter": "let the client run code, in a function",
    "image_generation": "this server generates text only",
    "mcp": "let the client call the MCP server, and offer its tools as functions",
    "computer": "offer a function",
    "computer_use_preview": "offer a function",
    "shell": "offer a function",
    "apply_patch": "offer a function, or a tool of type 'custom'",
    "tool_search": "offer all tools",
    "programmatic_tool_calling": "offer functions",
}
LOCAL_SHELL = "local_shell"
_LOCAL_SHELL_FUNCTION = {
    "name": LOCAL_SHELL,
    "description": "Runs a command, a program and its arguments, on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}  # fmt: skip


class Toolbox:
    """The tools of a request, as functions in the form of chats."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.places: list[str] = []
        """Field of the request from which each function comes."""
        self._names: set[str] = set()
        self.forms: dict[str, CallForm] = {}
        """How to convert calls of functions that are not functions for the client, or have another name there."""
        self.shown: list[Mapping[str, Any]] = []
        """The client's tools without those that are not shown to the model."""
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")

    def _add(self, tool: Mapping[str, Any], where: str, namespace: str = "") -> None:
        match kind := tool.get("type"):
            case "function":
                self._add_function({"parameters": None, **tool}, where, namespace)
            case "custom":
                self._add_function(_custom(tool), where, namespace, "custom")
            case "local_shell":
                self._add_function(_LOCAL_SHELL_FUNCTION, where, namespace, "local_shell")
            case "namespace" if not namespace:
                self._add_namespace(tool, where)
            case str() if kind in LEFT_OUT:
                return
            case _:
                _refuse_type(kind, where)
        if not namespace:
            self.shown.append({"strict": False, **tool} if kind == "function" else tool)

    def _add_namespace(self, tool: Mapping[str, Any], where: str) -> None:
        name, tools = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"'{where}.name' must be text", param=f"{where}.name")
        if not isinstance(tools, list):
            raise InvalidRequestError(f"'{where}.tools' must be a list", param=f"{where}.tools")
        for index, each in enumerate(tools):
            place = f"{where}.tools[{index}]"
            if not isinstance(each, dict):
                raise InvalidRequestError(f"'{place}' must be an object", param=place)
            self._add(each, place, name)

    def _add_function(self, tool: Mapping[str, Any], where: str, namespace: str, kind: Any = "function") -> None:
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"'{where}.name' must be text", param=f"{where}.name")
        known = function_name(name, namespace)
        if known in self._names:
            raise InvalidRequestError(f"'{where}': there are two tools called '{known}'", param=where)
        self._names.add(known)
        fields = ("description", "parameters", "strict")
        function = {"name": known, **{key: tool[key] for key in fields if key in tool}}
        self.functions.append({"type": "function", "function": function})
        self.places.append(where)
        if kind != "function" or namespace:
            self.forms[known] = CallForm(kind, name, namespace)


def function_name(name: str, namespace: object = "") -> str:
    """Return the name of a tool as the model sees it; the tool may be in a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if isinstance(namespace, str) and namespace else name


def chat_choice(choice: Any) -> Any:
    """Convert a `tool_choice` to that of a chat; raises `NotSupportedError` for a tool that is not supported."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "local_shell":
        return {"type": "function", "name": LOCAL_SHELL}
    if isinstance(kind, str) and (_is_left_out(kind) or kind in _HOSTED):
        _refuse_type(kind, "tool_choice")
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        kept = [each for each in choice["tools"] if not (isinstance(each, dict) and _is_left_out(each.get("type")))]
        return {**choice, "tools": [chat_choice(each) for each in kept]}
    if isinstance(choice.get("name"), str):
        return {**choice, "name": function_name(choice["name"], choice.get("namespace"))}
    return choice


def custom_arguments(text: object) -> str:
    """Return the arguments of the function that represents a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _is_left_out(kind: object) -> bool:
    return isinstance(kind, str) and kind in LEFT_OUT


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a custom tool, whose input is a text, to a function. Its grammar is described but not enforced."""
    lines = [tool.get("description") or "", "The tool takes one text, the argument 'input'."]
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        definition = form.get("definition")
        if not isinstance(definition, str):
            grammar = form.get("grammar")
            definition = grammar.get("definition") if isinstance(grammar, dict) else ""
        lines.append(f"It must match this grammar ({form.get('syntax') or 'lark'}):\n{definition}")
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": tool.get("name"), "description": "\n".join(filter(None, lines)), "parameters": parameters}


def _refuse_type(kind: object, where: str) -> NoReturn:
    if not isinstance(kind, str):
        raise InvalidRequestError(f"'{where}.type' must be text", param=f"{where}.type")
    hint = _HOSTED.get(kind, "offer a function")
    raise NotSupportedError(f"'{where}': tools of type '{kind}' are not supported: {hint}", param=where)
