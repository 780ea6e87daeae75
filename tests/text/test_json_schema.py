"""JSON schemas as constraints: every text that one allows is valid by an independent validator."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError
from llamaslot.text.grammars.compiling import MAX_CONSTRAINT_CHARS, GrammarChecker, compile_grammar
from llamaslot.text.grammars.json_schema import MAX_MULTIPLE_OF, MAX_PROPERTIES, json_schema_constraint
from llamaslot.text.grammars.schema_fixes import ecmascript_pattern
from tests.conftest import LONG, new_seed
from tests.fake_backend import byte_tokenizer, byte_trial
from tests.json_schemas import SchemaMaker, random_text

CHECKER = GrammarChecker(byte_trial(["<s>", "</s>"], 258))
TOKENIZER = byte_tokenizer()


def matcher_of(schema: Any, **options: bool) -> LLMatcher:
    constraint = json_schema_constraint(schema, "json_schema", **options)
    CHECKER.check(constraint)
    return compile_grammar(constraint, TOKENIZER)


def allows(schema: Any, text: str, **options: bool) -> bool:
    matcher = matcher_of(schema, **options)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        matcher_of(schema)
    assert caught.value.param == "json_schema"
    return caught.value.message


@pytest.mark.parametrize("is_rough", [False, True])
def test_every_allowed_text_is_valid_and_few_schemas_are_refused(is_rough: bool) -> None:
    n_refused = n_endless = n_valid = 0
    n_schemas = 1000 if LONG else 150
    start = new_seed()
    for seed in range(start, start + n_schemas):
        schema = SchemaMaker(seed, is_rough=is_rough).schema()
        try:
            matcher = matcher_of(schema)
        except InvalidRequestError:
            assert is_rough, (seed, schema)
            n_refused += 1
            continue
        choice = random.Random(seed)
        for _ in range(3):
            text = random_text(matcher.deep_copy(), choice)
            if text is None:
                n_endless += 1
                continue
            errors = list(Draft202012Validator(schema).iter_errors(json.loads(text)))
            assert not errors, (seed, text, schema, errors[0].message)
            n_valid += 1
    assert n_refused <= n_schemas / 3
    assert n_endless <= 3 * n_schemas * (0.1 if is_rough else 0.01)
    assert n_valid > n_schemas


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "string"}}, "JSON Schema's 'not' is not supported"),
        ({"if": {}, "then": {"minimum": 1}}, "JSON Schema's 'if', 'then' is not supported"),
        ({"type": "array", "uniqueItems": True}, "JSON Schema's 'uniqueItems' is not supported"),
        ({"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}, "'contains'"),
        ({"type": "object", "propertyNames": {"maxLength": 3, "pattern": "^a"}}, "'propertyNames'"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "pattern": "^(?=a)"}, "look-ahead"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"type": "object", "minProperties": 1, "properties": {"a": {}}}, "min/maxProperties"),
        ({"$ref": "http://example.com/schema"}, "not present"),
        ({"$ref": "#/$defs/missing"}, "does not exist"),
        ({"$ref": "#"}, "no text can match"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
        ({"type": "integer", "multipleOf": MAX_MULTIPLE_OF + 1}, "'multipleOf'"),
        ({"items": [{"multipleOf": 6000}, {"multipleOf": 0.6}, {"multipleOf": 6000}]}, "'multipleOf'"),
        ({"allOf": [{"pattern": f"^.*a.{{{i}}}b.*$"} for i in range(22)]}, "22 patterns must match at once"),
        (
            {
                "items": {"$ref": "#/$defs/a", "allOf": [{"pattern": "(a|b.{200}){9}"}, {"$ref": "#/$defs/b"}]},
                "$defs": {"a": {"pattern": "c{1,90}"}, "b": {"allOf": [{"pattern": "d{5,}"}]}},
            },
            "3 patterns must match at once",
        ),
        (
            {"properties": {f"p{i}": {} for i in range(1001)}},
            "1001 optional properties (limit: 1000)",
        ),
        (
            {"items": {"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}},
            f"(limit: {MAX_PROPERTIES})",
        ),
        ({"type": "hiccup"}, "hiccup"),
        *(
            ({"anyOf": [{"type": each}]}, "'type' must be")
            for each in (123, None, True, {}, {"a": 1}, [1], [[]], [{}])
        ),
        ({"oneOf": [{"type": "integer"}, {"enum": [1e30, 2.5]}]}, "oneOf"),
        ({"type": "integer", "minimum": 10**18}, "exceeds the largest supported number, +999999999999999999"),
        (
            {"items": {"type": "number", "exclusiveMaximum": -1e30}},
            "the bound -1e+30 exceeds the largest supported number, -999999999999999999",
        ),
        (123, "must be a JSON schema"),
        (False, "must be a JSON schema"),
        ({"type": "string", "pattern": r"^[\x00-\x1f]$"}, "pattern"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "'not'"),
        ({"items": {"x-guidance": {"lenient": True}, "not": {}}}, "'not'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(schema: Any, words: str) -> None:
    assert words in refusal(schema)


def test_options_for_llguidance_in_a_schema_have_no_effect() -> None:
    schema = {"x-guidance": {"key_separator": "="}, "type": "object", "properties": {"a": {"const": 1}}}
    assert allows(schema, '{"a":1}')
    assert not allows(schema, '{"a"=1}')


def test_deep_schemas_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"items": deep}
    assert refusal(deep)


def test_keywords_without_effect_are_removed() -> None:
    assert allows({"type": "array", "uniqueItems": False}, "[1,1]")
    assert allows({"type": "integer", "format": "int32"}, "1")
    for name in ("password", "regex", "json-pointer", "uri-reference"):
        assert allows({"type": "string", "format": name}, '"x"')
    # A property may have the name of a keyword.
    assert not allows({"properties": {"format": {"const": 1}}, "required": ["format"], "type": "object"}, "{}")
    assert allows({"const": {"format": "int32", "uniqueItems": False}}, '{"format":"int32","uniqueItems":false}')


@pytest.mark.parametrize(
    "keywords",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"type": "string", "title": "name"}}},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"minProperties": 0},
        {"minProperties": 1, "required": ["a"]},
        {"maxProperties": 1, "additionalProperties": False},
        {"not": False},
        {"contains": {"type": "integer"}, "minContains": 0},
        {"minContains": 3},
        {"dependentRequired": {}},
        {"dependentRequired": {"a": []}},
        {"dependentSchemas": {"a": True}},
        {"dependencies": {}},
        {"if": {"minimum": 3}},
        {"if": {"minimum": 3}, "then": True, "else": {"description": "any"}},
        {"then": {"minimum": 3}},
        {"unevaluatedProperties": True},
        {"unevaluatedProperties": {}},
        {"unevaluatedItems": True},
        {"additionalItems": False},
        {"patternProperties": {}},
        {"allOf": [True, {}]},
        {"minItems": 0, "minLength": 0},
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
    ],
)
def test_keywords_that_say_nothing_are_removed(keywords: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **keywords}
    assert allows(schema, '{"a":1}')
    assert not allows(schema, '{"a":"x"}')
    nested = {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}, "$defs": keywords.get("$defs", {})}
    assert allows(nested, '[{"a":1},null]')


@pytest.mark.parametrize(
    ("names", "allowed", "other"),
    [
        ({"enum": ["x", "y"]}, ['{"x":1}', '{"x":1,"y":2}', "{}"], ['{"z":1}', '{"x":"a"}']),
        ({"$ref": "#/$defs/n"}, ['{"x":1}'], ['{"z":1}']),
        ({"const": "x"}, ['{"x":1}'], ['{"y":1}']),
        ({"type": "string", "pattern": "^k[0-9]$"}, ['{"k1":1}'], ['{"a":1}', '{"k1":"a"}']),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['{"ab":1}'], ['{"a":1}', '{"abcd":1}']),
    ],
)
def test_names_of_properties_are_followed(names: Any, allowed: list[str], other: list[str]) -> None:
    schema = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
        "$defs": {"n": {"enum": ["x"]}},
    }
    assert [text for text in (*allowed, *other) if allows(schema, text)] == allowed


def _nested_names(n: int) -> Any:
    inner: Any = {"type": "integer"}
    for _ in range(n):
        inner = {"type": "object", "propertyNames": {"enum": list("abcdefghij")}, "additionalProperties": inner}
    return inner


def test_names_of_properties_within_others_are_followed() -> None:
    schema = _nested_names(8)
    text = "{" + '"a":{' * 7 + '"b":2,"j":1' + "}" * 8
    assert allows(schema, text)
    assert not allows(schema, text.replace('"j"', '"k"'))


EVEN, ODD = list(range(0, 6000, 2)), list(range(1, 6000, 2))
ALL = {"anyOf": [{"$ref": "#/$defs/all"}, {"$ref": "#/$defs/all"}]}
EXPENSIVE_TO_JUDGE: dict[str, Any] = {
    "values": {
        "anyOf": 200 * [{"oneOf": [{"$ref": "#/$defs/even"}, {"$ref": "#/$defs/odd"}]}],
        "$defs": {"even": {"enum": EVEN}, "odd": {"enum": ODD}},
    },
    "pairs": {"oneOf": [{"enum": [f"{i}_{j}" for j in range(100)]} for i in range(100)]},
    "alternatives": {"oneOf": [ALL, ALL], "$defs": {"all": ALL}},
    "long patterns": {
        "anyOf": 1500 * [{"allOf": [{"$ref": "#/$defs/p"}]}],
        "$defs": {"p": {"pattern": "{1}" * 23_000}},
    },
    "many allOf": {"anyOf": 1500 * [{"allOf": [{"$ref": "#/$defs/p"}]}], "$defs": {"p": {"allOf": [True] * 9000}}},
    "names": _nested_names(12),
}


@pytest.mark.parametrize("name", EXPENSIVE_TO_JUDGE)
def test_a_schema_is_prepared_in_a_bounded_time(name: str) -> None:
    """All threads of the prompt worker wait for what is done in Python; some of these took minutes."""
    schema = EXPENSIVE_TO_JUDGE[name]
    assert len(json.dumps(schema, separators=(",", ":"))) < MAX_CONSTRAINT_CHARS
    began = time.thread_time()
    with contextlib.suppress(InvalidRequestError):
        assert len(json_schema_constraint(schema, "f").grammar) < 4 * MAX_CONSTRAINT_CHARS
    assert time.thread_time() - began < 2.5


@pytest.mark.parametrize("schema", [True, {}])
def test_an_empty_schema_is_for_any_object(schema: Any) -> None:
    assert allows(schema, '{"a": [1, null]}')
    assert allows(schema, "[]") == (schema is True)


PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {"$ref": "#/$defs/p", "$defs": {"p": PERSON}},
        {"anyOf": [PERSON, {"type": "null"}]},
        {**PERSON, "title": "p", "required": ["a"]},
    ],
)
def test_objects_that_list_properties_have_no_others(schema: Any) -> None:
    assert allows(schema, '{"a":1}')
    assert not allows(schema, '{"a":1,"b":2}')
    listed, said = '"properties": {"a"', '"additionalProperties": true, "properties": {"a"'
    assert allows(json.loads(json.dumps(schema).replace(listed, said)), '{"a":1,"b":2}')


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [PERSON, {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}]},
        {"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"b": {}}, "required": ["b"]}], "$defs": {"p": PERSON}},
        {"$ref": "#/$defs/p", "required": ["b"], "$defs": {"p": {"anyOf": [PERSON]}}},
        {**PERSON, "anyOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}]},
        {**PERSON, "required": ["b"]},
    ],
)
def test_objects_stay_open_where_another_keyword_needs_it(schema: Any) -> None:
    assert allows(schema, '{"a":1,"b":2}') or allows(schema, '{"b":2,"a":1}')


@pytest.mark.parametrize(
    ("schema", "allowed", "other"),
    [
        ({"items": {"type": "integer"}, "title": "n"}, ["[]", "[1,2]"], ["true", "{}"]),
        ({"items": [{"type": "integer"}]}, ["[1]"], ["true", "[]", "[1,2]"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {}]}, ["[1,true]"], ["[1]", "[1,2,3]"]),
        ({"prefixItems": [{"type": "integer"}], "items": {"const": 2}}, ["[1]", "[1,2,2]"], ["[]", "[1,3]"]),
        ({"properties": {"a": {}}}, ["{}", '{"a":1}'], ["1", '{"b":1}']),
        ({"additionalProperties": {"const": 2}}, ["{}", '{"a":2}'], ["1", '{"a":1}']),
        # What says more is left as it is.
        ({"prefixItems": [{"type": "integer"}], "minItems": 0}, ["[]", "true", "[1,2]"], []),
        ({"allOf": [{"items": {"type": "integer"}}, {"type": ["array", "null"]}]}, ["[1]", "null"], []),
        ({"type": ["array", "null"], "items": [{"type": "integer"}]}, ["null", "[]"], []),
    ],
)
def test_keywords_of_a_type_stand_for_the_type(schema: Any, allowed: list[str], other: list[str]) -> None:
    assert [text for text in (*allowed, *other) if allows(schema, text)] == allowed


def test_alternatives_do_not_become_exclusive_by_being_closed() -> None:
    # {"a": 1} matches both, so it is not valid, though it would match one of them if they had no other properties.
    other = {"type": "object", "properties": {"b": {"type": "integer"}}}
    person = {**PERSON, "required": ["a"]}
    assert "oneOf" in refusal({"oneOf": [person, other]})
    assert "oneOf" in refusal({"oneOf": [{"$ref": "#/$defs/p"}, other], "$defs": {"p": person}})
    nested = ({"type": "object", "properties": {"x": each}, "required": ["x"]} for each in (person, other))
    assert "oneOf" in refusal({"oneOf": list(nested)})


def test_alternatives_with_a_discriminator_are_exclusive() -> None:
    options = [
        {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "required": ["kind"]}
        for kind in ("cat", "dog")
    ]
    schema = {"oneOf": options, "discriminator": {"propertyName": "kind"}}
    assert allows(schema, '{"kind":"cat","cat":1}')
    assert not allows(schema, '{"kind":"bird"}')


def _tagged(kind: str, **fields: Any) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, **fields}
    return {"type": "object", "properties": properties, "required": ["kind", *fields]}


INTEGER, CAT, DOG = {"type": "integer"}, _tagged("cat", n={"type": "integer"}), _tagged("dog", n={"type": "number"})
DEFS = {
    "cat": CAT,
    "dog": DOG,
    "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
    "node": {"type": "object", "properties": {"next": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}},
    "far": {"$ref": "#/$defs/cat"},
    "color": {"enum": ["red", "blue"]},
}


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ([{"type": "null"}, {"$ref": "#/$defs/cat"}], ["null", '{"kind":"cat","n":1}']),
        ([{"type": "null"}, {"$ref": "#/$defs/far"}], ["null"]),
        ([{"type": "null"}, {"$ref": "#/$defs/node"}], ["null", '{"next":{"next":null}}']),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], ['{"kind":"dog","n":0.5}']),
        ([{"type": "null"}, {"$ref": "#/$defs/pet"}], ['{"kind":"dog","n":0.5}']),
        ([{"$ref": "#/$defs/color"}, {"type": "integer"}], ['"red"', "3"]),
        ([{"$ref": "#/$defs/color"}, {"const": "green"}], ['"green"', '"red"']),
        ([{"type": ["string", "null"]}, {"type": ["object", "array"]}], ["null", "[]"]),
        ([{"allOf": [{"$ref": "#/$defs/cat"}]}, {"allOf": [DOG, {"type": "object"}]}], ['{"kind":"cat","n":1}']),
        ([{"anyOf": [CAT, {"type": "null"}]}, {"anyOf": [DOG, {"const": 1}]}], ["1", "null"]),
        ([{"type": "integer", "maximum": 3}, {"type": "integer", "exclusiveMinimum": 3}], ["3", "4"]),
        ([{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}], ['"ab"', '"abc"']),
        ([{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}], ["[]", "[1,2]"]),
        (
            [
                {"type": "array", "prefixItems": [{"const": "a"}, INTEGER], "minItems": 2, "maxItems": 2},
                {"type": "array", "prefixItems": [{"const": "b"}, INTEGER], "minItems": 2, "maxItems": 2},
            ],
            ['["b",1]'],
        ),
        (
            [
                {"type": "object", "properties": {name: INTEGER}, "required": [name], "additionalProperties": False}
                for name in ("x", "y")
            ],
            ['{"x":1}', '{"y":1}'],
        ),
        ([{"type": "integer"}], ["1"]),
        ([False, {"type": "integer"}], ["1"]),
        ([_tagged("a", v={"oneOf": [CAT, DOG]}), _tagged("b")], ['{"kind":"a","v":{"kind":"cat","n":1}}']),
    ],
)
def test_alternatives_are_told_apart(options: list[Any], allowed: list[str]) -> None:
    schema = {"oneOf": options, "$defs": DEFS}
    for text in allowed:
        assert not list(Draft202012Validator(schema).iter_errors(json.loads(text)))
        assert allows(schema, text), text


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"type": "null"}, {"$ref": "#/$defs/maybe"}],
        [
            {"type": "object", "properties": {"k": {"const": 1}}},
            {"type": "object", "properties": {"k": {"const": 2}}},
        ],
        [{"$ref": "#/$defs/cat"}, {"type": "object", "properties": {"kind": {"const": "cat"}}}],
        [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}],
        [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}],
        [{"enum": [1, 2]}, {"enum": [2, 3]}],
        [{"enum": [1]}, {"enum": [1.0]}],
        [{"enum": ["a", "b"]}, {"type": "string"}],
        [True, {"type": "integer"}],
        [CAT, CAT],
        [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}],
    ],
)
def test_alternatives_that_may_both_match_are_refused(options: list[Any]) -> None:
    definitions = {**DEFS, "maybe": {"type": ["null", "string"]}, "loop": {"$ref": "#/$defs/loop"}}
    message = refusal({"oneOf": options, "$defs": definitions})
    assert "oneOf" in message or "no text can match" in message or "no alternative" in message
    assert "coerce" not in message


def test_an_error_in_a_tool_is_not_taken_for_one_of_alternatives() -> None:
    """llguidance's messages on tools have the line of the grammar, with the options of the schema."""
    overlapping = {"patternProperties": {"^a": INTEGER, "b$": INTEGER}, "x-guidance": {"coerce_one_of": False}}
    constraint = Constraint(LLMatcher.grammar_from_lark(f"start: %json {json.dumps(overlapping)}"), "tools")
    with pytest.raises(InvalidRequestError, match="not disjoint"):
        CHECKER.check(constraint)


