"""Formats with JSON objects or Python calls: Hermes, Granite, Llama, LFM2, and models without a format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llamaslot.base.generation.tools import Tool
from llamaslot.base.json_schemas import value_types
from llamaslot.formats.calls import ToolCall, as_json, fields_of
from llamaslot.formats.families.tagged_arguments import CLOSE, OPEN, QWEN_TAGS, TaggedCalls, ToolCallTag
from llamaslot.formats.format import Format, Layout
from llamaslot.formats.grammar import GrammarWriter, object_schema, parameters_of, takes_any_names
from llamaslot.formats.json_calls import JsonCalls, read_list
from llamaslot.formats.json_value import PYTHON_QUOTES, ValueCopier
from llamaslot.formats.message import CallMarkers, Output, ReasoningTags
from llamaslot.formats.reader import Markers, Reader, Steps

_GRANITE_LIST = "<|tool_call|>"
_PYTHON_TAG = "<|python_tag|>"
_PYTHON_OPEN, _PYTHON_CLOSE = "<|python_start|>", "<|python_end|>"
_LFM2_OPEN, _LFM2_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME = re.compile(r"[\w.\-]+")
_PARAMETER = re.compile(r"[^\s=,()\[\]{}\"']+")
_PYTHON_LITERALS = {True: "True", False: "False", None: "None"}
_PYTHON_TEXTS = (("boolean", "True"), ("boolean", "False"), ("null", "None"))


class JsonObjects(Format):
    """Formats that write a call as `{"name": "f", "arguments": {...}}`."""

    arguments_key: ClassVar[str] = "arguments"

    def call_text(self, call: ToolCall) -> str:
        return f'{{"name": "{call.name}", "{self.arguments_key}": {as_json(call.arguments)}}}'

    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        before = writer.text(f'{{"name": "{tool.name}", "{self.arguments_key}": ')
        return writer.sequence(before, writer.arguments(tool), writer.text("}"))


class PythonLists(Format):
    """Formats that write calls as a Python list, `[f(a="text", b=1), g()]`; lists and objects stay JSON."""

    def call_text(self, call: ToolCall) -> str:
        arguments = [f"{name}={_python_text(value)}" for name, value in fields_of(call.arguments).items()]
        return f"{call.name}({', '.join(arguments)})"

    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        """Return a grammar expression for a call, required arguments first."""
        schema = object_schema(tool)
        properties, names = parameters_of(schema)
        parts = {
            name: writer.rule(writer.sequence(writer.text(f"{name}="), _python_value(writer, each, schema)))
            for name, each in properties.items()
        }
        arguments = writer.listed(parts, names, ", ")
        if takes_any_names(schema):
            part = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {_python_value(writer, {}, {})}'
            arguments = f"({writer.repeated(part, ', ')})?"
        return writer.sequence(writer.text(f"{tool.name}("), arguments, writer.text(")"))


class Hermes(JsonObjects):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, with line breaks inside the tags.

    Of Hermes 2 and 3, Qwen 2.5 and 3, MiMo and SmolLM3.
    """

    name = "hermes"
    markers = CallMarkers(calls=(OPEN,), left_over=(CLOSE,))
    layout = Layout(f"{OPEN}\n", f"\n{CLOSE}", "\n")

    @classmethod
    def recognises(cls, source: str) -> bool:
        # Some versions of SmolLM3's template lack the tag.
        return OPEN in source or "named SmolLM" in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        return ToolCallTag(reader, output, tools).read(marker)


class Granite(Hermes):
    """`<|tool_call|>` and a list of JSON objects in Granite 3; the `Hermes` format in Granite 4.

    After reasoning, Granite 3.3 writes its answer between `<response>` tags.
    """

    name = "granite"
    markers = CallMarkers(calls=(_GRANITE_LIST, OPEN), left_over=(CLOSE,), ignored=("<response>", "</response>"))

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        super().__init__(source, special, reasoning)
        if OPEN not in source:
            self.layout = Layout(separator=", ", start=f"{_GRANITE_LIST}[", end="]")

    @classmethod
    def recognises(cls, source: str) -> bool:
        return "<|start_of_role|>" in source and (_GRANITE_LIST in source or OPEN in source)


