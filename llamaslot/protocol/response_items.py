"""Items and tools of a Responses request, and their conversion to the messages and functions of a chat.

The reasoning, the text and the calls of one turn are separate items here, but one message by the assistant in a
chat.

Functions are the only tools that models know. Calls of other tools are converted back to items of their type. Tools
that OpenAI runs itself are refused, except for web search: agents always offer it, so it is just not shown to the
model.

Items of a stored response, and messages of a stored chat, are listed in pages.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import msgspec

from llamaslot.base.commands import JsonReply
from llamaslot.base.errors import InvalidRequestError, NotSupportedError
from llamaslot.base.generation.request_context import CallForm, ListItems
from llamaslot.text.conversation import Message, checked_object, joined, object_of, refuse_field, text_of

Item = Mapping[str, Any]

_MARK = "llamaslot:"
"""Prefix of encoded reasoning, to tell it from that of other servers, which cannot be decoded."""
_PREFIXES = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_SYSTEM = ("system", "developer")
_MAX_PAGE_BYTES = 4 * 2**20
"""Most bytes of a page of items, unless it has only one. If it ends early, `has_more` is true."""
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


def encoded_reasoning(text: str) -> str:
    """Return reasoning as `encrypted_content`, which some clients send back alone. It is not encrypted."""
    return _MARK + base64.b64encode(text.encode(errors="surrogatepass")).decode()


def decoded_reasoning(text: object) -> str:
    """Return the reasoning in an `encrypted_content`; empty if it is not from this server."""
    if not isinstance(text, str) or not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_MARK), validate=True).decode(errors="replace")
    except (binascii.Error, ValueError):
        return ""


def encoded_compaction(user_texts: Iterable[str], summary: str) -> str:
    """Return a compacted conversation as the `encrypted_content` of the item that replaces it."""
    return encoded_reasoning(json.dumps({"user": list(user_texts), "summary": summary}, ensure_ascii=False))


def _compaction(item: Item, where: str) -> tuple[list[str], str]:
    """Return the user's texts in a compacted conversation, and its summary."""
    try:
        content = json.loads(decoded_reasoning(item.get("encrypted_content")))
        return [str(text) for text in content["user"]], str(content["summary"])
    except (ValueError, KeyError, TypeError, RecursionError):
        refuse_field(f"{where}.encrypted_content", "must be what this server returned")


def with_ids(items: Iterable[Item], new_id: str) -> list[Item]:
    """Return items as the API lists them, each with a type and an id; new ids contain `new_id`."""
    found: list[Item] = []
    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        complete = {"type": kind, **item}
        complete["type"] = kind
        if kind == "message" and isinstance(content := item.get("content"), str):
            is_reply = item.get("role") == "assistant"
            part = {"type": "output_text", "annotations": []} if is_reply else {"type": "input_text"}
            complete["content"] = [{**part, "text": content}]
        if kind == "message":
            complete.setdefault("status", "completed")
        if not isinstance(item.get("id"), str):
            complete["id"] = f"{_PREFIXES.get(kind, 'item')}_{new_id}_i{index}"
        found.append(complete)
    return found


