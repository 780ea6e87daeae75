"""Reading calls whose arguments stand between tags, such as `<parameter=city>Paris</parameter>`.

The text of an argument says nothing of its type, so the tool's schema decides. Strings are passed on as they
arrive, and so are objects and lists where nothing else is allowed; any other value is kept back until its end.

The tag that closes a value may occur in the value: it counts only if another tag, or the end of the text, follows,
on a new line if the value began on one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.json_value import ValueCopier
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Emit, Machine, Markers, Reader, Steps
from llamaslot.formats.schema_types import ALL_TYPES, json_of, parameter_types

_NAME = re.compile(r"[^\s<>{}\[\]\"']+")
_WHITESPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around the parts of a call, and of its arguments."""

    name_open: str
    """Before the function's name; may be empty."""
    name_close: str
    """After it; may be empty where the name ends at a line break or tag."""
    parameter_open: str
    parameter_close: str
    value_open: str
    """Between the parameter's name and its value, after `parameter_close` and whitespace; may be empty."""
    value_close: str
    call_close: str
    lines: bool
    """A line break after the opening and before the closing tag of a value is no part of it."""


QWEN_TAGS = Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", lines=True)
GLM_TAGS = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", lines=False)
MINIMAX_TAGS = Tags('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>", lines=False)


class TaggedCalls:
    """Reads calls from `reader` to `output`; `section_close` is the tag after the last one."""

    def __init__(
        self, reader: Reader, output: Output, tools: Mapping[str, Tool], tags: Tags, *, section_close: str
    ) -> None:
        self._reader = reader
        self._output = output
        self._tools = tools
        self._tags = tags
        self._ends = tuple(text for text in (tags.call_close, section_close) if text)
        closing = (tags.value_close, *(["\n" + tags.value_close] if tags.lines else ()))
        self._value_end = Markers(closing)

    def read(self, *, opened: bool = False) -> Steps[bool]:
        """Read one call; False if it is none, and nothing was reported.

        If the text before the name was `opened`, and read already, only the name of a tool makes it a call.
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
        elif not (yield from self._at_tag()):
            return False
        yield from self.read_arguments(name)
        return True

    def read_arguments(self, name: str) -> Steps[None]:
        """Report the call and read its arguments and the tag after them."""
        self._output.call(name, None)
        yield from self._reader.whitespace()
        if (yield from self._reader.looking_at("{")):
            yield from ValueCopier(self._reader, self._output.arguments).copy()
            yield from self._reader.whitespace()
            yield from self._reader.accept(self._tags.call_close)
            return
        self._output.arguments("{")
        tool = self._tools.get(name)
        parameters = tool.parameters if tool is not None else {}
        n_arguments = 0
        while True:
            yield from self._reader.whitespace()
            if not (yield from self._reader.accept(self._tags.parameter_open)):
                break
            parameter = yield from self._parameter_name()
            if parameter is None:
                return
            self._output.arguments(f"{', ' if n_arguments else ''}{json.dumps(parameter, ensure_ascii=False)}: ")
            n_arguments += 1
            types = parameter_types(parameters, parameter) if tool is not None else ALL_TYPES
            if not (yield from self._value(types)):
                return
        self._output.arguments("}")
        yield from self._reader.accept(self._tags.call_close)

    def _at_tag(self, *, on_new_line: bool = False) -> Steps[bool]:
        """Return True if whitespace, and then the tag of an argument or of the call's end, comes next.

        So does the end of the text. With `on_new_line` there must be a line break before the tag.
        """
        whitespace = yield from self._reader.whitespace()
        if not (yield from self._reader.peek()):
            return True
        if on_new_line and "\n" not in whitespace:
            return False
        return bool((yield from self._reader.looking_at(self._tags.parameter_open, *self._ends)))

    def _parameter_name(self) -> Steps[str | None]:
        """Read the name and what stands before the value; None if the text ends or something is wrong."""
        parts: list[str] = []
        if not (yield from self._reader.until(Markers([self._tags.parameter_close]), parts.append)):
            return None
        if self._tags.value_open:
            yield from self._reader.whitespace()
            if not (yield from self._reader.accept(self._tags.value_open)):
                return None
        return "".join(parts).strip()

    def _value(self, types: frozenset[str]) -> Steps[bool]:
        """Copy one value; False if the text ends inside it."""
        value = _value_sink(types, self._output.arguments)
        has_line = bool(self._tags.lines and (yield from self._reader.accept("\n")))
        while True:
            closing = yield from self._reader.until(self._value_end, value.feed)
            if not closing:
                return False
            mark = self._reader.mark()
            if (yield from self._at_tag(on_new_line=has_line)):
                self._reader.release(mark)
                value.end()
                return True
            value.feed(closing + self._reader.release(mark))


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
    """Keeps a value back until its end."""

    def __init__(self, emit: Emit, types: frozenset[str]) -> None:
        self._emit = emit
        self._types = types
        self._parts: list[str] = []

    def feed(self, text: str) -> None:
        self._parts.append(text)

    def end(self) -> None:
        self._emit(json_of("".join(self._parts), self._types))


class _Container:
    """Passes an object or a list on as it arrives; anything else is kept back."""

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
