"""Reading calls in Python syntax: `[f(a="text", b=1), g()]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall, fields_of
from llamaslot.formats.grammar import GrammarWriter, object_schema, parameters_of, takes_any_names
from llamaslot.formats.json_calls import read_list
from llamaslot.formats.json_value import PYTHON_QUOTES, ValueCopier
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Markers, Reader, Steps

_NAME = re.compile(r"[\w.\-]+")
_PARAMETER = re.compile(r"[^\s=,()\[\]{}\"']+")
_LITERALS = {True: "True", False: "False", None: "None"}


class PythonCalls:
    """Reads calls from `reader` to `output`; with `known_only`, only the given tools can be called.

    Positional arguments get their names from the tool's schema, in its order. Names in a schema need not be valid
    Python names: many look like `content-type` or `$filter`.
    """

    def __init__(
        self, reader: Reader, output: Output, tools: Mapping[str, Tool], *, known_only: bool = False
    ) -> None:
        self._reader = reader
        self._output = output
        self._tools = tools
        self._known_only = known_only

    def read_items(self) -> Steps[bool]:
        """Read a list after its opening bracket; return False if the first item is not a call."""
        return (yield from read_list(self._reader, self._output, self.read))

    def read(self) -> Steps[bool]:
        """Read one call; return False if there is none (nothing is reported then)."""
        name = yield from self._reader.all(_NAME)
        if name.removesuffix(".call") in self._tools:
            name = name.removesuffix(".call")  # Llama calls built-in tools as `f.call(...)`.
        if not name or (self._known_only and name not in self._tools):
            if not any(f"{each}.call".startswith(name) for each in self._tools):
                self._reader.is_undecided = False
            return False
        if not (yield from self._reader.accept("(")):
            return False
        self._output.call(name, None)
        self._output.arguments("{")
        if (yield from self._arguments(name)):
            self._output.arguments("}")
            self._output.end_call(was_closed=self._reader.is_undecided)
        return True

    def _arguments(self, name: str) -> Steps[bool]:
        """Copy the arguments as the fields of an object; return False if the text ends inside them.

        If the model ends the text after a complete argument, the arguments count as complete.
        """
        tool = self._tools.get(name)
        properties = tool.parameters.get("properties") if tool else None
        names = list(properties) if isinstance(properties, Mapping) else []
        known = sorted((f"{each}=" for each in names), key=len, reverse=True)
        n_arguments = 0
        follows_value = False
        while True:
            yield from self._reader.whitespace()
            if not (yield from self._reader.peek()):
                return follows_value and self._reader.ended_by_itself
            if (yield from self._reader.accept(",")):
                follows_value = False
                continue
            if (yield from self._reader.accept(")")):
                return True
            parameter = yield from self._parameter_name(known, names[n_arguments : n_arguments + 1])
            yield from self._reader.whitespace()
            if not (yield from self._reader.peek()):
                return False
            if parameter is None:
                # A tool must not run without an argument that cannot be parsed: leave the call incomplete.
                yield from self._reader.until(Markers(()), lambda _: None)
                return False
            field = json.dumps(parameter, ensure_ascii=False) + ": "
            self._output.arguments((", " if n_arguments else "") + field)
            n_arguments += 1
            if not (yield from self._value()):
                return False
            follows_value = True

    def _parameter_name(self, known: Sequence[str], by_position: Sequence[str]) -> Steps[str | None]:
        """Read the name before a value; without one, return the name `by_position`; None if there is neither.

        `known` contains the tool's parameter names, each followed by `=`, longest first.
        """
        if found := (yield from self._reader.accept(*known)):
            return found.removesuffix("=")
        if not (yield from self._reader.looking_at(*PYTHON_QUOTES, "[", "{", "-")):
            name = yield from self._reader.all(_PARAMETER)
            blanks = yield from self._reader.whitespace()
            if (yield from self._reader.accept("=")):
                return name or None
            if not (yield from self._reader.peek()):
                # The text ended: this may be the beginning of a name.
                return None
            self._reader.unread(name + blanks)
        return next(iter(by_position), None)

    def _value(self) -> Steps[bool]:
        """Copy one value; return False if the text ends inside it."""
        parts = 0

        def emit(text: str) -> None:
            nonlocal parts
            parts += 1
            self._output.arguments(text)

        complete = yield from ValueCopier(self._reader, emit, quotes=PYTHON_QUOTES).copy()
        if complete and not parts:
            self._output.arguments("null")
        return complete


def python_call(call: ToolCall) -> str:
    """Return a call in Python syntax; lists and objects stay JSON."""
    arguments = [f"{name}={_python_text(value)}" for name, value in fields_of(call.arguments).items()]
    return f"{call.name}({', '.join(arguments)})"


def python_call_expression(writer: GrammarWriter, tool: Tool) -> str:
    """Return a grammar expression for a call as `python_call` writes it, required arguments first."""
    schema = object_schema(tool)
    properties, names = parameters_of(schema)
    parts = {
        name: writer.rule(writer.sequence(writer.text(f"{name}="), writer.python_value(each, schema)))
        for name, each in properties.items()
    }
    required = [part for name, part in parts.items() if name in names]
    optional = [part for name, part in parts.items() if name not in names]
    arguments = writer.listed(required, optional, ", ")
    if takes_any_names(schema):
        part = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {writer.python_value({}, {})}'
        arguments = f"({writer.repeated(part, writer.text(', '), parallel=True)})?"
    return writer.rule(writer.sequence(writer.text(f"{tool.name}("), arguments, writer.text(")")))


def _python_text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return _LITERALS[value]
    return json.dumps(value, ensure_ascii=False)
