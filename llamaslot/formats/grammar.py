"""Grammars in llguidance's Lark syntax that force calls.

Control tokens are written by their ids, since texts in a grammar never match them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.schema_types import value_types

Thinking: TypeAlias = Literal["none", "optional", "open"]
"""Reasoning before the forced call: none, or the model may open it, or the prompt has opened it."""

_ANY_STRING: Mapping[str, Any] = {}
_JSON_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
"""Arguments are laid out as `tojson` in chat templates lays them out, so that they render to the same tokens."""

_OF_WHOLE_OBJECTS = (
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords that say more of an object than its properties do."""

_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_.-]*/"
_UNESCAPED_SLASH = re.compile(r"(?<!\\)/")
_ENDS_WITH_ANCHOR = re.compile(r"(?<!\\)(\\\\)*\$$")
_SLASH = r"\\/"
_PYTHON_TEXTS = (("boolean", "True"), ("boolean", "False"), ("null", "None"))


class GrammarWriter:
    """Rules of a grammar; `special` has the ids of the vocabulary's control tokens."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []
        ordered = sorted(filter(None, special), key=len, reverse=True)
        self._special_pattern = re.compile("(" + ("|".join(map(re.escape, ordered)) or "(?!)") + ")")

    def text(self, text: str) -> str:
        """Return an expression for a text that may contain control tokens."""
        parts = [part for part in self._special_pattern.split(text) if part]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
        )

    def rule(self, expression: str, *, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def sequence(self, *expressions: str) -> str:
        """Return an expression for one after the other; empty ones are left out."""
        return " ".join(filter(None, expressions))

    def declare(self) -> str:
        """Return the name of a rule that `define` adds later, so that rules may refer to each other."""
        self._rules.append("")
        return f"rule_{len(self._rules) - 1}"

    def define(self, name: str, expression: str) -> None:
        """Add a declared rule."""
        self._rules[int(name.removeprefix("rule_"))] = f"{name}: {expression}"

    def choice(self, expressions: Iterable[str]) -> str:
        """Return an expression for one of several."""
        return "(" + " | ".join(expressions) + ")"

    def json(self, schema: Any) -> str:
        """Return an expression for a value of a schema."""
        laid_out = {**schema, "x-guidance": _JSON_LAYOUT} if isinstance(schema, Mapping) else {}
        return self.rule("%json " + json.dumps(laid_out, ensure_ascii=False))

    def arguments(self, tool: Tool) -> str:
        """Return an expression for the JSON object with a tool's arguments."""
        return self.json(object_schema(tool))

    def text_without(self, markers: Sequence[str], beginnings: Sequence[str] = ()) -> str:
        """Return an expression for a text, possibly empty, that has no marker in it and none of the beginnings.

        It is cut before each character that begins a marker, since a terminal ends where it cannot go on: one for
        the whole text would swallow the beginning of a marker.
        """
        firsts = "".join(sorted({re.escape(marker[0]) for marker in markers}))
        number = len(self._rules)
        text, other, head = f"TEXT_{number}", f"OTHER_{number}", f"HEAD_{number}"
        pieces = text
        self._rules.append(f"{text}: /[^{firsts}]+/" if firsts else f"{text}: /(?s:.+)/")
        if firsts:
            excluded = "|".join(_regex(marker) for marker in markers)
            self._rules.append(f"{other}: /[{firsts}][^{firsts}]*/ & ~/({excluded})(?s:.*)/")
            pieces = f"({text} | {other})"
        if not beginnings:
            return self.rule(f"{pieces}*")
        self._rules.append(f"{head}: /\\s*[^\\s{firsts}{re.escape(''.join(beginnings))}]/")
        return self.rule(f"({f'({head} | {other})' if firsts else head} {pieces}*)?")

    def text_until(self, end: str, schema: Mapping[str, Any] = _ANY_STRING) -> str:
        """Return an expression for a text, of a string's schema, up to `end` and through it."""
        terminal = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{terminal}: {_pattern(schema)}")
        if self._special_pattern.match(end):
            return self.sequence(terminal, self.text(end))
        return self.rule(terminal, attributes=f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def value_until(self, schema: Any, root: Mapping[str, Any], end: str) -> str:
        """Return an expression for a value that is written without quotes if it is a string, and `end`."""
        types = value_types(schema, root)
        schema = schema if isinstance(schema, Mapping) else {}
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(options, list) and options:
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in options]
            return f"{self.choice(map(self.text, texts))} {self.text(end)}"
        if "string" not in types:
            return self.sequence(self.parameter_json(schema, root), self.text(end))
        return self.text_until(end, schema if types == {"string"} else _ANY_STRING)

    def python_value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return an expression for a value as in Python; lists and objects are JSON."""
        types = value_types(schema, root)
        if types <= {"boolean", "null"}:
            texts = [text for kind, text in _PYTHON_TEXTS if kind in types]
            return self.choice(map(self.text, texts))
        return self.parameter_json(schema, root)

    def parameter_json(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return an expression for the JSON of a parameter, whose schema may refer to definitions in `root`."""
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return self.json({**definitions, **(schema if isinstance(schema, Mapping) else {})})

    def repeated(self, call: str, separator: str, *, parallel: bool) -> str:
        """Return an expression for one call, or for several with a separator between them."""
        return f"{call} ({self.sequence(separator, call)})*" if parallel else call

    def listed(self, required: Sequence[str], optional: Sequence[str], separator: str) -> str:
        """Return an expression for all the required parts and then any of the optional ones, in their order."""
        comma = self.text(separator)
        rest = [f"({comma} {part})?" for part in optional]
        if required:
            return self.sequence(f" {comma} ".join(required), *rest)
        orders = [self.sequence(part, *rest[i + 1 :]) for i, part in enumerate(optional)]
        return f"{self.choice(orders)}?" if orders else ""

    def finished(self, start: str) -> str:
        """Return the grammar of the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments; names that it does not declare are not allowed unless it says so."""
    schema: dict[str, Any] = {"type": "object", **tool.parameters}
    schema.setdefault("properties", {})
    if not any(key in schema for key in ("patternProperties", "anyOf", "oneOf", "allOf", "$ref")):
        schema.setdefault("additionalProperties", False)
    return schema


