"""Arguments of tool calls as objects, also where a limit has cut them.

Clients send back the call that a limit has cut, whose arguments are the beginning of a JSON object. The object has
what was written of it: the conversation goes on, and its prompt has the model's text up to the cut.
"""

from __future__ import annotations

import json
import re
from typing import Any

_INSIDE = r'[^"\\]*(?:\\.[^"\\]*)*'
_TOKENS = re.compile(
    rf'\s*(?:(?P<mark>[{{}}\[\]:,])|(?P<text>"{_INSIDE}")|(?P<cut>"{_INSIDE}\\?\Z)|(?P<word>[^\s{{}}\[\]:,"]+))',
    re.DOTALL,
)
_CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
"""An escape without its end, or without the second half of its character, after escaped backslashes."""


def parsed_arguments(text: str) -> dict[str, Any]:
    """Return arguments as an object: cut ones up to the cut, and what is no object as the field `arguments`."""
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
    """Return the beginning of a JSON object with its ends; a name without its value is left out, as is a number at
    the end, which may be cut.
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
            # Only brackets change what is open, and none follows the last whole part.
            end = token.end()
    return text[:end] + "".join(reversed(closers))
