"""Tool calls, and what a parser returns for each piece of output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is the text of a JSON object. `id` is None where the output has none."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of the call number `index`.

    The first delta of a call has its name. It has its id as well if the output contains one that is valid;
    otherwise the caller makes one, with `Format.call_id`. All `arguments` of a call together are the text of one
    JSON object, or the beginning of one if the generation ended inside it.
    """

    index: int
    name: str | None = None
    id: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The text that a piece of output adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    parts: tuple[Delta, ...] = field(default=(), compare=False, repr=False)
    """Content, reasoning and calls one after the other, as the model wrote them; empty if there is only one."""

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Delta:
        """Return one delta for several that follow each other."""
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
