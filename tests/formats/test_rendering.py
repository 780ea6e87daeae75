"""Calls as models write them: for templates that leave calls out, and forced by grammars."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.base.generation.tools import ParserOptions, Tool, encoded_tools
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import Thinking
from llamaslot.formats.recognition import format_of
from tests.formats.messages import CODE, EXCERPTS, TOOLS, fed, made

CALLS = [
    ToolCall("get_weather", '{"city":"Zürich",   "days": 3}', "a1b2c3d4e"),
    ToolCall("python", json.dumps({"code": CODE}), "a1b2c3d4f"),
    ToolCall("todo", '{"items": [{"a": "x"}, {}], "options": {"b": [1.5, true, null]}}', "a1b2c3d4g"),
    ToolCall("edit", '{"path": "", "new": "\\n", "all": false}', "a1b2c3d4h"),
    ToolCall("set", '{"value": null, "either": 5, "any": "text"}', "a1b2c3d4i"),
    ToolCall("no_arguments", "{}", "a1b2c3d4j"),
]
ONE_AT_A_TIME = ("llama3", "gpt-oss")
NESTED = Tool(
    "nested",
    {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}},
            "mode": {"enum": ["a b", "c/d"]},
            "short": {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[a-z/]+$"},
        },
        "required": ["points", "mode"],
    },
)


def values(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("family", EXCERPTS)
def test_rendered_calls_are_parsed_as_the_same_calls(family: str) -> None:
    format_ = made(family)
    for calls in ([each] for each in CALLS) if family in ONE_AT_A_TIME else (*([each] for each in CALLS), CALLS):
        message = fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), [format_.render(calls)])
        assert (message.content, message.reasoning, values(message.calls)) == ("", "", values(calls))


@pytest.mark.parametrize("family", [name for name in EXCERPTS if name != "function-gemma"])
@given(text=st.text("ab \"'\\\n{}[]<>/:=,é🙂", max_size=20), number=st.integers(), flag=st.booleans())
def test_any_argument_survives(family: str, text: str, number: int, flag: bool) -> None:
    arguments = {"path": text, "all": flag}
    calls = [ToolCall("edit", json.dumps(arguments)), ToolCall("get_weather", json.dumps({"days": number}))]
    format_ = made(family)
    for call in calls:
        message = fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), [format_.render([call])])
        assert values(message.calls) == values([call])


def test_ids_are_random_and_in_the_form_of_the_family() -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", made("mistral-nemo").new_id())
    assert re.fullmatch("call_[a-zA-Z0-9]{24}", made("hermes").new_id())
    assert made("hermes").new_id() != made("hermes").new_id()
    assert made("kimi-k2").render([ToolCall("f", "{}")]).count("functions.f:0") == 1


def test_arguments_that_are_no_json_are_rendered_as_they_are() -> None:
    assert '"arguments": {"a": ' in made("hermes").render([ToolCall("f", '{"a": ')])


def test_what_gemmas_notation_cannot_enforce_is_refused_by_name() -> None:
    tool = Tool("f", {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}})
    with pytest.raises(ValueError, match="'minimum'"):
        made("gemma4").grammar([tool])


class Bytes:
    """A tokenizer of single bytes and control tokens."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        self.ids = {text: 257 + i for i, text in enumerate(special)}
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>"] + [text.encode() for text in special]
        self.special_token_ids = [256, *self.ids.values()]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def tokenized(self, text: str) -> list[int]:
        """The ids of a text, control tokens parsed."""
        parts = re.split("(" + ("|".join(map(re.escape, self.ids)) or "(?!)") + ")", text)
        return [i for part in parts for i in ([self.ids[part]] if part in self.ids else part.encode())]


