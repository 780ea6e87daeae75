"""Prompts as one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamaslot.text.template import ChatTemplate


def rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The text of all parts of a prompt."""
    return "".join(part.text for part in template.render(messages, **options))
