"""The JSON types that a schema allows, used to convert an argument's text to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from llamaslot.base.schema_references import referenced

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
_BESIDE_A_REFERENCE = {"$ref", "$defs", "definitions", "$schema", "$id", "type", "title", "description"}
_MAX_DEPTH = 16
"""Depth of nested subschemas that are followed; deeper ones count as any type."""
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def parameter_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types of one parameter; all types if the schema does not restrict them."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return value_types(schema, parameters)


def without_reference(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments with a `$ref` at its top level resolved."""
    found = referenced(parameters.get("$ref"), parameters)
    if not isinstance(found, Mapping) or "$ref" in found or not parameters.keys() <= _BESIDE_A_REFERENCE:
        return parameters
    return {**found, **{key: value for key, value in parameters.items() if key != "$ref"}}


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
            types &= {_type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            types &= {_type_of(each) for each in schema["enum"]}
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list) and options:
                types &= frozenset().union(*(self.of(each, depth + 1) for each in options))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                types &= self.of(part, depth + 1)
        return types or ALL_TYPES


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
    kind = _type_of(value)
    if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    return next(name for kind, name in _TYPES if isinstance(value, kind))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
