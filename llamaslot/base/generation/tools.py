"""Tools and reasoning of a chat request, and the options of its reply's parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

ReasoningFormat: TypeAlias = Literal["none", "deepseek", "auto"]
"""Place of the reasoning in a reply: in its content with the model's tags (`none`), else in a field of its own."""


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = msgspec.field(default_factory=dict)


class ReasoningBudget(msgspec.Struct, frozen=True):
    """Tokens that a model may reason, and the token ids of the tags around reasoning."""

    n_tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    after: tuple[int, ...] = ()
    """Tokens that are forced after the end tag."""
    is_open: bool = False
    """True if the prompt ends within reasoning."""


class ParserOptions(msgspec.Struct, frozen=True):
    """The part of a chat request and of its prompt that the reply's parser depends on (`llamaslot.formats`)."""

    packed_tools: bytes = b""
    """From `encoded_tools`: schemas of many MiB would hold up the event loops that pass the options on."""
    parse_tools: bool = True
    """False leaves calls in the content."""
    parallel: bool = True
    """Report all calls, not only the first."""
    calls_only: bool = False
    """The reply must be calls, and reasoning before them: there is no content."""
    reasoning_open: str = ""
    """The end of the prompt from the tag that opens reasoning; empty if it opens none."""
    reasoning_format: ReasoningFormat = "auto"
    """With `none` reasoning stays in the content, with its tags."""
    call_ids: bool = True
    """False for calls without ids, also if the model writes some."""

    @property
    def reads_calls(self) -> bool:
        """True if calls are looked for: without tools there are none."""
        return self.parse_tools and bool(self.packed_tools)

    @property
    def tools_by_name(self) -> dict[str, Tool]:
        """The tools by their names, decoded each time."""
        return {tool.name: tool for tool in _decode(self.packed_tools)} if self.packed_tools else {}


def encoded_tools(tools: Sequence[Tool]) -> bytes:
    """Return tools for `ParserOptions`, as JSON: a schema may have integers of more than 64 bits."""
    return msgspec.json.encode(tools) if tools else b""


_decode = msgspec.json.Decoder(tuple[Tool, ...]).decode
