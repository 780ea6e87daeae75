"""Tool calls of Granite 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.families.hermes import CLOSE, OPEN, Hermes, ToolCallTag, json_call, json_call_expression
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader

LIST = "<|tool_call|>"


class Granite(Hermes):
    """`<|tool_call|>` and a list of JSON objects in Granite 3; the `Hermes` format in Granite 4.

    After reasoning, Granite 3.3 writes its answer between `<response>` tags.
    """

    name = "granite"
    markers = CallMarkers(calls=(LIST, OPEN), left_over=(CLOSE,), ignored=("<response>", "</response>"))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template has Granite's role marker and mentions calls."""
        return "<|start_of_role|>" in source and (LIST in source or OPEN in source)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        return ToolCallTag(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        if self._in_list:
            return f"{LIST}[{', '.join(map(json_call, calls))}]"
        return super().render(calls)

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        if not self._in_list:
            return super().calls_expression(writer, tools, parallel=parallel)
        call = writer.rule(writer.choice(json_call_expression(writer, tool) for tool in tools))
        calls = writer.repeated(call, writer.text(", "), parallel=parallel)
        return writer.sequence(writer.text(f"{LIST}["), calls, writer.text("]"))

    @property
    def _in_list(self) -> bool:
        return OPEN not in self.source