def _below(schema: Any) -> list[Any]:
    """Schemas that hold another one, each with what is before and after the text of its value."""
    tagged = {"type": "object", "properties": {"k": {"const": 1}, "v": schema}, "required": ["k", "v"]}
    other = {"type": "object", "properties": {"k": {"const": 2}}, "required": ["k"]}
    reference = {"$ref": "#/$defs/s"}
    return [
        (schema, "", ""),
        ({"anyOf": [schema, {"type": "null"}]}, "", ""),
        ({"oneOf": [schema, {"type": "null"}]}, "", ""),
        ({"allOf": [schema]}, "", ""),
        ({"allOf": [schema, {"minimum": -1}]}, "", ""),
        ({"allOf": [{"$ref": "#/$defs/s"}, {"title": "t"}], "$defs": {"s": schema}}, "", ""),
        ({**reference, "$defs": {"s": schema}}, "", ""),
        ({**reference, "minimum": -1, "$defs": {"s": schema}}, "", ""),
        ({"oneOf": [tagged, other]}, '{"k":1,"v":', "}"),
        ({"oneOf": [{"$ref": "#/$defs/t"}, other], "$defs": {"t": tagged}}, '{"k":1,"v":', "}"),
        ({"type": "array", "items": schema}, "[", "]"),
        ({"type": "array", "prefixItems": [schema], "minItems": 1}, "[", "]"),
        ({"type": "object", "additionalProperties": schema}, '{"a":', "}"),
        ({"type": "object", "patternProperties": {"^a": schema}}, '{"a":', "}"),
        ({"type": "object", "properties": {"a": schema}, "additionalProperties": schema}, '{"a":', "}"),
        ({"allOf": [{"type": "object", "properties": {"a": schema}}, {"required": ["a"]}]}, '{"a":', "}"),
        ({"type": "array", "items": {"oneOf": [{"type": "array", "items": schema}, other]}}, "[[", "]]"),
    ]


