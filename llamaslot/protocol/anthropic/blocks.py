"""Access to JSON values of a body, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamaslot.base.errors import InvalidRequestError, NotSupportedError


def text_of(value: Mapping[str, Any], key: str, where: str) -> str:
    """Return a field that must be text."""
    text = value.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"'{where}.{key}' must be text", param=f"{where}.{key}")
    return text


def object_of(value: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return a field that must be an object."""
    found = value.get(key)
    if not isinstance(found, Mapping):
        raise InvalidRequestError(f"'{where}.{key}' must be an object", param=f"{where}.{key}")
    return found


def content_blocks(content: Any, where: str) -> list[tuple[str, Mapping[str, Any], str]]:
    """Return the type, the fields and the place of each block; a text is one block of type `text`."""
    if isinstance(content, str):
        return [("text", {"text": content}, where)]
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"'{where}' must be text or a list of content blocks", param=where)
    blocks = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(block, Mapping):
            raise InvalidRequestError(f"'{place}' must be an object", param=place)
        blocks.append((text_of(block, "type", place), block, place))
    return blocks


def unsupported_block(kind: str, where: str) -> NotSupportedError:
    """Return the error of a content block that cannot be in this place, or in a prompt at all."""
    # llama-server's words, by which its clients recognise a model without vision.
    reason = "image input is not supported" if kind == "image" else "it is not supported here"
    return NotSupportedError(f"'{where}.type' is '{kind}': {reason}; prompts are text", param=f"{where}.type")
