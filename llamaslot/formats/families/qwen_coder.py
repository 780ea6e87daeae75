"""Tool calls with tagged arguments: Qwen3-Coder, Qwen3.5, Nemotron 3 Nano, Step 3.5."""

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
from llamaslot.formats.tagged_calls import QWEN_TAGS


class QwenCoder(Format):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, each part on its own line.

    The models sometimes omit the first tag, or start a call without closing their reasoning.
    """

    name = "qwen3-coder"
    markers = CallMarkers(calls=(OPEN, QWEN_TAGS.name_open), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template mentions all tags."""
        return OPEN in source and QWEN_TAGS.name_open in source and QWEN_TAGS.parameter_open in source

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        return tuple(text for text in super().preserved if text != QWEN_TAGS.name_open)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        return ToolCallTag(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return "\n".join(map(self._rendered, calls))

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        functions = []
        for tool in tools:
            arguments = tagged_arguments(writer, tool, "<parameter=", ">\n", "\n</parameter>\n")
            functions.append(writer.rule(writer.sequence(writer.text(f"<function={tool.name}>\n"), arguments)))
        opening, closing = writer.text(f"{OPEN}\n"), writer.text(f"</function>\n{CLOSE}")
        call = writer.rule(writer.sequence(opening, writer.choice(functions), closing))
        return writer.repeated(call, writer.text("\n"), parallel=parallel)

    def _rendered(self, call: ToolCall) -> str:
        arguments = "".join(
            f"<parameter={name}>\n{value_text(value)}\n</parameter>\n"
            for name, value in fields_of(call.arguments).items()
        )
        return f"{OPEN}\n<function={call.name}>\n{arguments}</function>\n{CLOSE}"