@pytest.mark.parametrize("place", range(len(_below({}))))
@pytest.mark.parametrize(
    ("kind", "longest"),
    [
        ("integer", 18 * "9"),
        (["integer", "null"], 18 * "9"),
        ("number", "0." + 10 * "3"),
        (["number", "null"], "0." + 10 * "3"),
    ],
)
def test_digits_are_limited_in_every_subschema(kind: Any, longest: str, place: int) -> None:
    schema, before, after = _below({"type": kind, "minimum": -2} if isinstance(kind, str) else {"type": kind})[
        place
    ]
    if isinstance(kind, list) and {"type": "null"} in schema.get("oneOf", []):
        pytest.skip("its alternatives may both match")
    assert allows(schema, before + longest + after)
    assert not allows(schema, before + longest + "3" + after)


COMBINED = (3, 4, 5, 7, 15)
"""Places of `_below` where others say something of the same value."""


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(_below({}))))
@pytest.mark.parametrize(
    "schema",
    [
        *({}, True, {"title": "t"}, {"minimum": -2}, {"type": ["string", "array", "number", "object"]}),
        *({"type": "array"}, {"type": "array", "items": {}}, {"type": "array", "prefixItems": [True]}),
        *({"type": "array", "items": [{}]}, {"type": "array", "prefixItems": [{"const": 1}], "items": True}),
        *({"type": "object"}, {"additionalProperties": True}, {"type": "object", "required": ["a"]}),
        {"type": "object", "properties": {"a": True, "b": {"type": "number", "multipleOf": 0.01}}},
        {"type": "object", "patternProperties": {"^a": {}}},
    ],
)
def test_digits_are_limited_in_values_of_any_kind(schema: Any, place: int) -> None:
    around, before, after = _below(schema)[place]
    if place in COMBINED or (schema is True and not place) or {"type": "null"} in around.get("oneOf", []):
        pytest.skip("combined with others, no schema, or alternatives that may both match")
    values = [('{"a":', "}"), ("[", "]"), ("[1,", "]"), ('{"a":[{"a":', "}]}"), ("", "")]
    found = [each for each in values if allows(around, f"{before}{each[0]}0.3333333333{each[1]}{after}")]
    assert found
    for start, end in values:
        assert not allows(around, f"{before}{start}0.33333333333{end}{after}")
        assert not allows(around, f"{before}{start}{19 * '9'}{end}{after}")


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        ({"type": "number", "multipleOf": 0.5}, 18 * "9" + ".5"),
        ({"type": "integer", "multipleOf": 3}, 18 * "9"),
        ({"type": ["number", "null"], "multipleOf": 9973}, str(9973 * (10**18 // 9973))),
        ({"type": "number", "minimum": 0, "maximum": 2**64}, "0.3333333333"),
        ({"type": "number", "minimum": 1e-15}, "0.3333333333"),
        ({"type": "number", "minimum": 0.5, "maximum": 0.5}, "0.5"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, 18 * "9"),
    ],
)
def test_digits_are_limited_beside_steps_and_wide_bounds(schema: Any, longest: str) -> None:
    for each, before, after in (
        (schema, "", ""),
        ({"properties": {"a": schema, "b": {"const": 1e30}}}, '{"a":', "}"),
    ):
        assert allows(each, before + longest + after)
        assert not allows(each, before + longest + "5" + after)


def test_values_of_any_kind_that_are_combined_are_not_refused() -> None:
    some = {"type": "object", "properties": {"a": {}}, "additionalProperties": True}
    for schema in (
        {"allOf": [some, {"properties": {"b": True}, "required": ["b"]}]},
        {"$ref": "#/$defs/a", "properties": {"b": {}}, "$defs": {"a": some}},
        {"properties": {"b": {}}, "patternProperties": {"^b": {}}},
    ):
        assert allows(schema, '{"b":[1]}'), schema


def test_bounds_are_not_rounded_outwards() -> None:
    for sign in (1, -1):
        for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            bound = sign * 3.9000000000000004 if "M" in name or "min" in name else sign * 3.8999999999999995
            schema = {"type": "number", name: bound}
            for text in ("3.9", "-3.9", "3.90000000000001", "-3.90000000000001", "3.89999999999999"):
                if allows(schema, text):
                    assert not list(Draft202012Validator(schema).iter_errors(float(text))), (schema, text)


@pytest.mark.parametrize("low", [0, 1, 14.0, -3])
def test_exclusive_bounds_exclude_themselves(low: float) -> None:
    above = {"type": "number", "exclusiveMinimum": low, "maximum": low + 0.5}
    below = {"type": "number", "minimum": low - 0.5, "exclusiveMaximum": low}
    for schema in (above, below, {"allOf": [above, {}]}):
        for text in (f"{low:g}", f"{low:g}.0", f"{low:g}.00"):
            assert not allows(schema, text), (schema, text)
    assert allows(above, f"{low + 0.25:g}")
    assert allows(below, f"{low - 0.25:g}")


CLASSES = ('[^"]', r"[^\\]", r'[^"\\]', r'[^"\\\n]', '[^"a]', '(a|[^"])', r"[^\]]", ".", r"\d")


@pytest.mark.parametrize(
    ("chars", "in_python"),
    [*zip(CLASSES, CLASSES, strict=True), ("[a&&b]", "[a&b]"), ("[[a]", r"[\[a]"), ("[~~-]", "[~-]")],
)
def test_patterns_allow_the_characters_that_they_do_in_ecmascript(chars: str, in_python: str) -> None:
    matcher = matcher_of({"type": "string", "pattern": f"^{chars}$"})
    for code in range(1, 127):
        data = list(json.dumps(chr(code)).encode())
        copy = matcher.deep_copy()
        is_allowed = copy.try_consume_tokens(data) == len(data) and copy.is_accepting()
        assert is_allowed == bool(re.fullmatch(in_python, chr(code))), (chars, chr(code))


def test_patterns_that_cannot_be_rewritten_are_none() -> None:
    assert ecmascript_pattern("[]a]") is None
    assert ecmascript_pattern("[a--b]") is None
    assert ecmascript_pattern(r"\p{Cc}") is None
    assert ecmascript_pattern(r"a[^\x00]b") == r"a[^\x00\x00]b"
    assert ecmascript_pattern(r"\[a&&b\]") == r"\[a&&b\]"


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "number", "minimum": 0, "maximum": 1}])
def test_numbers_have_a_last_digit(schema: Any) -> None:
    assert allows(schema, "0.3333333333")
    assert not allows(schema, "0.33333333333")
    assert allows({"type": "integer"}, "-" + 18 * "9")
    assert not allows({"type": "integer"}, 19 * "9")
    assert allows({"type": "integer", "minimum": 0}, "7")
    assert allows({"type": "number", "maximum": 1e-15, "minimum": 0}, "0.0000000000000001")


