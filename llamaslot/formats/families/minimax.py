"""Tool calls of MiniMax M2, with tagged arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.fields import fields_of, value_text
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter, tagged_arguments
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps
from llamaslot.formats.tagged_calls import MINIMAX_TAGS, TaggedCalls

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


class MiniMax(Format):
    """One section, with `<invoke name="f"><parameter name="a">1</parameter></invoke>` for each call in it."""

    name = "minimax-m2"
    markers = CallMarkers(calls=(OPEN,), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template mentions the tag."""
        return OPEN in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        calls = TaggedCalls(reader, output, tools, MINIMAX_TAGS, section=(OPEN, CLOSE))

        def read(_: str) -> Steps[bool]:
            yield from reader.whitespace()
            if not (yield from calls.read()):
                return False
            while True:
                yield from reader.whitespace()
                if (yield from reader.accept(CLOSE)) or reader.fragment(MINIMAX_TAGS.call_close, CLOSE):
                    return True
                if not (yield from reader.looking_at(MINIMAX_TAGS.name_open)):
                    if begun := reader.fragment(MINIMAX_TAGS.name_open):
                        output.cut(begun)
                    return True
                mark = reader.mark()
                is_call = yield from calls.read()
                rejected = reader.release(mark)
                if not is_call:
                    output.rejected(rejected, reader)
                    return True

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        rendered = "".join(f'<invoke name="{call.name}">\n{self._arguments(call)}</invoke>\n' for call in calls)
        return f"{OPEN}\n{rendered}{CLOSE}"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        functions = []
        for tool in tools:
            opening = writer.text(f'<invoke name="{tool.name}">\n')
            arguments = tagged_arguments(writer, tool, '<parameter name="', '">', "</parameter>\n")
            functions.append(writer.rule(writer.sequence(opening, arguments)))
        call = writer.rule(writer.sequence(writer.choice(functions), writer.text("</invoke>\n")))
        calls = writer.repeated(call, "", parallel=parallel)
        return writer.sequence(writer.text(f"{OPEN}\n"), calls, writer.text(CLOSE))

    def _arguments(self, call: ToolCall) -> str:
        return "".join(
            f'<parameter name="{name}">{value_text(value)}</parameter>\n'
            for name, value in fields_of(call.arguments).items()
        )
