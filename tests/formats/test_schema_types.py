"""Values of arguments that are written without quotes, by the type in their schema."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from llamaslot.base.json_schemas import ALL_TYPES, parameter_types, value_types, without_reference
from llamaslot.formats.families.tagged_arguments import json_of

ROOT = {
    "type": "object",
    "$defs": {
        "name": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "a/b": {"type": "null"},
        "of several": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    },
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": [1]}, {"array"}),
        ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, {"string", "boolean"}),
        ({"oneOf": [{"const": 1.5}, {"const": {}}]}, {"number", "object"}),
        ({"allOf": [{"type": ["string", "null"]}, {"enum": ["a"]}]}, {"string"}),
        ({"$ref": "#/$defs/name"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"null"}),
        ({"$ref": "#/$defs/of%20several"}, {"integer", "boolean"}),
        ({"$ref": "#/$defs/of several/anyOf/1"}, {"boolean"}),
        ({"$ref": "#/$defs/of several/anyOf/2"}, ALL_TYPES),
        ({"$ref": "#/$defs/of several/anyOf/²"}, ALL_TYPES),
        ({"$ref": "#"}, {"object"}),
        ({"$ref": "#name"}, ALL_TYPES),
        ({"$ref": "#/$defs/missing"}, ALL_TYPES),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"$ref": "other.json"}, ALL_TYPES),
        ({"type": "string", "enum": [1]}, ALL_TYPES),
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
        (None, ALL_TYPES),
    ],
)
def test_types_that_a_schema_allows(schema: Any, types: set[str]) -> None:
    assert value_types(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        (" 5 ", {"integer"}, 5),
        ("[1]", {"integer"}, [1]),
        ("five", {"integer"}, "five"),
        ("True", {"boolean"}, True),
        ("None", {"string", "null"}, None),
        ("5", {"string", "number"}, 5),
        ("5", {"string", "boolean"}, "5"),
        ('"5"', {"string", "integer"}, '"5"'),
        ("NaN", {"number"}, "NaN"),
        ('{"a": 1', ALL_TYPES, '{"a": 1'),
        ("[" * 100_000, ALL_TYPES, "[" * 100_000),
        ("9" * 10_000, {"integer"}, "9" * 10_000),
    ],
)
def test_text_is_read_as_the_type_that_is_allowed(text: str, types: set[str], value: Any) -> None:
    assert json.loads(json_of(text, frozenset(types))) == value


@pytest.mark.parametrize("cyclic", [True, False], ids=["cycle", "tree"])
def test_types_of_schemas_with_many_references_are_found_at_once(cyclic: bool) -> None:
    def referring(i: int) -> dict[str, Any]:
        return {"anyOf": [{"$ref": f"#/$defs/s{0 if cyclic else i + 1}"}] * 30}

    definitions: dict[str, Any] = {f"s{i}": referring(i) for i in range(7)}
    definitions["s7"] = {"type": "integer"}
    root = {"$defs": definitions}
    started = time.perf_counter()
    assert value_types({"$ref": "#/$defs/s0"}, root) == (ALL_TYPES if cyclic else {"integer"})
    assert time.perf_counter() - started < 1, "the number of paths is 30 to the power of 7"


def test_a_reference_to_all_arguments_is_resolved() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "name": {"type": "string"}}}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}, "title": "A node"}
    found = without_reference(schema)
    assert found == {**node, "$defs": {"node": node}, "title": "A node"}
    assert parameter_types(found, "name") == {"string"}
    for other in ({"$ref": "#"}, {"$ref": "#/none"}, {"$ref": 5}, {**schema, "properties": {}}, {"type": "object"}):
        assert without_reference(other) is other
