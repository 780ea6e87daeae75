"""Conversion of call arguments from JSON text to the forms that model formats need."""

from __future__ import annotations

import json


def as_json(arguments: str) -> str:
    """Return arguments in the JSON layout of chat templates; text that is not JSON is returned unchanged."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def is_object(text: str) -> bool:
    """Return True if the text is a JSON object, as complete arguments are."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def fields_of(arguments: str) -> dict[str, object]:
    """Return the fields of the arguments; empty if they are not a JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def value_text(value: object) -> str:
    """Return a value as written between tags: JSON, except that strings have no quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
