"""Tool calls, their arguments, and the deltas that a parser returns for each piece of output."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `arguments` is the text of a JSON object. `id` is None if the output contains none."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of call number `index`.

    The first delta of a call carries its name, and its id if the output contains a valid one; otherwise the caller
    generates one with `Format.call_id`. The `arguments` of all deltas, joined, are one JSON object, or the
    beginning of one if generation ended inside it.
    """

    index: int
    name: str | None = None
    id: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """Text and calls that a piece of output adds to the message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    parts: tuple[Delta, ...] = field(default=(), compare=False, repr=False)
    """The same, split into single parts in the order in which the model wrote them; empty if there is only one."""

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Delta:
        """Merge consecutive deltas into one."""
        parts = tuple(part for delta in deltas for part in delta.parts or (delta,) if part != _NOTHING)
        if len(parts) < 2:
            return parts[0] if parts else _NOTHING
        return cls(
            "".join(part.content for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(call for part in parts for call in part.tool_calls),
            parts,
        )


_NOTHING = Delta()


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
