"""Calls of models whose template has no form for them: JSON."""

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

    Also read are objects in a field `tool_call`, `tool_calls` or `function`, and calls as `Hermes` writes them,
    since many models were trained on these. Without `<tool_call>`, only the name of a tool makes it a call.
    """

    name = "generic"
    calls_are_json = True
    markers = CallMarkers(calls=(OPEN,), lines=("{", "["), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True: it is what remains."""
        return True

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the computation that reads calls."""
        tagged, unmarked = ToolCallTag(reader, output, tools), UnmarkedCalls(reader, output, tools)

        def read(marker: str) -> Steps[bool]:
            return (yield from (tagged if marker == OPEN else unmarked).read(marker))

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model is to write them."""
        rendered = ", ".join(map(json_call, calls))
        return f"[{rendered}]" if len(calls) > 1 else rendered

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar's expression for at least one call."""
        call = writer.rule(writer.choice(json_call_expression(writer, tool) for tool in tools))
        if not parallel:
            return call
        listed = writer.repeated(call, writer.text(", "), parallel=True)
        return writer.choice([call, writer.sequence(writer.text("["), listed, writer.text("]"))])
