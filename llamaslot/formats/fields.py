"""The arguments of calls, to write them in another form."""

from __future__ import annotations

import json


def as_json(arguments: str) -> str:
    """Return arguments in the layout of chat templates; text that is no JSON as it is."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def is_object(text: str) -> bool:
    """Return True if a text is a JSON object, as whole arguments are."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def fields_of(arguments: str) -> dict[str, object]:
    """Return the fields of arguments; none if they are no JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def value_text(value: object) -> str:
    """Return a value as it stands between tags: JSON, but strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
