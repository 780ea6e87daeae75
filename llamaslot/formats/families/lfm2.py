"""Tool calls of LFM2 and LFM2.5, in Python syntax between markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_calls import JsonCalls
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.python_calls import PythonCalls, python_call, python_call_expression
from llamaslot.formats.reader import Reader, Steps

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2(Format):
    """`<|tool_call_start|>[f(a="text", b=1), g()]<|tool_call_end|>`; prompts can ask for JSON instead."""

    name = "lfm2"
    markers = CallMarkers(calls=(OPEN,), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template has the call marker or lists tools as LFM2 and LFM2.5 do."""
        return OPEN in source or "<|tool_list_start|>" in source or "List of tools: [" in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        json_calls = JsonCalls(reader, output)
        python_calls = PythonCalls(reader, output, tools)

        def read(_: str) -> Steps[bool]:
            yield from reader.whitespace()
            in_list = yield from reader.accept("[")
            yield from reader.whitespace()
            calls = json_calls if (yield from reader.looking_at("{")) else python_calls
            if not (yield from calls.read_items() if in_list else calls.read()):
                return False
            yield from reader.whitespace()
            yield from reader.accept(CLOSE)
            return True

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return f"{OPEN}[{', '.join(map(python_call, calls))}]{CLOSE}"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        call = writer.rule(writer.choice(python_call_expression(writer, tool) for tool in tools))
        calls = writer.repeated(call, writer.text(", "), parallel=parallel)
        return writer.sequence(writer.text(f"{OPEN}["), calls, writer.text(f"]{CLOSE}"))