class Llama3(JsonObjects):
    """`{"name": "f", "parameters": {...}}` at the start of a line, or after `<|python_tag|>`.

    An answer may also be JSON, so an object is a call only if it names one of the tools. Semicolons or line breaks
    separate calls. Calls of built-in tools look like `<|python_tag|>f.call(a="text")`.
    """

    name = "llama3"
    arguments_key = "parameters"
    calls_are_json = True
    calls_stand_alone = True
    allows_several_calls = False
    markers = CallMarkers(calls=(_PYTHON_TAG, QWEN_TAGS.name_open), lines=("{", "["))
    layout = Layout(separator="; ")

    @classmethod
    def recognises(cls, source: str) -> bool:
        return '{"name": function name, "parameters":' in source or (
            _PYTHON_TAG in source and "<|start_header_id|>" in source
        )

    @property
    def preserved(self) -> tuple[str, ...]:
        return tuple(text for text in super().preserved if text != QWEN_TAGS.name_open)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        return UnmarkedCalls(reader, output, tools).read(marker)


class LlamaPython(PythonLists):
    """`[f(a="text", b=1), g()]` at the start of a line, or between `<|python_start|>` and `<|python_end|>`.

    Of Llama 4, and of Llama 3.2 with a template that asks for it.
    """

    name = "llama-pythonic"
    calls_stand_alone = True
    markers = CallMarkers(calls=(_PYTHON_OPEN,), lines=("[", "{"), left_over=(_PYTHON_CLOSE,))
    layout = Layout(separator=", ", start="[", end="]")

    @classmethod
    def recognises(cls, source: str) -> bool:
        return "[func_name1(params_name1=" in source or _PYTHON_OPEN in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        return UnmarkedCalls(reader, output, tools).read(marker)


class Lfm2(PythonLists):
    """`<|tool_call_start|>[f(a="text", b=1), g()]<|tool_call_end|>`; prompts can ask for JSON instead.

    Of LFM2 and LFM2.5.
    """

    name = "lfm2"
    markers = CallMarkers(calls=(_LFM2_OPEN,), left_over=(_LFM2_CLOSE,))
    layout = Layout(separator=", ", start=f"{_LFM2_OPEN}[", end=f"]{_LFM2_CLOSE}")

    @classmethod
    def recognises(cls, source: str) -> bool:
        # Templates without the marker list tools in these ways.
        return _LFM2_OPEN in source or "<|tool_list_start|>" in source or "List of tools: [" in source

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        yield from reader.whitespace()
        in_list = yield from reader.accept("[")
        yield from reader.whitespace()
        is_json = yield from reader.looking_at("{")
        calls = JsonCalls(reader, output) if is_json else PythonCalls(reader, output, tools)
        if not (yield from calls.read_items() if in_list else calls.read()):
            return False
        yield from reader.whitespace()
        yield from reader.accept(_LFM2_CLOSE)
        return True


class Generic(JsonObjects):
    """`{"name": "f", "arguments": {...}}` at the start of a line, or a list of such objects.

    For models whose template defines no format. The parser also accepts these objects inside a field `tool_call`,
    `tool_calls` or `function`, and the `Hermes` format, because many models were trained on them. Without
    `<tool_call>`, an object is a call only if it names one of the tools.
    """

    name = "generic"
    calls_are_json = True
    calls_stand_alone = True
    markers = CallMarkers(calls=(OPEN,), lines=("{", "["), left_over=(CLOSE,))
    layout = Layout(separator=", ")

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        calls = ToolCallTag if marker == OPEN else UnmarkedCalls
        return calls(reader, output, tools).read(marker)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"[{super().render(calls)}]" if len(calls) > 1 else super().render(calls)

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        call = super().calls_expression(writer, tools, parallel=False)
        calls = writer.sequence(writer.text("["), writer.repeated(call, ", "), writer.text("]"))
        return writer.choice([call, calls]) if parallel else call


