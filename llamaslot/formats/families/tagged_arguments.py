"""Formats with tags around each argument: Qwen3-Coder and others, GLM, MiniMax.

The text of an argument does not say its type, so the tool's schema decides. Strings are passed on as they arrive,
and so are objects and lists if the schema allows nothing else; any other value is held back until its end.

The closing tag may also occur inside the value: it counts only if another tag or the end of the text follows, on a
new line if the value began on one. Models sometimes omit a closing tag or its second half. So a value also ends
before another parameter of the tool, and before the tags that close the call if the text ends with them or another
call follows.

If the model ends the text after a complete argument, or inside an argument's closing tag, only tags are missing and
the call is complete; likewise if a stop string replaces the tags. If the text ends after the function's name or
inside a value, or a limit cuts it, the call is incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from llamaslot.base.generation.tools import Tool
from llamaslot.base.json_schemas import ALL_TYPES, parameter_types, type_of, value_types
from llamaslot.formats.calls import ToolCall, fields_of, value_text
from llamaslot.formats.format import Format, Layout
from llamaslot.formats.grammar import GrammarWriter, object_schema, parameters_of, takes_any_names
from llamaslot.formats.json_calls import JsonCalls
from llamaslot.formats.json_value import ValueCopier, copy_arguments
from llamaslot.formats.message import CallMarkers, Output, ReasoningTags
from llamaslot.formats.reader import Emit, Machine, Markers, Reader, Steps, beginnings

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MINIMAX_OPEN, _MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_NAME = re.compile(r"[^\s<>{}\[\]\"']+")
_NAME_EXPRESSION = "/[A-Za-z_][A-Za-z0-9_.-]*/"
_WHITESPACE = re.compile(r"\s+")
_BRACKETS = re.compile(r"[\s}\],;]+")
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around the parts of a call and of its arguments."""

    name_open: str
    """Before the function's name; may be empty."""
    name_close: str
    """After the function's name; may be empty if the name ends at a line break or tag."""
    parameter_open: str
    parameter_close: str
    value_open: str
    """Before the value, after `parameter_close` and whitespace; may be empty."""
    value_close: str
    call_close: str
    lines: bool
    """True if a line break after a value's opening tag and before its closing tag is not part of the value."""


