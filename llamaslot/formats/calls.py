"""Tool calls, and what a parser returns for each piece of output."""

from __future__ import annotations

from dataclasses import dataclass


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
    otherwise the caller makes one, with `Format.new_id`. All `arguments` of a call together are the text of one
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
