"""Parsing of tool call arguments to objects, even if a token limit has cut them.

Clients send back calls that a limit has cut, whose arguments are the beginning of a JSON object. The parsed object
has everything up to the cut, so that the conversation can continue, with the model's own text in its prompt.
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
"""An incomplete escape at the end, or one without its second surrogate, possibly after escaped backslashes."""


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
