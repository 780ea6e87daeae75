"""Formats of Gemma 4 and FunctionGemma, whose arguments are not JSON: `{a:<|"|>text<|"|>,b:[1]}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llamaslot.base.generation.tools import Tool
from llamaslot.base.json_schemas import ALL_TYPES, referenced, value_types
from llamaslot.formats.calls import ToolCall, fields_of
from llamaslot.formats.format import Format, Layout
from llamaslot.formats.grammar import GrammarWriter, object_schema, parameters_of, takes_any_names
from llamaslot.formats.json_value import copy_arguments
from llamaslot.formats.message import CallMarkers, Output, ReasoningTags
from llamaslot.formats.reader import Reader, Steps

_NAME = re.compile(r"[^\s{}<]+")
_KEYWORD = "call:"
_INTEGER = "/-?(0|[1-9][0-9]{0,17})/"
_NUMBER = "/-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/"
_DEFINITIONS = ("$defs", "definitions", "$schema", "$id")
_KEYWORDS = (
    *("type", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "$ref", "additionalProperties"),
    *("pattern", "minLength", "maxLength", "title", "description", "default", "examples", "format", "nullable"),
)
_SCALARS = {"integer": _INTEGER, "number": _NUMBER, "boolean": '("true" | "false")', "null": '"null"'}


class Gemma(Format):
    """`<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`: unquoted names, and a control token as string quote.

    Reasoning is a channel called `thought`. The models also write needless channel markers; the parser drops them.
    """

    name = "gemma4"
    limits_digits = True
    opening, closing, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    signs = (opening, _KEYWORD)
    markers = CallMarkers(calls=(opening,), left_over=(closing,), ignored=("<|channel>", "<|turn>model\n"))

    layout = Layout(opening + _KEYWORD, closing)

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        tags = ReasoningTags("<|channel>thought", "<channel|>", anywhere=True)
        super().__init__(source, special, tags if "<|channel>" in source else reasoning)

    @property
    def preserved(self) -> tuple[str, ...]:
        channel = ("<|channel>", "<channel|>", "<|turn>") if self.reasoning else ()
        return (self.opening, self.closing, self.quote, *channel)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        yield from reader.whitespace()
        if not (yield from reader.accept(_KEYWORD)):
            return False
        name = yield from reader.all(_NAME)
        if not name or not (yield from reader.looking_at("{")):
            return False
        output.call(name, None)
        quotes = (self.quote, '"')
        yield from copy_arguments(reader, output, quotes=quotes, escapes=False)
        yield from reader.whitespace()
        yield from reader.accept(self.closing)
        return True

    def call_text(self, call: ToolCall) -> str:
        return call.name + _rendered(fields_of(call.arguments), self.quote)

    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        """Return a grammar expression for a call.

        Raises `ValueError` for schema keywords that cannot be enforced, because the notation is not JSON.
        """
        return writer.sequence(writer.text(tool.name), _Notation(writer, tool, self.quote).arguments())


class FunctionGemma(Gemma):
    """The same with `<start_function_call>`, `<end_function_call>` and `<escape>`, and without reasoning."""

    name = "function-gemma"
    opening, closing, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    signs = (opening, _KEYWORD)
    markers = CallMarkers(calls=(opening,), left_over=(closing,))
    layout = Layout(opening + _KEYWORD, closing)


class _Notation:
    """Grammar expressions for the values that a tool's schema allows; undeclared names are not allowed."""

    def __init__(self, writer: GrammarWriter, tool: Tool, quote: str) -> None:
        self._writer = writer
        self._root = object_schema(tool)
        self._quote = quote
        self._references: dict[str, str] = {}
        self._any = ""

    def arguments(self) -> str:
        """Return an expression for the arguments object."""
        return self._object({key: value for key, value in self._root.items() if key not in _DEFINITIONS})

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._any_value()
        unknown = [key for key in schema if key not in _KEYWORDS]
        if unknown:
            raise ValueError(f"Gemma's tool call format does not support the schema keyword {unknown[0]!r}")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(options, list) and options:
            return self._writer.choice(self._writer.text(_rendered(each, self._quote)) for each in options)
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self._writer.choice(map(self._value, schema[key]))
        types = value_types(schema, self._root)
        if types == ALL_TYPES:
            return self._any_value()
        return self._writer.choice(self._of_type(kind, schema) for kind in sorted(types))

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        writer = self._writer
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return writer.rule(self._list(writer.rule(self._value(schema.get("items")))))
        if kind == "string":
            return writer.sequence(writer.text(self._quote), writer.text_until(self._quote, schema))
        return _SCALARS[kind]

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, names = parameters_of(schema)
        if takes_any_names(schema):
            return self._any_object()
        if not properties:
            return self._writer.text("{}")
        parts = {
            name: self._writer.rule(self._writer.sequence(self._writer.text(f"{name}:"), self._value(each)))
            for name, each in properties.items()
        }
        fields = self._writer.listed(parts, names, ",")
        return self._writer.rule(self._writer.sequence(self._writer.text("{"), fields, self._writer.text("}")))

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = self._references[reference] = self._writer.declare()
            self._writer.define(name, self._value(referenced(reference, self._root)))
        return self._references[reference]

    def _list(self, item: str) -> str:
        return f"{self._writer.text('[')} ({self._writer.repeated(item, ',')})? {self._writer.text(']')}"

    def _any_object(self) -> str:
        writer = self._writer
        fields = writer.repeated(f"/[A-Za-z_][A-Za-z0-9_]*/ {writer.text(':')} {self._any_value()}", ",")
        return f"{writer.text('{')} ({fields})? {writer.text('}')}"

    def _any_value(self) -> str:
        if not self._any:
            self._any = self._writer.declare()
            kinds = [self._of_type(kind, {}) for kind in ("string", "number", "boolean", "null")]
            kinds += [self._list(self._any), self._any_object()]
            self._writer.define(self._any, " | ".join(kinds))
        return self._any


def _rendered(value: object, quote: str) -> str:
    """Return a value in Gemma's notation."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{name}:{_rendered(each, quote)}" for name, each in value.items()) + "}"
        case list():
            return "[" + ",".join(_rendered(each, quote) for each in value) + "]"
        case _:
            return json.dumps(value)
