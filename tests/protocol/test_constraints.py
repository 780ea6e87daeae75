"""Constraints of replies with calls: what they allow, and schemas that are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.tools import ParserOptions, Tool, encoded_tools
from llamaslot.formats.calls import ToolCall
from llamaslot.protocol import constraints
from llamaslot.protocol.bodies import ChatBody
from llamaslot.protocol.constraints import MAX_GRAMMAR_CHARS, ConstraintReader, read_tools
from llamaslot.text.grammars.compiling import MAX_CONSTRAINT_CHARS, GrammarChecker
from llamaslot.text.grammars.json_schema import MAX_OPTIONAL, prepared_schema
from tests.fake_backend import FakeBackend, byte_trial
from tests.formats.messages import EXCERPTS, fed, made

QUESTION = [{"role": "user", "content": "How is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "step": {"type": "number"}},
    "required": ["city"],
}
ONE_BY_ONE = (
    *("qwen3-coder", "qwen3.5", "glm-4.6", "glm-4.7", "minimax-m2", "llama-pythonic", "gemma4", "function-gemma"),
    *("lfm2", "lfm2.5"),
)
"""Families that write each argument by itself."""
BYTES = LLTokenizer("byte")


def constraint(family: str, body: dict[str, Any]) -> str:
    """The grammar of a body's reply, in a vocabulary without control tokens."""
    options = msgspec.convert({"messages": QUESTION, **body}, ChatBody)
    reader = ConstraintReader(GrammarChecker(byte_trial((), FakeBackend().info.n_vocab)), lambda _: None)
    found = reader.for_reply(made(family), reader.read(options), read_tools(options), "none")
    assert found is not None
    return found.grammar


_DEEP: dict[str, Any] = {"type": "string"}
for _ in range(600):
    _DEEP = {"type": "array", "items": _DEEP}


@pytest.mark.slow
@pytest.mark.parametrize("family", EXCERPTS)
def test_schemas_of_forced_calls_that_cannot_be_followed_are_refused(family: str) -> None:
    changes: list[dict[str, Any]] = [
        {"required": 5}, {"required": [[]]}, {"required": ["missing"]}, {"properties": ["city"]},
        {"properties": {"city": _DEEP}}, {"properties": {"city": {"type": "string", "pattern": "("}}},
    ]  # fmt: skip
    for change in changes:
        good = named("good", PARAMETERS, strict=True)
        body: dict[str, Any] = {"tools": [good, named("get_weather", {**PARAMETERS, **change}, strict=True), good]}
        for more in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            if family in {"llama3", "generic", "generic-thinking"} and "response_format" in more:
                continue
            with pytest.raises(InvalidRequestError) as error:
                constraint(family, {**body, **more})
            assert error.value.param == "tools[1].function.parameters"
            assert "'tools[1].function.parameters'" in error.value.message


@pytest.mark.slow
def test_tools_are_prepared_only_while_their_grammar_may_be_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes time, and there may be thousands in a body."""
    prepared: list[str] = []

    def prepare(schema: object, param: str, **options: bool) -> Any:
        prepared.append(param)
        return prepared_schema(schema, param, **options)

    monkeypatch.setattr(constraints, "prepared_schema", prepare)
    long = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(900)}}
    tools = [named(f"f{i}", long) for i in range(200)]
    with pytest.raises(InvalidRequestError, match=f"'tools': .*limit: {MAX_GRAMMAR_CHARS}"):
        constraint("hermes", {"tools": tools, "tool_choice": "required"})
    assert len(prepared) < 40


def follows(family: str, body: dict[str, Any], call: ToolCall) -> bool:
    """True if the constraint of a body's reply allows a call as models of the family write it."""
    matcher = LLMatcher(BYTES, constraint(family, body), log_level=0)
    tokens = BYTES.tokenize_bytes(made(family).render([call]).encode())
    return bool(matcher.consume_tokens(tokens) and matcher.is_accepting())


