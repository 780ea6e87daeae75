"""Messages and tools of a request, checked and converted to the form that chat templates expect.

Every cleaned value is a new object, which the caller may change. `InvalidRequestError`s name the field that is
invalid, such as `messages[0].content`. Templates themselves refuse wrong roles and orders.

Clients send back calls that a token limit has cut, whose arguments are the beginning of a JSON object. The parsed
object has everything up to the cut, so that the conversation can continue, with the model's own text in its prompt.

Text in system messages that differs in every session or request, and so defeats the prefix cache, is removed:
Claude Code begins its system prompt with a billing header whose numbers depend on the first message or the whole
request. No two sessions would share a prefix, and everything after the header would be computed again. The header
is only for the provider's accounting, so it is removed before the prompt is rendered. Dates and folders are not
removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn, TypeAlias

from llamaslot.base.errors import ConfigError, InvalidRequestError, LlamaslotError

Message: TypeAlias = dict[str, Any]
Conversation: TypeAlias = list[Message]

SYSTEM_ROLES = ("system", "developer")
"""Roles of instructions."""
OFF = "off"
_FIELD = r"[ \t]*[\w.-]+=[^;\s]*(?:;|(?=[ \t]*(?:\r?\n|$)))"
KNOWN = {"claude-code": rf"x-anthropic-billing-header:(?=[^\n]*\bcc\w+=)(?:{_FIELD})+[ \t]*(?:\r?\n)*"}
"""Patterns by the agent that sends such text. A header consists only of fields, one of which begins with `cc`."""
_ANY_ARGUMENTS: Message = {"type": "object", "properties": {}}
_INSIDE = r'[^"\\]*(?:\\.[^"\\]*)*'
_TOKENS = re.compile(
    rf'\s*(?:(?P<mark>[{{}}\[\]:,])|(?P<text>"{_INSIDE}")|(?P<cut>"{_INSIDE}\\?\Z)|(?P<word>[^\s{{}}\[\]:,"]+))',
    re.DOTALL,
)
_CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
"""An incomplete escape at the end, or one without its second surrogate, possibly after escaped backslashes."""


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
    return [clean_part(part, f"{where}[{i}]") for i, part in enumerate(checked_list(content, where))] or ""


def clean_part(part: Any, where: str) -> Message:
    """Return a part of a message's content as a text part. Images were taken out before (`protocol/images.py`)."""
    checked_object(part, where)
    kind = text_of(part, "type", where)
    if kind == "refusal":
        # OpenAI's clients send back a model's refusal.
        return {"type": "text", "text": text_of(part, "refusal", where)}
    if kind != "text":
        refuse_field(where, f"is of type '{kind}': only text and images are supported")
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


def parsed_arguments(text: str) -> dict[str, Any]:
    """Return arguments as an object: cut ones up to the cut; other values than objects as the field `arguments`."""
    if not text.strip():
        return {}
    for json_text in (text, _closed(text)) if text.lstrip().startswith("{") else (text,):
        try:
            value = json.loads(json_text)
        except (ValueError, RecursionError):
            continue
        if value is None:
            return {}
        return value if isinstance(value, dict) else {"arguments": value}
    return {"arguments": text}


def _closed(text: str) -> str:
    """Complete the beginning of a JSON object.

    A name without a value is left out, and so is a number or word at the end, which may be incomplete.
    """
    end = 0
    closers: list[str] = []
    is_name = False
    for token in _TOKENS.finditer(text):
        is_whole = False
        match token.lastgroup, token[token.lastgroup or 0]:
            case "mark", "{" | "[" as bracket:
                closers.append("}" if bracket == "{" else "]")
                is_whole, is_name = True, bracket == "{"
            case "mark", "}" | "]" as bracket:
                if not closers or closers.pop() != bracket:
                    return ""
                is_whole, is_name = True, False
            case "mark", mark:
                is_name = mark == "," and closers[-1:] == ["}"]
            case "word", _:
                is_whole = token.end() < len(text)
            case "text", _:
                is_whole = not is_name
            case _ if not is_name:
                return _CUT_ESCAPE.sub(r"\1", text, count=1) + '"' + "".join(reversed(closers))
        if is_whole:
            # `closers` fits this place: only brackets change it, and no bracket follows the last whole part.
            end = token.end()
    return text[:end] + "".join(reversed(closers))


def refuse_field(where: str, why: str, error: type[LlamaslotError] = InvalidRequestError) -> NoReturn:
    """Raise an error about the field `where`; `why` follows its name in the message."""
    raise error(f"'{where}'{'' if why.startswith(':') else ' '}{why}", param=where)


def text_of(value: Mapping[str, Any], key: str, where: str) -> str:
    """Return a field of the object at `where` that must be text."""
    text = value.get(key)
    if not isinstance(text, str):
        refuse_field(f"{where}.{key}", "must be text")
    return text


def object_of(value: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return a field of the object at `where` that must be an object."""
    return checked_object(value.get(key), f"{where}.{key}")


def checked_object(value: Any, where: str) -> Mapping[str, Any]:
    """Return the value at `where`, which must be an object."""
    if not isinstance(value, Mapping):
        refuse_field(where, "must be an object")
    return value


def checked_list(value: Any, where: str) -> Sequence[Any]:
    """Return the value at `where`, which must be a list."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        refuse_field(where, "must be a list")
    return value


def volatile_pattern(words: str) -> re.Pattern[str] | None:
    """Compile a pattern from comma-separated names of `KNOWN`, or from a regular expression; None for `OFF`.

    Raises `ConfigError` for anything else, and for an expression that matches an empty text.
    """
    names = [word.strip() for word in words.split(",")]
    source = "|".join(KNOWN[name] for name in names) if all(name in KNOWN for name in names) else words
    if source in ("", OFF):
        return None
    try:
        found = re.compile(source)
    except re.error as error:
        known = ", ".join(KNOWN)
        raise ConfigError(
            f"{words!r} is not a valid regular expression ({error}); the known names are: {known}",
            param="--drop-volatile",
        ) from None
    if found.match(""):
        raise ConfigError(
            f"{words!r} matches an empty text, so it does not say what to remove", param="--drop-volatile"
        )
    return found


def without_volatile(volatile: re.Pattern[str] | None, conversation: Conversation) -> Conversation:
    """Remove matches of `volatile` from the start of each part of the leading system messages.

    Parts and messages that become empty are dropped. None removes nothing.
    """
    if volatile is None:
        return conversation
    first = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, conversation))
    kept = [(message, _kept(volatile, message)) for message in first]
    return [*(left for given, left in kept if left["content"] or left == given), *conversation[len(first) :]]


def _kept(volatile: re.Pattern[str], message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        found = volatile.match(content)
        return {**message, "content": content[found.end() :]} if found else message
    cut = [
        {**part, "text": part["text"][found.end() :]} if (found := volatile.match(part["text"])) else part
        for part in content
    ]
    return {
        **message,
        "content": [part for part, given in zip(cut, content, strict=True) if part["text"] or part is given],
    }
