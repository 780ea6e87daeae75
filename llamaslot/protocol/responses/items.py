"""Conversion of the items of a Responses request to chat messages.

The reasoning, the text and the calls of one turn are separate items here, but one message by the assistant in a
chat.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llamaslot.base.errors import NotSupportedError
from llamaslot.protocol.responses.tools import LOCAL_SHELL, custom_arguments, function_name
from llamaslot.text.conversation import Message, joined
from llamaslot.text.json_fields import checked_object, object_of, refuse_field, text_of

Item = Mapping[str, Any]

_MARK = "llamaslot:"
"""Prefix of encoded reasoning, to tell it from that of other servers, which cannot be decoded."""
_PREFIXES = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_SYSTEM = ("system", "developer")


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