def named(name: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


ODD_NAMES = ("$filter", "content-type", "a.b", "x y", "@type", "a[0]", "from", "1a", "it's", 'a"b', "ü")


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
def test_arguments_may_have_any_name(family: str) -> None:
    """Many are not as Python or XML would have them; a call without them is another one."""
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in ODD_NAMES}}
    call = ToolCall("f", json.dumps({name: f"<{name}>" for name in ODD_NAMES}), "a1b2c3d4e")
    assert follows(family, {"tools": [named("f", parameters)], "tool_choice": "required"}, call)
    text = made(family).render([call])
    for pieces in ([text], list(text)):
        parser = made(family).parser(ParserOptions(encoded_tools([Tool("f", parameters)])))
        [found] = fed(parser, pieces, "eos").calls
        assert json.loads(found.arguments) == json.loads(call.arguments)


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
def test_what_a_format_cannot_follow_of_the_arguments_as_a_whole_is_refused(family: str) -> None:
    either = [{**PARAMETERS, "required": [name]} for name in ("city", "days")]
    for parameters in ({"anyOf": either}, {"$ref": "#/$defs/a", "$defs": {"a": PARAMETERS}}):
        body = {"tools": [named("f", parameters)], "tool_choice": "required"}
        # What the schema itself refers to stands in its place.
        if family in ONE_BY_ONE and "$ref" not in parameters:
            with pytest.raises(InvalidRequestError, match=f"'{re.escape(next(iter(parameters)))}'"):
                constraint(family, body)
        else:
            assert follows(family, body, ToolCall("f", '{"city": "Rome"}', "a1b2c3d4e"))
            assert not follows(family, body, ToolCall("f", "{}", "a1b2c3d4e"))


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
def test_numbers_are_allowed_in_forced_calls(family: str) -> None:
    body = {"tools": [named("f", PARAMETERS)], "tool_choice": "required"}
    assert follows(family, body, ToolCall("f", '{"city": "Rome", "days": 3, "step": 0.5}', "a1b2c3d4e"))
    assert not follows(family, body, ToolCall("f", '{"city": "Rome", "days": "x"}', "a1b2c3d4e"))


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
def test_arguments_are_an_object_where_their_schema_allows_null(family: str) -> None:
    parameters = {**PARAMETERS, "type": ["object", "null"]}
    grammar = constraint(family, {"tools": [named("f", parameters)], "tool_choice": "required"})
    assert grammar == constraint(family, {"tools": [named("f", PARAMETERS)], "tool_choice": "required"})


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["x"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
@pytest.mark.parametrize(
    ("properties", "good", "bad"),
    [
        (
            {"a": POINT, "b": {"$ref": "#/properties/a"}},
            '{"a": {"x": 1}, "b": {"x": 2}}',
            '{"a": {"x": 1}, "b": {}}',
        ),
        (
            {"a": POINT, "b": {"$ref": "#/properties/a/properties/tags"}, "c": {"$ref": "#/properties/b"}},
            '{"a": {"x": 1}, "b": ["y"], "c": ["z"]}',
            '{"a": {"x": 1}, "b": ["y"], "c": [1]}',
        ),
        (
            {"a": {"type": "array", "items": {"$ref": "#"}}},
            '{"a": [{"a": []}, {"a": [{"a": []}]}]}',
            '{"a": [{"a": []}, {}]}',
        ),
    ],
    ids=["a property", "in a property", "the whole"],
)
def test_references_to_other_places_than_definitions_are_followed(
    family: str, properties: dict[str, Any], good: str, bad: str
) -> None:
    """zod-to-json-schema writes them where parts are alike; many formats write each argument by itself."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    body = {"tools": [named("f", parameters)], "tool_choice": "required"}
    assert follows(family, body, ToolCall("f", good, "a1b2c3d4e"))
    assert not follows(family, body, ToolCall("f", bad, "a1b2c3d4e"))


DESCRIPTION = "What this is, in as many words as the authors of such schemas use for it. " * 4
MANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        **{f"text_{i}": {"type": "string", "description": DESCRIPTION} for i in range(3)},
        "n": {"type": "integer", "minimum": 1, "default": 3, "description": DESCRIPTION},
        "kind": {"enum": ["one", "two", "three"], "title": "Kind"},
        "description": {"type": "array", "items": {"type": "object", "properties": {"title": {"type": "string"}}}},
    },
    "required": ["text_0", "n"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hermes", "qwen3-coder"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_calls_of_200_tools_can_be_constrained(family: str, choice: str) -> None:
    tools = [named(f"mcp__server__tool_{i}", MANY, strict=True) for i in range(200)]
    assert len(json.dumps(tools)) > 2 * MAX_CONSTRAINT_CHARS
    grammar = constraint(family, {"tools": tools, "tool_choice": choice})
    assert len(grammar) < MAX_GRAMMAR_CHARS
    assert "many words" not in grammar
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    call = ToolCall(
        "mcp__server__tool_199", '{"text_0": "a", "n": 3, "description": [{"title": "b"}]}', "a1b2c3d4e"
    )
    assert matcher.consume_tokens(BYTES.tokenize_bytes(made(family).render([call]).encode()))
    assert matcher.is_accepting()


@pytest.mark.slow
def test_what_is_too_long_is_said_in_plain_words() -> None:
    enum = {"enum": [f"{i:05d}" + "x" * 100 for i in range(1000)]}
    tools = [named(f"f{i}", {"type": "object", "properties": {"a": enum}}) for i in range(6)]
    body = {"tools": tools, "tool_choice": "required"}
    with pytest.raises(InvalidRequestError, match="'tools': its grammar would have"):
        constraint("hermes", body)
    assert constraint("hermes", {**body, "tools": tools[:1]})
    parts = {"type": "object", "properties": {f"p{i}": {"const": 0} for i in range(1000)}}
    with pytest.raises(InvalidRequestError, match="'tools': its grammar has too many parts"):
        constraint("hermes", {**body, "tools": [named(f"f{i}", parts) for i in range(18)]})
    tools[2] = named("f2", {"type": "object", "properties": {"a": {"const": "x" * MAX_CONSTRAINT_CHARS}}})
    with pytest.raises(InvalidRequestError, match="is longer than") as error:
        constraint("hermes", body)
    assert error.value.param == "tools[2].function.parameters"
    schema = {"const": "x" * MAX_CONSTRAINT_CHARS}
    for form in (schema, json.dumps(schema)):
        with pytest.raises(InvalidRequestError, match="'json_schema' is longer than"):
            constraint("hermes", {"json_schema": form})
    with pytest.raises(InvalidRequestError, match="'guided_choice' is longer than"):
        constraint("hermes", {"guided_choice": ["x" * MAX_CONSTRAINT_CHARS]})


def test_a_grammar_that_is_too_long_with_tokens_for_tags_has_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    options = msgspec.convert({"messages": QUESTION, "grammar": 'root ::= [a-c]{0,2} "<tool_call>"? "a"'}, ChatBody)
    texts, both = (
        ConstraintReader(GrammarChecker(byte_trial((), 1000)), lambda _: None, tags)
        for tags in ({}, {"<tool_call>": 99})
    )
    long, short = both.read(options), texts.read(options)
    assert long is not None
    assert short is not None
    assert len(short.grammar) < len(long.grammar)
    for limit, expected in ((len(long.grammar), long), (len(long.grammar) - 1, short)):
        monkeypatch.setattr(constraints, "MAX_GRAMMAR_CHARS", limit)
        assert both.read(options) == expected


@pytest.mark.parametrize("family", ["hermes", "qwen3-coder", "gemma4"])
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [("^a\\$", "a$b", "ab"), ("^a\\\\$", "a\\", "a\\b"), ("^a$", "a", "ab"), ("a", "bab", "b"), ("^a", "ab", "ba")],
)
def test_patterns_are_anchored_as_they_say(family: str, pattern: str, good: str, bad: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]}
    body = {"tools": [named("f", schema)], "tool_choice": "required"}
    assert follows(family, body, ToolCall("f", json.dumps({"x": good}), "a1b2c3d4e"))
    assert not follows(family, body, ToolCall("f", json.dumps({"x": bad}), "a1b2c3d4e"))


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "gpt-oss"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [PARAMETERS, {"type": "object", "properties": {"zip": {"type": "integer"}}}]},
        {"$ref": "#/$defs/a", "$defs": {"a": PARAMETERS}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"city": {}, **{f"p{i}": {} for i in range(MAX_OPTIONAL)}}},
    ],
    ids=["anyOf", "$ref", "additionalProperties", "too many to list"],
)
def test_tools_beside_a_strict_one_take_the_names_that_their_schemas_allow(
    family: str, parameters: dict[str, Any]
) -> None:
    body = {"tools": [named("strict", PARAMETERS, strict=True), named("free", parameters)]}
    assert follows(family, body, ToolCall("free", '{"city": "Rome"}', "a1b2c3d4e"))
    assert not follows(family, body, ToolCall("strict", '{"town": "Rome"}', "a1b2c3d4e"))


def test_a_grammar_of_many_nested_repetitions_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="'grammar': nested too deeply") as caught:
        constraint("hermes", {"grammar": 'root ::= "a"' + 30_000 * "*"})
    assert caught.value.param == "grammar"
