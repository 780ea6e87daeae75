"""Tool calls of DeepSeek R1, its distilled models and DeepSeek V3.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.fields import as_json
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_value import copy_arguments
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps

SECTION_OPEN, SECTION_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPEN, CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.\-:/]+")


class DeepSeek(Format):
    """Calls with a separator token; R1 wraps the arguments in a code block.

    V3.1 writes the name, the separator and the arguments. R1 writes the word `function`, the separator, the name
    and the arguments in a `` ```json `` block. The parser accepts both, whatever the template says.
    """

    name = "deepseek"
    markers = CallMarkers(calls=(SECTION_OPEN, CALL_OPEN), left_over=(CALL_CLOSE, SECTION_CLOSE))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template mentions the marker before calls."""
        return SECTION_OPEN in source

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        return (*super().preserved, SEPARATOR)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""

        def read(marker: str) -> Steps[bool]:
            if marker == SECTION_OPEN:
                yield from reader.whitespace()
                yield from reader.accept(CALL_OPEN)
            return (yield from _read_call(reader, output))

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        rendered = [f"{CALL_OPEN}{self._before(call.name)}{as_json(call.arguments)}{self._after}" for call in calls]
        return f"{SECTION_OPEN}{self._between.join(rendered)}{SECTION_CLOSE}"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        functions = [
            writer.rule(writer.sequence(writer.text(self._before(tool.name)), writer.arguments(tool)))
            for tool in tools
        ]
        call = writer.rule(
            writer.sequence(writer.text(CALL_OPEN), writer.choice(functions), writer.text(self._after))
        )
        calls = writer.repeated(call, writer.text(self._between), parallel=parallel)
        return writer.sequence(writer.text(SECTION_OPEN), calls, writer.text(SECTION_CLOSE))

    @property
    def _in_blocks(self) -> bool:
        return "```json" in self.source

    def _before(self, name: str) -> str:
        return f"function{SEPARATOR}{name}\n```json\n" if self._in_blocks else f"{name}{SEPARATOR}"

    @property
    def _after(self) -> str:
        return f"\n```{CALL_CLOSE}" if self._in_blocks else CALL_CLOSE

    @property
    def _between(self) -> str:
        return "\n" if self._in_blocks else ""


def _read_call(reader: Reader, output: Output) -> Steps[bool]:
    yield from reader.whitespace()
    name = yield from reader.all(_NAME)
    if not name or not (yield from reader.accept(SEPARATOR)):
        return False
    yield from reader.whitespace()
    if not (yield from reader.looking_at("{")):
        name = yield from reader.all(_NAME)
        yield from reader.whitespace()
        yield from reader.accept("```json", "```")
        yield from reader.whitespace()
        if not name or not (yield from reader.looking_at("{")):
            return False
    output.call(name, None)
    yield from copy_arguments(reader, output)
    yield from reader.whitespace()
    yield from reader.accept("```")
    reader.fragment("```")
    yield from reader.whitespace()
    yield from reader.accept(CALL_CLOSE)
    return True
