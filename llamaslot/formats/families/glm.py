"""Tool calls of GLM 4.5 and later, with tags around the name and value of each argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.families.hermes import CLOSE, OPEN, ToolCallTag
from llamaslot.formats.fields import fields_of, value_text
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter, tagged_arguments
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader
from llamaslot.formats.tagged_calls import GLM_TAGS


class Glm(Format):
    """`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.

    GLM 4.5 and 4.6 have line breaks between the tags, GLM 4.7 has none.
    """

    name = "glm4"
    markers = CallMarkers(calls=(OPEN,), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template mentions the tags."""
        return OPEN in source and GLM_TAGS.parameter_open in source

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        tags = GLM_TAGS
        inner = (tags.parameter_open, tags.parameter_close, tags.value_open, tags.value_close)
        return (*super().preserved, *inner)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        return ToolCallTag(reader, output, tools, GLM_TAGS).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return self._line.join(map(self._rendered, calls))

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        line = self._line
        functions = []
        for tool in tools:
            between, after = f"</arg_key>{line}<arg_value>", f"</arg_value>{line}"
            arguments = tagged_arguments(writer, tool, "<arg_key>", between, after)
            functions.append(writer.rule(writer.sequence(writer.text(tool.name + line), arguments)))
        call = writer.rule(writer.sequence(writer.text(OPEN), writer.choice(functions), writer.text(CLOSE)))
        return writer.repeated(call, writer.text(line), parallel=parallel)

    @property
    def _line(self) -> str:
        return "" if "</arg_key><arg_value>" in self.source else "\n"

    def _rendered(self, call: ToolCall) -> str:
        line = self._line
        arguments = "".join(
            f"<arg_key>{name}</arg_key>{line}<arg_value>{value_text(value)}</arg_value>{line}"
            for name, value in fields_of(call.arguments).items()
        )
        return f"{OPEN}{call.name}{line}{arguments}{CLOSE}"
