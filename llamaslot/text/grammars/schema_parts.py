"""Structure of JSON schemas: the schemas within a schema, and those that apply at the same time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
Resolve: TypeAlias = Callable[[object], object | None]
"""Returns the schema to which a reference points; None if there is none."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)
APPLICATORS = frozenset({*_MAPS, *_LISTS, *_SINGLE})
"""Keywords whose values are schemas, or lists or objects of schemas."""
_MAX_CONJUNCTS = 200
"""Most schemas that `conjuncts` looks at; further ones are ignored."""


def subschemas(root: object, known: Container[int] = ()) -> Iterator[Schema]:
    """Yield a schema and all schemas in it that are objects. Values, such as that of `const`, are not schemas.

    Schemas with `known` ids are left out, and so are all schemas in them.
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
    """Return schemas together with those that apply through `$ref` and `allOf`; None if one of them is `false`."""
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
    """Return True for a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def list_of(value: object) -> list[Any]:
    """Return a keyword's list; an empty one if the keyword is missing or has another value."""
    return value if isinstance(value, list) else []


def dict_of(value: object) -> dict[str, Any]:
    """Return a keyword's object; an empty one if the keyword is missing or has another value."""
    return value if isinstance(value, dict) else {}