def test_whitespace_is_bounded_and_can_be_left_out() -> None:
    schema = {"type": "array", "items": {"const": 1}}
    assert allows(schema, "[\n    1,\n    1\n]")
    assert not allows(schema, "[  1]")
    assert not allows(schema, "[ 1]", compact=True)
    assert allows(schema, "[1,1]", compact=True)


@pytest.mark.parametrize(
    "unknown",
    [
        {"discriminator": {"propertyName": "t", "mapping": {"add": "#/$defs/Add", "num": "#/$defs/Num"}}},
        {"x-order": ["t"]},
        {"nullable": False},
        {"type": "object"},
        {"example": {"t": "num"}, "externalDocs": {"url": "/"}, "xml": {"name": "a"}},
    ],
)
def test_keywords_that_are_not_json_schema_do_not_matter(unknown: dict[str, Any]) -> None:
    """Pydantic writes `discriminator` for tagged unions, and OpenAPI has more; recursive unions have it, too.

    So do they have the type that all alternatives have.
    """

    def schema(beside: dict[str, Any]) -> dict[str, Any]:
        union = {"oneOf": [{"$ref": "#/$defs/Add"}, {"$ref": "#/$defs/Num"}], **beside}
        add, num = (
            {"type": "object", "properties": properties, "required": list(properties), **beside}
            for properties in (
                {"t": {"const": "add"}, "left": union, "right": union},
                {"t": {"const": "num"}, "value": {**beside, "type": "number"}},
            )
        )
        return {**union, "$defs": {"Add": add, "Num": num}}

    for text, is_allowed in (
        ('{"t":"add","left":{"t":"num","value":1},"right":{"t":"num","value":2.5}}', True),
        ('{"t":"num","value":1,"more":2}', False),
        ('{"t":"num","value":' + 30 * "9" + "}", False),
    ):
        assert allows(schema({}), text) is is_allowed
        assert allows(schema(unknown), text) is is_allowed
    below = {"components": {"schemas": {"A": {"$ref": "#/shared/B"}}}, "shared": {"B": {"type": "integer"}}}
    assert allows({"items": {"$ref": "#/components/schemas/A", "x-a": 1}, **below}, "[1]")