def parameters_of(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], Collection[str]]:
    """Return the properties of an object's schema and the names of the required ones, for formats that write each
    by itself.

    Raises `ValueError` for a wrong schema, and for keywords that allow or demand other names.
    """
    unknown = [key for key in _OF_WHOLE_OBJECTS if key in schema]
    if unknown:
        raise ValueError(f"this model's format does not support the keyword {unknown[0]!r} of an object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise ValueError("'properties' must be an object")
    if not isinstance(required, list):
        raise ValueError("'required' must be a list")
    missing = [name for name in required if not isinstance(name, str) or name not in properties]
    if missing:
        raise ValueError(f"{missing[0]!r} is required, but is not in 'properties'")
    return properties, required


def takes_any_names(schema: Mapping[str, Any]) -> bool:
    """Return True if an object's schema declares no properties, and allows all."""
    return schema.get("additionalProperties") is True and not schema.get("properties")


def tagged_arguments(writer: GrammarWriter, tool: Tool, before: str, between: str, after: str) -> str:
    """Return an expression for arguments between tags, in the order of the schema.

    The tags of a parameter are `before`, its name, and `between`; those of its value's end are `after`.
    """
    schema = object_schema(tool)
    properties, required = parameters_of(schema)
    if takes_any_names(schema):
        tags = writer.sequence(writer.text(before), _ANY_NAME, writer.text(between))
        return f"({tags} {writer.text_until(after)})*"
    parts = []
    for name, each in properties.items():
        value = writer.value_until(each, schema, after)
        part = writer.rule(writer.sequence(writer.text(before + name + between), value))
        parts.append(part if name in required else f"{part}?")
    return " ".join(parts)


def _regex(text: str) -> str:
    """Return a regular expression for a text."""
    return _UNESCAPED_SLASH.sub(_SLASH, re.escape(text))


def _pattern(schema: Mapping[str, Any]) -> str:
    """Return a terminal for the text of a string."""
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    bounded = shortest or longest != ""
    patterns = [f"(?s:.){{{shortest},{longest}}}" if bounded else "(?s:.*)"]
    if isinstance(pattern := schema.get("pattern"), str):
        is_anchored = _ENDS_WITH_ANCHOR.search(pattern) is not None
        inner = pattern.removeprefix("^")
        inner = inner[:-1] if is_anchored else inner
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if is_anchored else "(?s:.*)"
        patterns.append(f"{before}(?:{inner}){after}")
    return " & ".join(f"/{_UNESCAPED_SLASH.sub(_SLASH, each)}/" for each in patterns)
