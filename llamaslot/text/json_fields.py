"""Access to values in JSON from clients, with errors that name the field, such as `messages[0].content`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from llamaslot.base.errors import InvalidRequestError


def refuse_field(where: str, why: str) -> NoReturn:
    """Raise an `InvalidRequestError` about the field `where`; `why` follows its name in the message."""
    raise InvalidRequestError(f"'{where}' {why}", param=where)


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
