"""JSON tool calls for models whose template does not define a format for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.families.hermes import CLOSE, OPEN, ToolCallTag, json_call, json_call_expression
from llamaslot.formats.families.llama import UnmarkedCalls
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps


class Generic(Format):
    """`{"name": "f", "arguments": {...}}` at the start of a line, or a list of such objects.

    The parser also accepts these objects inside a field `tool_call`, `tool_calls` or `function`, and the `Hermes`
    format, because many models were trained on them. Without `<tool_call>`, an object is a call only if it names
    one of the tools.
    """

    name = "generic"
    calls_are_json = True
    markers = CallMarkers(calls=(OPEN,), lines=("{", "["), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True: this format is the fallback."""
        return True

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        tagged, unmarked = ToolCallTag(reader, output, tools), UnmarkedCalls(reader, output, tools)

        def read(marker: str) -> Steps[bool]:
            return (yield from (tagged if marker == OPEN else unmarked).read(marker))

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model should write them."""
        rendered = ", ".join(map(json_call, calls))
        return f"[{rendered}]" if len(calls) > 1 else rendered

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        call = writer.rule(writer.choice(json_call_expression(writer, tool) for tool in tools))
        if not parallel:
            return call
        listed = writer.repeated(call, writer.text(", "), parallel=True)
        return writer.choice([call, writer.sequence(writer.text("["), listed, writer.text("]"))])