QWEN_TAGS = Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", lines=True)
GLM_TAGS = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", lines=False)
MINIMAX_TAGS = Tags('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>", lines=False)


class TaggedArguments(Format):
    """Formats that write the function's name, then each argument between tags."""

    before_name = after_name = ""
    argument: tuple[str, str, str]
    """Texts before the name of an argument, between name and value, and after the value."""

    def call_text(self, call: ToolCall) -> str:
        before, between, after = self.argument
        return f"{self.before_name}{call.name}{self.after_name}" + "".join(
            f"{before}{name}{between}{value_text(value)}{after}"
            for name, value in fields_of(call.arguments).items()
        )

    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        """Return a grammar expression for a call, with its arguments in the order of the schema."""
        before, between, after = self.argument
        schema = object_schema(tool)
        properties, required = parameters_of(schema)
        parts = [writer.text(f"{self.before_name}{tool.name}{self.after_name}")]
        if takes_any_names(schema):
            tags = writer.sequence(writer.text(before), _NAME_EXPRESSION, writer.text(between))
            parts.append(f"({tags} {writer.text_until(after)})*")
        for name, each in properties.items():
            value = _value_until(writer, each, schema, after)
            part = writer.rule(writer.sequence(writer.text(before + name + between), value))
            parts.append(part if name in required else f"{part}?")
        return writer.sequence(*parts)


class QwenCoder(TaggedArguments):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, each part on its own line.

    Of Qwen3-Coder, Qwen3.5, Nemotron 3 Nano and Step 3.5. The models sometimes omit the first tag, or start a call
    without closing their reasoning.
    """

    name = "qwen3-coder"
    signs = (OPEN, QWEN_TAGS.name_open, QWEN_TAGS.parameter_open)
    markers = CallMarkers(calls=(OPEN, QWEN_TAGS.name_open), left_over=(CLOSE,))
    layout = Layout(f"{OPEN}\n", f"</function>\n{CLOSE}", "\n")
    before_name, after_name = "<function=", ">\n"
    argument = ("<parameter=", ">\n", "\n</parameter>\n")

    @property
    def preserved(self) -> tuple[str, ...]:
        return tuple(text for text in super().preserved if text != QWEN_TAGS.name_open)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        return ToolCallTag(reader, output, tools).read(marker)


class Glm(TaggedArguments):
    """`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.

    GLM 4.5 and 4.6 have line breaks between the tags, GLM 4.7 has none.
    """

    name = "glm4"
    signs = (OPEN, GLM_TAGS.parameter_open)
    markers = CallMarkers(
        calls=(OPEN,), left_over=(CLOSE,), inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    )

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        super().__init__(source, special, reasoning)
        line = "" if "</arg_key><arg_value>" in source else "\n"
        self.layout = Layout(OPEN, CLOSE, line)
        self.after_name = line
        self.argument = ("<arg_key>", f"</arg_key>{line}<arg_value>", f"</arg_value>{line}")

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        return ToolCallTag(reader, output, tools, GLM_TAGS).read(marker)


class MiniMax(TaggedArguments):
    """One section, with `<invoke name="f"><parameter name="a">1</parameter></invoke>` for each call in it.

    Of MiniMax M2.
    """

    name = "minimax-m2"
    signs = (_MINIMAX_OPEN,)
    markers = CallMarkers(calls=(_MINIMAX_OPEN,), left_over=(_MINIMAX_CLOSE,))
    layout = Layout(closing="</invoke>\n", start=f"{_MINIMAX_OPEN}\n", end=_MINIMAX_CLOSE)
    before_name, after_name = '<invoke name="', '">\n'
    argument = ('<parameter name="', '">', "</parameter>\n")

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        tags, close = MINIMAX_TAGS, _MINIMAX_CLOSE
        calls = TaggedCalls(reader, output, tools, tags, section=(_MINIMAX_OPEN, close))
        yield from reader.whitespace()
        is_call = yield from calls.read()
        if is_call:
            yield from read_section(reader, output, calls.read, starts=(tags.name_open,), tags=tags, close=close)
        return is_call


@cache
def _value_ends(tags: Tags, closing: tuple[str, ...], ends: tuple[str, ...]) -> tuple[Markers, Markers]:
    """Return the texts at which a value may end that began on the line of its tag, and on a new line."""
    others = (tags.parameter_open, *ends)
    on_new_line = tuple("\n" + text for text in ((*closing, *others) if tags.lines else others))
    return Markers([*closing, *others, *on_new_line]), Markers([*closing, *on_new_line])


@dataclass(frozen=True, slots=True)
class ToolCallTag:
    """Reads calls between `<tool_call>` tags: JSON, or the tagged arguments that models sometimes write instead."""

    reader: Reader
    output: Output
    tools: Mapping[str, Tool]
    tags: Tags = QWEN_TAGS

    def read(self, marker: str) -> Steps[bool]:
        """Read the calls after the opening tag or after `<function=`, through the closing tag."""
        if marker == QWEN_TAGS.name_open:
            is_call = yield from self._tagged(QWEN_TAGS).read(opened=True)
        else:
            yield from self.reader.whitespace()
            is_call = yield from self._one()
        if is_call:
            yield from read_section(
                self.reader,
                self.output,
                self._one,
                starts=("{", QWEN_TAGS.name_open),
                tags=QWEN_TAGS,
                close=CLOSE,
                between=_BRACKETS,
            )
        return is_call

    def _one(self) -> Steps[bool]:
        match (yield from self.reader.looking_at("{", "[", QWEN_TAGS.name_open)):
            case "{" | "[":
                return (yield from JsonCalls(self.reader, self.output).read_all())
            case QWEN_TAGS.name_open:
                return (yield from self._tagged(QWEN_TAGS).read())
            case _:
                return (yield from self._tagged(self.tags).read())

    def _tagged(self, tags: Tags) -> TaggedCalls:
        return TaggedCalls(self.reader, self.output, self.tools, tags, section=(OPEN, CLOSE))


class TaggedCalls:
    """Reads calls from `reader` to `output`; `section` holds the tags before the first and after the last call."""

    def __init__(
        self, reader: Reader, output: Output, tools: Mapping[str, Tool], tags: Tags, *, section: tuple[str, str]
    ) -> None:
        section_open, section_close = section
        self._reader = reader
        self._output = output
        self._tools = tools
        self._tags = tags
        self._ends = tuple(text for text in (tags.call_close, section_close) if text)
        # The second half of a closing tag may be missing.
        n_least = len(tags.value_close) // 2
        closing = self._closing = (tags.value_close, *beginnings(tags.value_close, n_least))
        self._value_end = _value_ends(tags, closing, self._ends)
        self._next_call = tuple(text for text in (section_open, tags.name_open) if text)
        self._cut_ends = tuple(text for end in self._ends for text in beginnings(end, 2))

    def read(self, *, opened: bool = False) -> Steps[bool]:
        """Read one call; return False if there is none (nothing is reported then).

        `opened`: the tag before the name has been read already; then only a known tool's name makes this a call.
        """
        tags = self._tags
        if tags.name_open and not opened and not (yield from self._reader.accept(tags.name_open)):
            return False
        name = yield from self._reader.all(_NAME)
        if not name or (opened and name not in self._tools):
            return False
        if tags.name_close:
            if not (yield from self._reader.accept(tags.name_close)):
                return False
        elif not (yield from self._at_tag()) or self._reader.is_undecided:
            return False
        yield from self.read_arguments(name)
        return True

    def read_arguments(self, name: str) -> Steps[None]:
        """Report the call, then read its arguments and the tag after them."""
        self._output.call(name, None)
        yield from self._reader.whitespace()
        if (yield from self._reader.looking_at("{")):
            if (yield from copy_arguments(self._reader, self._output)):
                yield from self._reader.whitespace()
                yield from self._reader.accept(self._tags.call_close)
                self._reader.fragment(self._tags.call_close)
            return
        self._output.arguments("{")
        tool = self._tools.get(name)
        parameters = tool.parameters if tool is not None else {}
        properties = parameters.get("properties")
        names = set(properties) if isinstance(properties, Mapping) and properties else None
        n_arguments = 0
        while True:
            yield from self._reader.whitespace()
            if not (yield from self._reader.accept(self._tags.parameter_open)):
                break
            parameter = yield from self._parameter_name()
            if parameter is None:
                if self._reader.is_undecided:
                    self._reader.rest()
                    return
                break
            if names is not None:
                names.discard(parameter)
            self._output.arguments(f"{', ' if n_arguments else ''}{json.dumps(parameter, ensure_ascii=False)}: ")
            n_arguments += 1
            types = parameter_types(parameters, parameter) if tool is not None else ALL_TYPES
            if not (yield from self._value(types, names)):
                return
        call_close = self._tags.call_close
        cut = beginnings(call_close, len(call_close) // 2) if call_close else ()
        is_open = (yield from self._reader.accept(call_close, *cut)) != call_close
        is_open = (is_open or not call_close) and self._reader.is_undecided
        if is_open and not (n_arguments and self._reader.end_reason != "limit" and self._ends_in_tag()):
            self._reader.rest()
            return
        self._output.arguments("}")
        self._output.end_call(was_closed=is_open)

    def _ends_in_tag(self) -> bool:
        """Read the rest of the text; return True if it is empty or the beginning of a tag that closes the call.

        The beginning of a parameter's opening tag does not count.
        """
        rest = self._reader.rest()
        return not rest or not self._tags.parameter_open.startswith(rest)

    def _at_tag(self, *, on_new_line: bool = False) -> Steps[bool]:
        """Return True if an argument's opening tag or a tag that closes the call comes next, after whitespace.

        The end of the text counts as such a tag, which may be cut. With `on_new_line` there must be a line break
        before the tag.
        """
        whitespace = yield from self._reader.whitespace()
        if (yield from self._reader.peek()) and on_new_line and "\n" not in whitespace:
            return False
        found = yield from self._reader.looking_at(self._tags.parameter_open, *self._ends)
        return bool(found) or self._reader.is_undecided

    def _parameter_name(self) -> Steps[str | None]:
        """Read the name and the tags before the value; return None if the text ends or a tag is missing."""
        parts: list[str] = []
        # The model may omit the end of the name's tag; the name then ends at the line break.
        ends = Markers([self._tags.parameter_close, *(["\n"] if self._tags.lines else [])])
        end = yield from self._reader.until(ends, parts.append)
        if not end:
            return None
        if end == "\n":
            self._reader.unread(end)
        if self._tags.value_open:
            yield from self._reader.whitespace()
            if not (yield from self._reader.accept(self._tags.value_open)):
                return None
        return "".join(parts).strip()

    def _value(self, types: frozenset[str], names: Collection[str] | None) -> Steps[bool]:
        """Copy one value; return False if the text ends inside it. `names`: other arguments' names (None: any)."""
        value = _value_sink(types, self._output.arguments)
        has_line = bool(self._tags.lines and (yield from self._reader.accept("\n")))
        while True:
            marker = yield from self._reader.until(self._value_end[has_line], value.feed)
            if not marker:
                if self._ends_in_closing_tag(has_line=has_line):
                    value.end()
                    return True
                return False
            mark = self._reader.mark()
            ends = yield from self._ends_value(marker, names, has_line=has_line)
            text_after = self._reader.release(mark)
            if self._reader.is_undecided and not (ends and self._reader.end_reason != "limit"):
                self._reader.rest()
                return False
            if ends:
                is_closing = marker.removeprefix("\n") in self._closing
                self._reader.unread(text_after if is_closing else marker + text_after)
                value.end()
                return True
            self._reader.unread(text_after)
            value.feed(marker)

    def _ends_in_closing_tag(self, *, has_line: bool) -> bool:
        """Read the rest; return True if the model ended the text in the second half of a tag that ends a value."""
        rest = self._reader.rest()
        tag = rest.removeprefix("\n")
        on_new_line = tag != rest
        if not self._reader.ended_by_itself or (has_line and not on_new_line):
            return False
        closing = (self._tags.value_close, *(self._ends if on_new_line else ()))
        return any(each.startswith(tag) and 2 * len(tag) >= len(each) for each in closing)

    def _ends_value(self, marker: str, names: Collection[str] | None, *, has_line: bool) -> Steps[bool]:
        """Decide from the text after the marker whether it ends the value."""
        tags, tag = self._tags, marker.removeprefix("\n")
        if tag in self._closing:
            if (yield from self._at_tag(on_new_line=has_line)):
                return True
            # The following closing tags may be cut or missing, too, if further ones or another call follow.
            is_cut = yield from self._reader.accept(*self._cut_ends)
            yield from self._reader.whitespace()
            found = yield from self._reader.looking_at(*self._next_call, *(self._ends if is_cut else ()))
            return bool(found) or self._reader.is_undecided
        if tag == tags.parameter_open:
            return (yield from self._at_parameter(names))
        if tag == tags.call_close:
            yield from self._reader.whitespace()
            yield from self._reader.accept(*self._ends[1:])
        yield from self._reader.whitespace()
        found = yield from self._reader.looking_at(*self._next_call)
        return bool(found) or self._reader.is_undecided

    def _at_parameter(self, names: Collection[str] | None) -> Steps[bool]:
        """Return True if the name of another argument and the tags before its value come next."""
        name = yield from self._reader.all(_NAME)
        if not name or (names is not None and name not in names):
            return False
        if not (yield from self._reader.accept(self._tags.parameter_close)):
            return False
        yield from self._reader.whitespace()
        return not self._tags.value_open or bool((yield from self._reader.accept(self._tags.value_open)))


def read_section(
    reader: Reader,
    output: Output,
    read_call: Callable[[], Steps[bool]],
    *,
    starts: Sequence[str],
    tags: Tags,
    close: str,
    between: re.Pattern[str] = _WHITESPACE,
) -> Steps[None]:
    """Read further calls, which begin with one of `starts`, up to `close`. What is not a call becomes content."""
    while True:
        yield from reader.all(between)
        if (yield from reader.accept(close)) or reader.fragment(tags.call_close, close):
            return
        if not (yield from reader.looking_at(*starts)):
            if begun := reader.fragment(tags.name_open):
                output.cut(begun)
            return
        mark = reader.mark()
        is_call = yield from read_call()
        rejected = reader.release(mark)
        if not is_call:
            output.rejected(rejected)
            return


class _String:
    """Passes a string on as it arrives."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._began = False

    def feed(self, text: str) -> None:
        self._emit(("" if self._began else '"') + json.dumps(text, ensure_ascii=False)[1:-1])
        self._began = True

    def end(self) -> None:
        self._emit('"' if self._began else '""')


class _Kept:
    """Holds a value back until its end."""

    def __init__(self, emit: Emit, types: frozenset[str]) -> None:
        self._emit = emit
        self._types = types
        self._parts: list[str] = []

    def feed(self, text: str) -> None:
        self._parts.append(text)

    def end(self) -> None:
        self._emit(json_of("".join(self._parts), self._types))


class _Container:
    """Passes an object or a list on as it arrives; anything else is held back."""

    def __init__(self, emit: Emit, types: frozenset[str]) -> None:
        reader = Reader()
        self._copier = ValueCopier(reader, emit)
        self._machine = Machine(reader, self._copier.copy())
        self._kept = _Kept(emit, types)
        self._is_container: bool | None = None

    def feed(self, text: str) -> None:
        if self._is_container is None:
            text = text.lstrip()
            if not text:
                return
            self._is_container = text[0] in "{["
        if self._is_container:
            self._machine.feed(text)
        else:
            self._kept.feed(text)

    def end(self) -> None:
        if self._is_container:
            self._machine.end()
            self._copier.close()
        else:
            self._kept.end()


def _value_sink(types: frozenset[str], emit: Emit) -> _String | _Kept | _Container:
    if types == {"string"}:
        return _String(emit)
    if types <= {"object", "array"}:
        return _Container(emit, types)
    return _Kept(emit, types)


def json_of(text: str, types: frozenset[str]) -> str:
    """Return an argument's text as JSON.

    If strings are allowed, the text is a string unless it is JSON of another allowed type. Text that is not JSON is
    always a string.
    """
    stripped = text.strip()
    stripped = _PYTHON_LITERALS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" not in types:
        return stripped
    kind = type_of(value)
    if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _value_until(writer: GrammarWriter, schema: Any, root: Mapping[str, Any], end: str) -> str:
    """Return a grammar expression for a value followed by `end`; strings are written without quotes."""
    types = value_types(schema, root)
    schema = schema if isinstance(schema, Mapping) else {}
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(options, list) and options:
        return f"{writer.choice(writer.text(value_text(each)) for each in options)} {writer.text(end)}"
    if "string" not in types:
        return writer.sequence(writer.parameter_json(schema, root), writer.text(end))
    return writer.text_until(end, schema if types == {"string"} else {})
