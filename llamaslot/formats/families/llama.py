"""Tool calls of Llama 3 and 4, in JSON or Python syntax, without a marker before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.families.hermes import json_call, json_call_expression
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_calls import JsonCalls
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.python_calls import PythonCalls, python_call, python_call_expression
from llamaslot.formats.reader import Reader, Steps
from llamaslot.formats.tagged_calls import QWEN_TAGS, TaggedCalls

PYTHON_TAG = "<|python_tag|>"
PYTHON_OPEN, PYTHON_CLOSE = "<|python_start|>", "<|python_end|>"


class Llama3(Format):
    """`{"name": "f", "parameters": {...}}` at the start of a line, or after `<|python_tag|>`.

    An answer may also be JSON, so an object is a call only if it names one of the tools. Semicolons or line breaks
    separate calls. Calls of built-in tools look like `<|python_tag|>f.call(a="text")`.
    """

    name = "llama3"
    calls_are_json = True
    markers = CallMarkers(calls=(PYTHON_TAG, QWEN_TAGS.name_open), lines=("{", "["))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template asks for calls in JSON."""
        return '{"name": function name, "parameters":' in source or (
            PYTHON_TAG in source and "<|start_header_id|>" in source
        )

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        return (PYTHON_TAG, *((self.reasoning.start, self.reasoning.end) if self.reasoning else ()))

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        return UnmarkedCalls(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return "; ".join(json_call(call, arguments="parameters") for call in calls)

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one call: the templates cannot render several."""
        return writer.choice(json_call_expression(writer, tool, arguments="parameters") for tool in tools)


class LlamaPython(Format):
    """`[f(a="text", b=1), g()]` at the start of a line, or between `<|python_start|>` and `<|python_end|>`."""

    name = "llama-pythonic"
    markers = CallMarkers(calls=(PYTHON_OPEN,), lines=("[", "{"), left_over=(PYTHON_CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template asks for calls in Python syntax."""
        return "[func_name1(params_name1=" in source or PYTHON_OPEN in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        return UnmarkedCalls(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return f"[{', '.join(map(python_call, calls))}]"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        call = writer.rule(writer.choice(python_call_expression(writer, tool) for tool in tools))
        calls = writer.repeated(call, writer.text(", "), parallel=parallel)
        return writer.sequence(writer.text("["), calls, writer.text("]"))


class UnmarkedCalls:
    """Reads calls of known tools, in JSON or Python syntax."""

    def __init__(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> None:
        self._reader = reader
        self._output = output
        self._json = JsonCalls(reader, output, only=tools)
        self._python = PythonCalls(reader, output, tools, known_only=True)
        self._tagged = TaggedCalls(reader, output, tools, QWEN_TAGS, section=("", ""))

    def read(self, marker: str) -> Steps[bool]:
        """Read calls that begin with a bracket or follow a marker, with the separators between them."""
        if marker == QWEN_TAGS.name_open:
            return (yield from self._tagged.read(opened=True))
        if marker not in ("{", "["):
            yield from self._reader.whitespace()
        if not (yield from self._one()):
            return False
        while True:
            mark = self._reader.mark()
            yield from self._reader.whitespace()
            separator = yield from self._reader.accept(";", PYTHON_CLOSE)
            yield from self._reader.whitespace()
            is_call = separator == ";" and (yield from self._one())
            rest = self._reader.release(mark)
            if not is_call:
                if separator == PYTHON_CLOSE or rest.strip() == separator:
                    self._output.leave_out(separator)
                else:
                    self._output.rejected(rest, self._reader)
                return True

    def _one(self) -> Steps[bool]:
        if (yield from self._reader.looking_at("{")):
            return (yield from self._json.read())
        if not (yield from self._reader.accept("[")):
            return (yield from self._python.read())
        yield from self._reader.whitespace()
        if (yield from self._reader.looking_at("{")):
            return (yield from self._json.read_items())
        return (yield from self._python.read_items())
