"""Formats with tags around each argument: Qwen3-Coder and others, GLM, MiniMax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall, fields_of, value_text
from llamaslot.formats.families.json_or_python import CLOSE, OPEN, ToolCallTag
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter, tagged_arguments
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps
from llamaslot.formats.tagged_calls import GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, TaggedCalls, read_section

_MINIMAX_OPEN, _MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


class QwenCoder(Format):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, each part on its own line.

    Of Qwen3-Coder, Qwen3.5, Nemotron 3 Nano and Step 3.5. The models sometimes omit the first tag, or start a call
    without closing their reasoning.
    """

    name = "qwen3-coder"
    markers = CallMarkers(calls=(OPEN, QWEN_TAGS.name_open), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        return OPEN in source and QWEN_TAGS.name_open in source and QWEN_TAGS.parameter_open in source

    @property
    def preserved(self) -> tuple[str, ...]:
        return tuple(text for text in super().preserved if text != QWEN_TAGS.name_open)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        return ToolCallTag(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(
            f"{OPEN}\n<function={call.name}>\n"
            + "".join(
                f"<parameter={name}>\n{value_text(value)}\n</parameter>\n"
                for name, value in fields_of(call.arguments).items()
            )
            + f"</function>\n{CLOSE}"
            for call in calls
        )

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        functions = []
        for tool in tools:
            arguments = tagged_arguments(writer, tool, "<parameter=", ">\n", "\n</parameter>\n")
            functions.append(writer.rule(writer.sequence(writer.text(f"<function={tool.name}>\n"), arguments)))
        return writer.calls(functions, f"{OPEN}\n", f"</function>\n{CLOSE}", "\n", parallel=parallel)


class Glm(Format):
    """`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.

    GLM 4.5 and 4.6 have line breaks between the tags, GLM 4.7 has none.
    """

    name = "glm4"
    markers = CallMarkers(calls=(OPEN,), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        return OPEN in source and GLM_TAGS.parameter_open in source

    @property
    def preserved(self) -> tuple[str, ...]:
        tags = GLM_TAGS
        inner = (tags.parameter_open, tags.parameter_close, tags.value_open, tags.value_close)
        return (*super().preserved, *inner)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        return ToolCallTag(reader, output, tools, GLM_TAGS).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        line = self._line
        return line.join(
            f"{OPEN}{call.name}{line}"
            + "".join(
                f"<arg_key>{name}</arg_key>{line}<arg_value>{value_text(value)}</arg_value>{line}"
                for name, value in fields_of(call.arguments).items()
            )
            + CLOSE
            for call in calls
        )

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        line = self._line
        functions = []
        for tool in tools:
            between, after = f"</arg_key>{line}<arg_value>", f"</arg_value>{line}"
            arguments = tagged_arguments(writer, tool, "<arg_key>", between, after)
            functions.append(writer.rule(writer.sequence(writer.text(tool.name + line), arguments)))
        return writer.calls(functions, OPEN, CLOSE, line, parallel=parallel)

    @property
    def _line(self) -> str:
        return "" if "</arg_key><arg_value>" in self.source else "\n"


class MiniMax(Format):
    """One section, with `<invoke name="f"><parameter name="a">1</parameter></invoke>` for each call in it.

    Of MiniMax M2.
    """

    name = "minimax-m2"
    markers = CallMarkers(calls=(_MINIMAX_OPEN,), left_over=(_MINIMAX_CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        return _MINIMAX_OPEN in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        tags, close = MINIMAX_TAGS, _MINIMAX_CLOSE
        calls = TaggedCalls(reader, output, tools, tags, section=(_MINIMAX_OPEN, close))

        def read(_: str) -> Steps[bool]:
            yield from reader.whitespace()
            is_call = yield from calls.read()
            if is_call:
                yield from read_section(
                    reader, output, calls.read, starts=(tags.name_open,), tags=tags, close=close
                )
            return is_call

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        rendered = "".join(
            f'<invoke name="{call.name}">\n'
            + "".join(
                f'<parameter name="{name}">{value_text(value)}</parameter>\n'
                for name, value in fields_of(call.arguments).items()
            )
            + "</invoke>\n"
            for call in calls
        )
        return f"{_MINIMAX_OPEN}\n{rendered}{_MINIMAX_CLOSE}"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        functions = []
        for tool in tools:
            opening = writer.text(f'<invoke name="{tool.name}">\n')
            arguments = tagged_arguments(writer, tool, '<parameter name="', '">', "</parameter>\n")
            functions.append(writer.rule(writer.sequence(opening, arguments)))
        calls = writer.calls(functions, "", "</invoke>\n", "", parallel=parallel)
        return writer.sequence(writer.text(f"{_MINIMAX_OPEN}\n"), calls, writer.text(_MINIMAX_CLOSE))