class Matcher:
    """llguidance on a tokenizer of bytes."""

    def __init__(self, source: str, control_tokens: bool) -> None:
        self.llguidance = pytest.importorskip("llguidance")
        self.tokens = Bytes(sorted(set(format_of(source, {}).preserved)) if control_tokens else [])
        self.tokenizer = self.llguidance.LLTokenizer(self.llguidance.TokenizerWrapper(self.tokens))
        self.format: Format = format_of(source, self.tokens.ids)
        self._compiled: dict[str, Any] = {}
        """The matcher of each grammar at its start, which takes longer to make than a text to match."""

    def accepts(self, grammar: str, text: str) -> bool:
        if grammar not in self._compiled:
            self._compiled[grammar] = self.llguidance.LLMatcher(self.tokenizer, grammar)
        matcher = self._compiled[grammar].deep_copy()
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokens.tokenized(text)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("control_tokens", [True, False], ids=["control tokens", "plain text"])
@pytest.mark.parametrize("family", EXCERPTS)
def test_grammars_accept_what_models_write_and_nothing_else(family: str, control_tokens: bool) -> None:
    matcher = Matcher(EXCERPTS[family], control_tokens)
    format_ = matcher.format
    tools = [*TOOLS, NESTED]
    calls = [
        ToolCall("get_weather", '{"city": "Zürich \\"x\\"", "days": 3}', "a1b2c3d4e"),
        ToolCall("no_arguments", "{}", "a1b2c3d4f"),
        ToolCall("nested", '{"points": [{"x": 1.5}], "mode": "c/d", "short": "a/b"}', "a1b2c3d4g"),
    ]
    wrong = [
        ToolCall("get_weather", '{"days": 3}', "a1b2c3d4e"),
        ToolCall("nested", '{"points": [{}], "mode": "a b"}', "a1b2c3d4f"),
        ToolCall("nested", '{"points": [], "mode": "e"}', "a1b2c3d4g"),
        ToolCall("unknown", "{}", "a1b2c3d4h"),
        ToolCall("no_arguments", '{"city": "Paris"}', "a1b2c3d4i"),
    ]

    def rendered(*calls: ToolCall) -> str:
        return format_.render(calls).removesuffix("<|call|>")

    assert all(matcher.accepts(format_.grammar(tools), rendered(call)) for call in calls)
    assert not any(matcher.accepts(format_.grammar(tools), rendered(call)) for call in wrong)
    assert not matcher.accepts(format_.grammar(tools), "Hello")
    assert not matcher.accepts(format_.grammar(tools), "")
    one = format_.grammar([NESTED], parallel=False)
    assert [matcher.accepts(one, rendered(call)) for call in calls] == [False, False, True]
    several = rendered(*calls)
    assert matcher.accepts(format_.grammar(tools), several) == (family not in ONE_AT_A_TIME)
    assert not matcher.accepts(format_.grammar(tools, parallel=False), several)


@pytest.mark.parametrize("control_tokens", [True, False], ids=["control tokens", "plain text"])
@pytest.mark.parametrize("family", EXCERPTS)
def test_grammars_of_replies_allow_text_and_correct_calls(family: str, control_tokens: bool) -> None:
    matcher = Matcher(EXCERPTS[family], control_tokens)
    format_ = matcher.format
    before = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    call = format_.render([ToolCall("get_weather", '{"city": "Paris"}', "a1b2c3d4e")]).removesuffix("<|call|>")
    wrong = format_.render([ToolCall("get_weather", '{"days": 3}', "a1b2c3d4e")]).removesuffix("<|call|>")
    grammar = format_.reply_grammar(TOOLS, parallel=False, thinking="none")
    for text in ("", "Hello, world", "a < b, <tool, [x] and {y}\n"):
        assert matcher.accepts(grammar, before + text)
        if not format_.calls_stand_alone:
            assert matcher.accepts(grammar, text + call)
            assert not matcher.accepts(grammar, text + wrong)
            assert not matcher.accepts(grammar, text + call + call)
    assert matcher.accepts(grammar, call)
    assert not matcher.accepts(grammar, wrong)


@pytest.mark.parametrize("control_tokens", [True, False], ids=["control tokens", "plain text"])
@pytest.mark.parametrize("family", EXCERPTS)
def test_grammars_of_replies_allow_content_of_another_grammar_or_calls(family: str, control_tokens: bool) -> None:
    matcher = Matcher(EXCERPTS[family], control_tokens)
    format_ = matcher.format
    before = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    call = format_.render([ToolCall("get_weather", '{"city": "Paris"}', "a1b2c3d4e")]).removesuffix("<|call|>")
    schema = {"properties": {"answer": {"type": "integer"}}, "required": ["answer"]}

    def grammar(tools: list[Tool]) -> str:
        top = format_.reply_grammar(tools, parallel=False, thinking="none", content="body")
        return json.dumps({"grammars": [{"lark_grammar": top}, {"name": "body", "json_schema": schema}]})

    for tools in ([], TOOLS):
        assert matcher.accepts(grammar(tools), before + '{"answer": 3}')
        assert not matcher.accepts(grammar(tools), before + '{"answer": "3"}')
        assert not matcher.accepts(grammar(tools), before + "Hello")
        assert matcher.accepts(grammar(tools), call) == (bool(tools) and not format_.calls_are_json)


@pytest.mark.parametrize("control_tokens", [True, False], ids=["control tokens", "plain text"])
@pytest.mark.parametrize("family", [name for name in EXCERPTS if made(name).reasoning])
def test_grammars_let_the_model_reason_first(family: str, control_tokens: bool) -> None:
    matcher = Matcher(EXCERPTS[family], control_tokens)
    format_ = matcher.format
    assert format_.reasoning is not None
    call = format_.render([ToolCall("no_arguments", "{}", "a1b2c3d4f")]).removesuffix("<|call|>")
    ended = "Hm {\n" + format_.reasoning.end + ("<|start|>assistant" if family == "gpt-oss" else "") + call

    def accepted(thinking: Thinking) -> list[bool]:
        grammar = format_.grammar(TOOLS, thinking=thinking)
        return [matcher.accepts(grammar, text) for text in (call, ended, format_.reasoning.start + ended)]

    assert accepted("none") == [True, False, False]
    assert accepted("optional") == [True, False, True]
    assert accepted("open")[:2] == [False, True]
