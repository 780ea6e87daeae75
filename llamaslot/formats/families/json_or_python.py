"""Formats with JSON objects or Python calls: Hermes, Granite, Llama, LFM2, and models without a format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall, as_json
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_calls import JsonCalls
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.python_calls import PythonCalls, python_call, python_call_expression
from llamaslot.formats.reader import Reader, Steps
from llamaslot.formats.tagged_calls import QWEN_TAGS, TaggedCalls, Tags, read_section

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_GRANITE_LIST = "<|tool_call|>"
_PYTHON_TAG = "<|python_tag|>"
_PYTHON_OPEN, _PYTHON_CLOSE = "<|python_start|>", "<|python_end|>"
_LFM2_OPEN, _LFM2_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_BRACKETS = re.compile(r"[\s}\],;]+")


class Hermes(Format):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, with line breaks inside the tags.

    Of Hermes 2 and 3, Qwen 2.5 and 3, MiMo and SmolLM3.
    """

    name = "hermes"
    markers = CallMarkers(calls=(OPEN,), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        # Some versions of SmolLM3's template lack the tag.
        return OPEN in source or "named SmolLM" in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        return ToolCallTag(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{OPEN}\n{_json_call(call)}\n{CLOSE}" for call in calls)

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        objects = (_json_call_expression(writer, tool) for tool in tools)
        return writer.calls(objects, f"{OPEN}\n", f"\n{CLOSE}", "\n", parallel=parallel)


class Granite(Hermes):
    """`<|tool_call|>` and a list of JSON objects in Granite 3; the `Hermes` format in Granite 4.

    After reasoning, Granite 3.3 writes its answer between `<response>` tags.
    """

    name = "granite"
    markers = CallMarkers(calls=(_GRANITE_LIST, OPEN), left_over=(CLOSE,), ignored=("<response>", "</response>"))

    @classmethod
    def recognises(cls, source: str) -> bool:
        return "<|start_of_role|>" in source and (_GRANITE_LIST in source or OPEN in source)

    def render(self, calls: Sequence[ToolCall]) -> str:
        if OPEN in self.source:
            return super().render(calls)
        return f"{_GRANITE_LIST}[{', '.join(map(_json_call, calls))}]"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        if OPEN in self.source:
            return super().calls_expression(writer, tools, parallel=parallel)
        objects = [_json_call_expression(writer, tool) for tool in tools]
        return writer.call_list(objects, f"{_GRANITE_LIST}[", "]", parallel=parallel)


class Llama3(Format):
    """`{"name": "f", "parameters": {...}}` at the start of a line, or after `<|python_tag|>`.

    An answer may also be JSON, so an object is a call only if it names one of the tools. Semicolons or line breaks
    separate calls. Calls of built-in tools look like `<|python_tag|>f.call(a="text")`.
    """

    name = "llama3"
    calls_are_json = True
    calls_stand_alone = True
    markers = CallMarkers(calls=(_PYTHON_TAG, QWEN_TAGS.name_open), lines=("{", "["))

    @classmethod
    def recognises(cls, source: str) -> bool:
        return '{"name": function name, "parameters":' in source or (
            _PYTHON_TAG in source and "<|start_header_id|>" in source
        )

    @property
    def preserved(self) -> tuple[str, ...]:
        return (_PYTHON_TAG, *((self.reasoning.start, self.reasoning.end) if self.reasoning else ()))

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        return UnmarkedCalls(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(_json_call(call, arguments="parameters") for call in calls)

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one call: the templates cannot render several."""
        return writer.choice(_json_call_expression(writer, tool, arguments="parameters") for tool in tools)


class LlamaPython(Format):
    """`[f(a="text", b=1), g()]` at the start of a line, or between `<|python_start|>` and `<|python_end|>`.

    Of Llama 4, and of Llama 3.2 with a template that asks for it.
    """

    name = "llama-pythonic"
    calls_stand_alone = True
    markers = CallMarkers(calls=(_PYTHON_OPEN,), lines=("[", "{"), left_over=(_PYTHON_CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        return "[func_name1(params_name1=" in source or _PYTHON_OPEN in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        return UnmarkedCalls(reader, output, tools).read

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"[{', '.join(map(python_call, calls))}]"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        calls = [python_call_expression(writer, tool) for tool in tools]
        return writer.call_list(calls, "[", "]", parallel=parallel)


class Lfm2(Format):
    """`<|tool_call_start|>[f(a="text", b=1), g()]<|tool_call_end|>`; prompts can ask for JSON instead.

    Of LFM2 and LFM2.5.
    """

    name = "lfm2"
    markers = CallMarkers(calls=(_LFM2_OPEN,), left_over=(_LFM2_CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        # Templates without the marker list tools in these ways.
        return _LFM2_OPEN in source or "<|tool_list_start|>" in source or "List of tools: [" in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
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
            yield from reader.accept(_LFM2_CLOSE)
            return True

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"{_LFM2_OPEN}[{', '.join(map(python_call, calls))}]{_LFM2_CLOSE}"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        calls = [python_call_expression(writer, tool) for tool in tools]
        return writer.call_list(calls, f"{_LFM2_OPEN}[", f"]{_LFM2_CLOSE}", parallel=parallel)


class Generic(Format):
    """`{"name": "f", "arguments": {...}}` at the start of a line, or a list of such objects.

    For models whose template defines no format. The parser also accepts these objects inside a field `tool_call`,
    `tool_calls` or `function`, and the `Hermes` format, because many models were trained on them. Without
    `<tool_call>`, an object is a call only if it names one of the tools.
    """

    name = "generic"
    calls_are_json = True
    calls_stand_alone = True
    markers = CallMarkers(calls=(OPEN,), lines=("{", "["), left_over=(CLOSE,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        return True

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        tagged, unmarked = ToolCallTag(reader, output, tools), UnmarkedCalls(reader, output, tools)

        def read(marker: str) -> Steps[bool]:
            return (yield from (tagged if marker == OPEN else unmarked).read(marker))

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        rendered = ", ".join(map(_json_call, calls))
        return f"[{rendered}]" if len(calls) > 1 else rendered

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        call = writer.rule(writer.choice(_json_call_expression(writer, tool) for tool in tools))
        return writer.choice([call, writer.call_list([call], "[", "]", parallel=True)]) if parallel else call


class ToolCallTag:
    """Reads calls between `<tool_call>` tags: JSON, or the tagged arguments that models sometimes write instead."""

    def __init__(self, reader: Reader, output: Output, tools: Mapping[str, Tool], tags: Tags = QWEN_TAGS) -> None:
        self._reader = reader
        self._json = JsonCalls(reader, output)
        self._tagged = TaggedCalls(reader, output, tools, tags, section=(OPEN, CLOSE))
        self._qwen = TaggedCalls(reader, output, tools, QWEN_TAGS, section=(OPEN, CLOSE))
        self._output = output

    def read(self, marker: str) -> Steps[bool]:
        """Read the calls after the opening tag or after `<function=`, through the closing tag."""
        if marker == QWEN_TAGS.name_open:
            is_call = yield from self._qwen.read(opened=True)
        else:
            yield from self._reader.whitespace()
            is_call = yield from self._one()
        if is_call:
            yield from read_section(
                self._reader,
                self._output,
                self._one,
                starts=("{", QWEN_TAGS.name_open),
                tags=QWEN_TAGS,
                close=CLOSE,
                between=_BRACKETS,
            )
        return is_call

    def _one(self) -> Steps[bool]:
        match (yield from self._reader.looking_at("{", "[", QWEN_TAGS.name_open)):
            case "{" | "[":
                return (yield from self._json.read_all())
            case QWEN_TAGS.name_open:
                return (yield from self._qwen.read())
            case _:
                return (yield from self._tagged.read())


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
            separator = yield from self._reader.accept(";", _PYTHON_CLOSE)
            yield from self._reader.whitespace()
            is_call = separator == ";" and (yield from self._one())
            rest = self._reader.release(mark)
            if not is_call:
                if separator == _PYTHON_CLOSE or rest.strip() == separator:
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


def _json_call(call: ToolCall, *, arguments: str = "arguments") -> str:
    """Return a call as a JSON object; `arguments` names the field for its arguments."""
    return f'{{"name": "{call.name}", "{arguments}": {as_json(call.arguments)}}}'


def _json_call_expression(writer: GrammarWriter, tool: Tool, *, arguments: str = "arguments") -> str:
    """Return a grammar expression for a call as `_json_call` writes it."""
    before = writer.text(f'{{"name": "{tool.name}", "{arguments}": ')
    return writer.rule(writer.sequence(before, writer.arguments(tool), writer.text("}")))
