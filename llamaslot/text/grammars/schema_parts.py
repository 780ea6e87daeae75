"""JSON schemas as they are written: the schemas in one, and those that hold at once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
Resolve: TypeAlias = Callable[[object], object | None]
"""Gives the schema that a reference points to, None if there is none."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)
APPLICATORS = frozenset({*_MAPS, *_LISTS, *_SINGLE})
"""Keywords whose values are schemas, or have them as items or members."""
_MAX_CONJUNCTS = 200


def subschemas(root: object, known: Container[int] = ()) -> Iterator[Schema]:
    """Yield a schema and all in it, those that are objects; values such as a `const` are none.

    Those with `known` ids are left out, with all in them.
    """
    todo = [root]
    while todo:
        schema = todo.pop()
        if not isinstance(schema, dict) or id(schema) in known:
            continue
        yield schema
        for name in _MAPS:
            children = schema.get(name)
            todo += children.values() if isinstance(children, dict) else ()
        for name in _LISTS:
            todo += list_of(schema.get(name))
        todo += [schema[name] for name in _SINGLE if name in schema]


def conjuncts(schemas: list[Any], resolve: Resolve) -> list[Schema] | None:
    """Return schemas with those that `$ref` and `allOf` add, which hold too; None if one is `false`."""
    found: list[Schema] = []
    seen: set[int] = set()
    todo = list(schemas)
    for _ in range(_MAX_CONJUNCTS):
        if not todo:
            break
        schema = todo.pop()
        if schema is False:
            return None
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        found.append(schema)
        todo += list_of(schema.get("allOf"))
        if "$ref" in schema:
            todo.append(resolve(schema["$ref"]))
    return found


def is_number(value: object) -> bool:
    """Return True for what JSON calls a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def list_of(value: object) -> list[Any]:
    """Return a keyword's list; an empty one if the keyword is missing or has another value."""
    return value if isinstance(value, list) else []


def dict_of(value: object) -> dict[str, Any]:
    """Return a keyword's object; an empty one if the keyword is missing or has another value."""
    return value if isinstance(value, dict) else {}
