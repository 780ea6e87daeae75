"""Structure of JSON schemas: references, the schemas in a schema, and the types that it allows.

One place for grammars, chat templates and the parsers of output. Schemas come from clients and may be invalid, or
refer to themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = dict[str, Any]
Resolve: TypeAlias = Callable[[object], object | None]
"""Returns the schema to which a reference points; None if there is none."""

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_TYPES = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (type(None), "null"),
    (object, "object"),
)
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
_BESIDE_A_REFERENCE = {"$ref", "$defs", "definitions", "$schema", "$id", "type", "title", "description"}
_MAX_DEPTH = 16
"""Depth of nested subschemas whose types are followed; deeper ones count as any type."""
_is_index = re.compile(r"[0-9]{1,9}").fullmatch


def referenced(reference: object, root: Mapping[str, Any]) -> Any:
    """Return what a reference points to within the schema `root`; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    found: Any = root
    for name in names_in(reference):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and _is_index(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def names_in(reference: str) -> list[str]:
    """Return the names and indices of which a reference within a schema consists."""
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference[1:].split("/")[1:]]


def without_reference(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments with a `$ref` at its top level resolved."""
    found = referenced(parameters.get("$ref"), parameters)
    if not isinstance(found, Mapping) or "$ref" in found or not parameters.keys() <= _BESIDE_A_REFERENCE:
        return parameters
    return {**found, **{key: value for key, value in parameters.items() if key != "$ref"}}


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


def parameter_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types of one parameter; all types if the schema does not restrict them."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return value_types(schema, parameters)


def value_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that `schema` allows; its references are resolved in `root`."""
    return _SchemaTypes(root).of(schema)


class _SchemaTypes:
    """Computes the types of each subschema of a tool once.

    Clients write the schemas, and expanding references can make them exponentially larger.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}
        """Keyed by `id` of the subschema; one that is being computed has all types, which ends reference cycles."""

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ALL_TYPES
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = ALL_TYPES
            known = self._known[id(schema)] = self._computed(schema, depth)
        return known

    def _computed(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        types = ALL_TYPES
        if isinstance(reference := schema.get("$ref"), str):
            types &= self.of(referenced(reference, self._root), depth + 1)
        declared = schema.get("type")
        if isinstance(declared, str):
            types &= {declared}
        elif isinstance(declared, list):
            types &= {each for each in declared if isinstance(each, str)}
        if "const" in schema:
            types &= {type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            types &= {type_of(each) for each in schema["enum"]}
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list) and options:
                types &= frozenset().union(*(self.of(each, depth + 1) for each in options))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                types &= self.of(part, depth + 1)
        return types or ALL_TYPES


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return next(name for kind, name in _TYPES if isinstance(value, kind))