class Turns:
    """Collects the messages of a conversation from items, which are added in order."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._instructions: list[str] = []
        """Texts of system messages at the start. They become one message, because most templates read only one."""
        self.user_texts: list[str] = []
        """All texts of the user, including those before compactions."""
        self._is_open = False
        """True if the last message is a turn of the assistant to which items may be added."""

    def messages(self) -> list[Message]:
        """Return all messages."""
        if len(self._instructions) > 1:
            self._messages[0]["content"] = "\n\n".join(self._instructions)
        return self._messages

    def add(self, item: Item, where: str) -> None:
        """Add an item; raises `InvalidRequestError`. `where` is the item's path in error messages."""
        match kind := item.get("type") or "message":
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case "function_call":
                name = function_name(text_of(item, "name", where), item.get("namespace"))
                self._add_call(item, name, text_of(item, "arguments", where), where)
            case "custom_tool_call":
                name = function_name(text_of(item, "name", where), item.get("namespace"))
                self._add_call(item, name, custom_arguments(text_of(item, "input", where)), where)
            case "local_shell_call":
                self._add_call(item, LOCAL_SHELL, _shell_arguments(item, where), where)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._add_output(item, where)
            case "compaction" | "compaction_summary":
                self._add_compaction(item, where)
            case _:
                message = f"'{where}' is of type '{kind}', which is not supported"
                raise NotSupportedError(message, param=where)

    def _add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", *_SYSTEM):
            refuse_field(f"{where}.role", "must be user, assistant, system or developer")
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            turn = self._turn(fits=lambda turn: not turn["content"] and "tool_calls" not in turn)
            turn["content"] = content
            return
        self._is_open = False
        if role == "user":
            self.user_texts.append(joined(content, "\n"))
        if role in _SYSTEM and len(self._messages) == min(len(self._instructions), 1):
            self._instructions.append(joined(content, "\n"))
            if self._messages:
                return
        self._messages.append({"role": role, "content": content})

    def _add_reasoning(self, item: Item, where: str) -> None:
        content, summary = (_optional_text(item.get(key), f"{where}.{key}") for key in ("content", "summary"))
        reasoning = content or decoded_reasoning(item.get("encrypted_content")) or summary
        if reasoning:
            turn = self._turn(fits=lambda turn: len(turn) == 2 and not turn["content"])
            turn["reasoning_content"] = reasoning

    def _add_call(self, item: Item, name: str, arguments: str, where: str) -> None:
        call = {"type": "function", "id": _call_id(item, where), "function": {"name": name, "arguments": arguments}}
        self._turn(fits=lambda turn: True).setdefault("tool_calls", []).append(call)

    def _add_output(self, item: Item, where: str) -> None:
        call_id = _call_id(item, where)
        self._is_open = False
        content = _content(item.get("output"), f"{where}.output")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _add_compaction(self, item: Item, where: str) -> None:
        user_texts, summary = _compaction(item, where)
        self._is_open = False
        self.user_texts += user_texts
        written = "".join(f"<message>\n{text}\n</message>\n" for text in user_texts)
        content = f"What I wrote before:\n{written}\nA summary of our conversation until now:\n{summary}"
        self._messages.append({"role": "user", "content": content})

    def _turn(self, *, fits: Callable[[Message], bool]) -> Message:
        """Return the assistant's turn to which an item belongs: the open one if it `fits`, else a new one."""
        if not (self._is_open and fits(self._messages[-1])):
            self._messages.append({"role": "assistant", "content": ""})
            self._is_open = True
        return self._messages[-1]


def _content(content: Any, where: str) -> str | list[Message]:
    """Return content as a text or as text parts of a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse_field(where, "must be text or a list of parts")
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        checked_object(part, place)
        kind = part.get("type")
        if kind == "refusal":
            parts.append({"type": "text", "text": text_of(part, "refusal", place)})
        elif kind in _TEXT_PARTS:
            parts.append({"type": "text", "text": text_of(part, "text", place)})
        else:
            message = f"'{place}' is of type '{kind}': only text is supported"
            raise NotSupportedError(message, param=place)
    return parts[0]["text"] if len(parts) == 1 else parts


def _optional_text(parts: Any, where: str) -> str:
    return joined(_content(parts, where), "\n") if isinstance(parts, list) else ""


def _shell_arguments(item: Item, where: str) -> str:
    action = object_of(item, "action", where)
    known = ("command", "working_directory", "timeout_ms")
    return json.dumps({key: action[key] for key in known if action.get(key) is not None}, ensure_ascii=False)


def _call_id(item: Item, where: str) -> str:
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        refuse_field(f"{where}.call_id", "must be text")
    return call_id


class Toolbox:
    """The tools of a request, as functions in the form of chats."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.places: list[str] = []
        """Field of the request from which each function comes."""
        self._names: set[str] = set()
        self.forms: dict[str, CallForm] = {}
        """Conversion of calls of functions that for the client are other tools, or have another name."""
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


class _Identified(msgspec.Struct):
    """The id of an item. The rest may be large, and is passed on without decoding."""

    id: Any = None


_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_identified = msgspec.json.Decoder(_Identified).decode


def list_items(job: ListItems) -> JsonReply:
    """Return a page of items; raises `InvalidRequestError` if there is no item `after`."""
    items = [item for each in job.lists for item in _items(each)]
    if job.is_descending:
        items.reverse()
    if job.after:
        place = next((i for i, item in enumerate(items) if _identified(item).id == job.after), None)
        if place is None:
            raise InvalidRequestError(f"'after': there is no item '{job.after}'", param="after")
        items = items[place + 1 :]
    page = items[: job.limit]
    sizes = accumulate(len(bytes(item)) for item in page)
    page = page[: max(1, sum(size <= _MAX_PAGE_BYTES for size in sizes))]
    first, last = (_identified(page[0]).id, _identified(page[-1]).id) if page else (None, None)
    has_more = len(items) > len(page)
    body = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
    return JsonReply(msgspec.json.encode(body))
