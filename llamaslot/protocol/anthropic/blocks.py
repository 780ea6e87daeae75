"""Content blocks of Anthropic's messages, with the path of each block for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamaslot.base.errors import NotSupportedError
from llamaslot.text.json_fields import checked_object, refuse_field, text_of


def content_blocks(content: Any, where: str) -> list[tuple[str, Mapping[str, Any], str]]:
    """Return the type, the fields and the path of each block. A string counts as one block of type `text`."""
    if isinstance(content, str):
        return [("text", {"text": content}, where)]
    if not isinstance(content, Sequence):
        refuse_field(where, "must be text or a list of content blocks")
    blocks = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        checked_object(block, place)
        blocks.append((text_of(block, "type", place), block, place))
    return blocks


def unsupported_block(kind: str, where: str) -> NotSupportedError:
    """Return the error for a content block that is not allowed here, or in no prompt."""
    # llama-server's words, from which its clients recognise a model without vision.
    reason = "image input is not supported" if kind == "image" else "it is not supported here"
    return NotSupportedError(f"'{where}.type' is '{kind}': {reason}; prompts are text", param=f"{where}.type")
