"""Decoding of JSON bodies, and errors that name the field at fault."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from llamaslot.base.errors import InvalidRequestError, LlamaslotError

B = TypeVar("B", bound=msgspec.Struct)
FieldNames: TypeAlias = Sequence[tuple[str, str]]
"""Regular expressions for chat fields, and the names of these fields in another API."""


def decode(raw: bytes, kind: type[B]) -> B:
    """Decode a body; raises an `InvalidRequestError` that names the field at fault."""
    try:
        # Clients on Windows may write a byte order mark before UTF-8.
        return _decoded(raw.removeprefix(_BOM), kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except RecursionError as error:
        raise too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error


def too_deep() -> InvalidRequestError:
    """Return the error for a body with too many nested lists and objects."""
    return InvalidRequestError("the body is nested too deeply")


def _decoded(raw: bytes, kind: type[B]) -> B:
    """Decode a body in which integers may be written as 2.0."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    fields = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in msgspec.json.decode(raw, type=dict[str, Any]).items()
    }
    return msgspec.convert(fields, kind)


def whole(field: str) -> str:
    """Return a regular expression that matches only the whole field, in a `param` or quoted in a message."""
    return rf"(?<![^']){field}(?![^'])"


def renamed(error: LlamaslotError, names: FieldNames) -> LlamaslotError:
    """Return an error about a chat with the field names of the API whose body was converted to that chat."""
    message, param = error.message, error.param
    for pattern, name in names:
        message = re.sub(pattern, name, message)
        param = re.sub(pattern, name, param) if param else param
    return msgspec.structs.replace(error.info(), message=message, param=param).exception()


_BOM = b"\xef\xbb\xbf"
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _named(message: str) -> InvalidRequestError:
    """Convert msgspec's message to an error about a field, with that field as `param`."""
    complaint, *where = re.split(r" - at (?:`key` in )?`\$", message, maxsplit=1)
    param = "".join(where).rstrip("`").removeprefix(".").partition("[...]")[0]
    if missing := _MISSING.match(complaint):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequestError(f"'{param}' is required", param=param)
    sentence = re.sub(r"`([^`]+)`", lambda types: _in_words(types[1]), complaint)
    sentence = sentence[:1].lower() + sentence[1:]
    return InvalidRequestError(f"'{param}': {sentence}" if param else f"the body: {sentence}", param=param or None)


def _in_words(types: str) -> str:
    """Convert `int | null` to "an integer or null"; other names are unchanged."""
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))