@dataclass(frozen=True, slots=True)
class UnmarkedCalls:
    """Reads calls of known tools, in JSON or Python syntax."""

    reader: Reader
    output: Output
    tools: Mapping[str, Tool]

    def read(self, marker: str) -> Steps[bool]:
        """Read calls that begin with a bracket or follow a marker, with the separators between them."""
        if marker == QWEN_TAGS.name_open:
            calls = TaggedCalls(self.reader, self.output, self.tools, QWEN_TAGS, section=("", ""))
            return (yield from calls.read(opened=True))
        if marker not in ("{", "["):
            yield from self.reader.whitespace()
        if not (yield from self._one()):
            return False
        while True:
            mark = self.reader.mark()
            yield from self.reader.whitespace()
            separator = yield from self.reader.accept(";", _PYTHON_CLOSE)
            yield from self.reader.whitespace()
            is_call = separator == ";" and (yield from self._one())
            rest = self.reader.release(mark)
            if not is_call:
                if separator == _PYTHON_CLOSE or rest.strip() == separator:
                    self.output.leave_out(separator)
                else:
                    self.output.rejected(rest)
                return True

    def _one(self) -> Steps[bool]:
        json_calls = JsonCalls(self.reader, self.output, only=self.tools)
        python_calls = PythonCalls(self.reader, self.output, self.tools, known_only=True)
        if (yield from self.reader.looking_at("{")):
            return (yield from json_calls.read())
        if not (yield from self.reader.accept("[")):
            return (yield from python_calls.read())
        yield from self.reader.whitespace()
        if (yield from self.reader.looking_at("{")):
            return (yield from json_calls.read_items())
        return (yield from python_calls.read_items())


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Reads calls from `reader` to `output`; with `known_only`, only the given tools can be called.

    Positional arguments get their names from the tool's schema, in its order. Names in a schema need not be valid
    Python names: many look like `content-type` or `$filter`.
    """

    reader: Reader
    output: Output
    tools: Mapping[str, Tool]
    known_only: bool = False

    def read_items(self) -> Steps[bool]:
        """Read a list after its opening bracket; return False if the first item is not a call."""
        return (yield from read_list(self.reader, self.output, self.read))

    def read(self) -> Steps[bool]:
        """Read one call; return False if there is none (nothing is reported then)."""
        name = yield from self.reader.all(_NAME)
        if name.removesuffix(".call") in self.tools:
            name = name.removesuffix(".call")  # Llama calls built-in tools as `f.call(...)`.
        if not name or (self.known_only and name not in self.tools):
            if not any(f"{each}.call".startswith(name) for each in self.tools):
                self.reader.is_undecided = False
            return False
        if not (yield from self.reader.accept("(")):
            return False
        self.output.call(name, None)
        self.output.arguments("{")
        if (yield from self._arguments(name)):
            self.output.arguments("}")
            self.output.end_call(was_closed=self.reader.is_undecided)
        return True

    def _arguments(self, name: str) -> Steps[bool]:
        """Copy the arguments as the fields of an object; return False if the text ends inside them.

        If the model ends the text after a complete argument, the arguments count as complete.
        """
        tool = self.tools.get(name)
        properties = tool.parameters.get("properties") if tool else None
        names = list(properties) if isinstance(properties, Mapping) else []
        known = sorted((f"{each}=" for each in names), key=len, reverse=True)
        n_arguments = 0
        follows_value = False
        while True:
            yield from self.reader.whitespace()
            if not (yield from self.reader.peek()):
                return follows_value and self.reader.ended_by_itself
            if (yield from self.reader.accept(",")):
                follows_value = False
                continue
            if (yield from self.reader.accept(")")):
                return True
            parameter = yield from self._parameter_name(known, names[n_arguments : n_arguments + 1])
            yield from self.reader.whitespace()
            if not (yield from self.reader.peek()):
                return False
            if parameter is None:
                # A tool must not run without an argument that cannot be parsed: leave the call incomplete.
                yield from self.reader.until(Markers(()), lambda _: None)
                return False
            field = json.dumps(parameter, ensure_ascii=False) + ": "
            self.output.arguments((", " if n_arguments else "") + field)
            n_arguments += 1
            if not (yield from self._value()):
                return False
            follows_value = True

    def _parameter_name(self, known: Sequence[str], by_position: Sequence[str]) -> Steps[str | None]:
        """Read the name before a value; without one, return the name `by_position`; None if there is neither.

        `known` contains the tool's parameter names, each followed by `=`, longest first.
        """
        if found := (yield from self.reader.accept(*known)):
            return found.removesuffix("=")
        if not (yield from self.reader.looking_at(*PYTHON_QUOTES, "[", "{", "-")):
            name = yield from self.reader.all(_PARAMETER)
            blanks = yield from self.reader.whitespace()
            if (yield from self.reader.accept("=")):
                return name or None
            if not (yield from self.reader.peek()):
                # The text ended: this may be the beginning of a name.
                return None
            self.reader.unread(name + blanks)
        return next(iter(by_position), None)

    def _value(self) -> Steps[bool]:
        """Copy one value; return False if the text ends inside it."""
        parts = 0

        def emit(text: str) -> None:
            nonlocal parts
            parts += 1
            self.output.arguments(text)

        complete = yield from ValueCopier(self.reader, emit, quotes=PYTHON_QUOTES).copy()
        if complete and not parts:
            self.output.arguments("null")
        return complete


def _python_text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return _PYTHON_LITERALS[value]
    return json.dumps(value, ensure_ascii=False)


def _python_value(writer: GrammarWriter, schema: Any, root: Mapping[str, Any]) -> str:
    """Return a grammar expression for a value as `_python_text` writes it."""
    types = value_types(schema, root)
    if types <= {"boolean", "null"}:
        texts = [text for kind, text in _PYTHON_TEXTS if kind in types]
        return writer.choice(map(writer.text, texts))
    return writer.parameter_json(schema, root)
