"""JSON tool calls between `<tool_call>` tags: Hermes 2 and 3, Qwen 2.5 and 3, MiMo, SmolLM3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.fields import as_json
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_calls import JsonCalls
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps
from llamaslot.formats.tagged_calls import QWEN_TAGS, TaggedCalls, Tags

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BRACKETS = re.compile(r"[\s}\],;]+")


class Hermes(Format):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, with line breaks inside the tags."""

    name = "hermes"
    markers = CallMarkers(calls=(OPEN,), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template mentions the tag or is SmolLM3's (some versions of it lack the tag)."""
        return OPEN in source or "named SmolLM" in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        return ToolCallTag(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return "\n".join(f"{OPEN}\n{json_call(call)}\n{CLOSE}" for call in calls)

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        calls = writer.choice(json_call_expression(writer, tool) for tool in tools)
        tagged = writer.rule(writer.sequence(writer.text(f"{OPEN}\n"), calls, writer.text(f"\n{CLOSE}")))
        return writer.repeated(tagged, writer.text("\n"), parallel=parallel)


class ToolCallTag:
    """Reads calls between `<tool_call>` tags: JSON, or the tagged arguments that models sometimes write instead."""

    def __init__(self, reader: Reader, output: Output, tools: Mapping[str, Tool], tags: Tags = QWEN_TAGS) -> None:
        self._reader = reader
        self._json = JsonCalls(reader, output)
        self._tagged = TaggedCalls(reader, output, tools, tags, section=(OPEN, CLOSE))
        self._qwen = TaggedCalls(reader, output, tools, QWEN_TAGS, section=(OPEN, CLOSE))
        self._output = output

    def read(self, marker: str) -> Steps[bool]:
        """Read the calls after the opening tag or after `<function=`, through the closing tag."""
        opened = marker == QWEN_TAGS.name_open
        if opened:
            is_call = yield from self._qwen.read(opened=True)
        else:
            yield from self._reader.whitespace()
            is_call = yield from self._one()
        if not is_call:
            return False
        while True:
            yield from self._reader.all(_BRACKETS)
            if (yield from self._reader.accept(CLOSE)) or self._reader.fragment(QWEN_TAGS.call_close, CLOSE):
                return True
            if not (yield from self._reader.looking_at("{", QWEN_TAGS.name_open)):
                if begun := self._reader.fragment(QWEN_TAGS.name_open):
                    self._output.cut(begun)
                return True
            mark = self._reader.mark()
            is_call = yield from self._one()
            rejected = self._reader.release(mark)
            if not is_call:
                self._output.rejected(rejected, self._reader)
                return True

    def _one(self) -> Steps[bool]:
        match (yield from self._reader.looking_at("{", "[", QWEN_TAGS.name_open)):
            case "{" | "[":
                return (yield from self._json.read_all())
            case QWEN_TAGS.name_open:
                return (yield from self._qwen.read())
            case _:
                return (yield from self._tagged.read())


def json_call(call: ToolCall, *, arguments: str = "arguments") -> str:
    """Return a call as a JSON object; `arguments` names the field for its arguments."""
    return f'{{"name": "{call.name}", "{arguments}": {as_json(call.arguments)}}}'


def json_call_expression(writer: GrammarWriter, tool: Tool, *, arguments: str = "arguments") -> str:
    """Return a grammar expression for a call as `json_call` writes it."""
    before = writer.text(f'{{"name": "{tool.name}", "{arguments}": ')
    return writer.rule(writer.sequence(before, writer.arguments(tool), writer.text("}")))
