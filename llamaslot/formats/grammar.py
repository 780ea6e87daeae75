"""Grammars in llguidance's Lark syntax that force tool calls.

Control tokens are written as ids, because text in a grammar never matches them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from llamaslot.base.generation.tools import Tool

Thinking: TypeAlias = Literal["none", "optional", "open"]
"""Reasoning before the forced call: not allowed, started by the model if it wants, or opened by the prompt."""

_ANY_STRING: Mapping[str, Any] = {}
_JSON_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
"""The layout of `tojson` in chat templates: a generated call renders to the same tokens in the next prompt, so that
its KV is reused."""

_OF_WHOLE_OBJECTS = (
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
"""Keywords that constrain an object as a whole, not only its single properties."""

_UNESCAPED_SLASH = re.compile(r"(?<!\\)/")
_ENDS_WITH_ANCHOR = re.compile(r"(?<!\\)(\\\\)*\$$")
_SLASH = r"\\/"


class GrammarWriter:
    """Builder of a grammar; `special` maps the vocabulary's control tokens to their ids."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []
        ordered = sorted(filter(None, special), key=len, reverse=True)
        self._special_pattern = re.compile("(" + ("|".join(map(re.escape, ordered)) or "(?!)") + ")")

    def text(self, text: str) -> str:
        """Return an expression for a literal text that may contain control tokens."""
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
        """Return an expression for these in sequence; empty ones are skipped."""
        return " ".join(filter(None, expressions))

    def declare(self) -> str:
        """Reserve a rule that `define` fills in later, so that rules may be recursive; return its name."""
        self._rules.append("")
        return f"rule_{len(self._rules) - 1}"

    def define(self, name: str, expression: str) -> None:
        """Set the expression of a declared rule."""
        self._rules[int(name.removeprefix("rule_"))] = f"{name}: {expression}"

    def choice(self, expressions: Iterable[str]) -> str:
        """Return an expression for any one of these."""
        return "(" + " | ".join(expressions) + ")"

    def json(self, schema: Any) -> str:
        """Return an expression for JSON that matches a schema."""
        laid_out = {**schema, "x-guidance": _JSON_LAYOUT} if isinstance(schema, Mapping) else {}
        return self.rule("%json " + json.dumps(laid_out, ensure_ascii=False))

    def arguments(self, tool: Tool) -> str:
        """Return an expression for the JSON object with a tool's arguments."""
        return self.json(object_schema(tool))

    def text_without(self, markers: Sequence[str], beginnings: Sequence[str] = ()) -> str:
        """Return an expression for a possibly empty text that contains no marker.

        Its first non-blank character is none of `beginnings`. The text is split into several terminals, at each
        character that a marker could begin with: the lexer is greedy, so a single terminal for the whole text would
        swallow the beginning of a marker.
        """
        firsts = "".join(sorted({re.escape(marker[0]) for marker in markers}))
        number = len(self._rules)
        text, other, head = f"TEXT_{number}", f"OTHER_{number}", f"HEAD_{number}"
        pieces = text
        self._rules.append(f"{text}: /[^{firsts}]+/" if firsts else f"{text}: /(?s:.+)/")
        if firsts:
            excluded = "|".join(_UNESCAPED_SLASH.sub(_SLASH, re.escape(marker)) for marker in markers)
            self._rules.append(f"{other}: /[{firsts}][^{firsts}]*/ & ~/({excluded})(?s:.*)/")
            pieces = f"({text} | {other})"
        if not beginnings:
            return self.rule(f"{pieces}*")
        self._rules.append(f"{head}: /\\s*[^\\s{firsts}{re.escape(''.join(beginnings))}]/")
        return self.rule(f"({f'({head} | {other})' if firsts else head} {pieces}*)?")

    def text_until(self, end: str, schema: Mapping[str, Any] = _ANY_STRING) -> str:
        """Return an expression for a text that matches a string schema, followed by `end`."""
        terminal = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{terminal}: {_pattern(schema)}")
        if self._special_pattern.match(end):
            return self.sequence(terminal, self.text(end))
        return self.rule(terminal, attributes=f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def parameter_json(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return an expression for a parameter's value in JSON; its schema may refer to definitions in `root`."""
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return self.json({**definitions, **(schema if isinstance(schema, Mapping) else {})})

    def repeated(self, item: str, separator: str) -> str:
        """Return an expression for one or more items with a separator between them."""
        return f"{item} ({self.sequence(self.text(separator), item)})*"

    def listed(self, parts: Mapping[str, str], names: Collection[str], separator: str) -> str:
        """Return an expression for the parts with the required `names`, then any of the others, each in order."""
        comma = self.text(separator)
        required = [part for name, part in parts.items() if name in names]
        optional = [part for name, part in parts.items() if name not in names]
        rest = [f"({comma} {part})?" for part in optional]
        if required:
            return self.sequence(f" {comma} ".join(required), *rest)
        orders = [self.sequence(part, *rest[i + 1 :]) for i, part in enumerate(optional)]
        return f"{self.choice(orders)}?" if orders else ""

    def finished(self, start: str) -> str:
        """Return the complete grammar, with `start` as its start expression."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments; undeclared names are not allowed unless the schema allows them."""
    schema: dict[str, Any] = {"type": "object", **tool.parameters}
    schema.setdefault("properties", {})
    if not any(key in schema for key in ("patternProperties", "anyOf", "oneOf", "allOf", "$ref")):
        schema.setdefault("additionalProperties", False)
    return schema


def parameters_of(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], Collection[str]]:
    """Return the properties of an object schema and the names of the required ones.

    For formats that write each parameter separately. Raises `ValueError` for an invalid schema, and for keywords
    that allow or require names beyond its properties.
    """
    unknown = [key for key in _OF_WHOLE_OBJECTS if key in schema]
    if unknown:
        raise ValueError(f"this model's tool call format does not support the object keyword {unknown[0]!r}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise ValueError("'properties' must be an object")
    if not isinstance(required, list):
        raise ValueError("'required' must be a list")
    missing = [name for name in required if not isinstance(name, str) or name not in properties]
    if missing:
        raise ValueError(f"'required' names {missing[0]!r}, which is not in 'properties'")
    return properties, required


def takes_any_names(schema: Mapping[str, Any]) -> bool:
    """Return True if an object schema declares no properties and allows any name."""
    return schema.get("additionalProperties") is True and not schema.get("properties")


def _pattern(schema: Mapping[str, Any]) -> str:
    """Return a terminal for text that matches a string schema."""
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
