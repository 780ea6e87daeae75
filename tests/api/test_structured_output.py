"""Structured output over HTTP: the fields that ask for it, their errors, and that streams equal whole replies."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from llamaslot.base.commands import Constraint
from llamaslot.text.grammars.compiling import MAX_CONSTRAINT_CHARS, LocalTrial, TrialResult
from tests.fake_backend import FakeBackend, FakeVocab

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["alpha beta", "alpha gamma"]}},
    "required": ["name", "kind"],
}
BODY = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello", "max_tokens": 300, "temperature": 0}


def text_of(reply: Any) -> str:
    if "content" in reply:
        return str(reply["content"])
    choice = reply["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def streamed(events: list[Any]) -> str:
    """The text of all chunks."""
    found = ""
    for event in events:
        if event == "[DONE]":
            continue
        if "choices" in event:
            for choice in event["choices"]:
                found += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        else:
            found += event["content"]
    return found


FIELDS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_object"}, "json_schema": SCHEMA},
    {"response_format": {"type": "text"}, "json_schema": SCHEMA},
    {"json_schema": SCHEMA},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize("fields", FIELDS, ids=json.dumps)
async def test_replies_follow_the_schema(server: Any, path: str, fields: dict[str, Any]) -> None:
    reply = await server.ok(path, BODY | fields)
    answer = json.loads(text_of(reply))
    assert set(answer) == {"name", "kind"}
    assert answer["kind"] in ("alpha beta", "alpha gamma")
    if "disable_any_whitespace" in str(fields):
        assert text_of(reply) == json.dumps(answer, separators=(",", ":"), ensure_ascii=False)
    if path == NATIVE:
        assert reply["stop_type"] == "eos"
        assert "json_schema" in reply["generation_settings"]["grammar"]
    else:
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == len(text_of(reply)) + 1


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize("fields", [{}, {"stop": ["alp"]}, {"max_tokens": 20}, {"temperature": 1.5, "seed": 3}])
async def test_streams_equal_whole_replies(server: Any, path: str, fields: dict[str, Any]) -> None:
    body = BODY | {"json_schema": SCHEMA} | fields
    whole = await server.ok(path, body)
    events = await server.stream(path, body)
    assert streamed(events) == text_of(whole)
    if path == NATIVE:
        for name in ("tokens_predicted", "stop_type", "stopping_word"):
            assert events[-1][name] == whole[name]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_each_choice_follows_the_schema(server: Any, path: str) -> None:
    reply = await server.ok(path, BODY | {"json_schema": SCHEMA, "n": 3, "temperature": 1.5, "seed": 1})
    texts = [each["message"]["content"] if path == CHAT else each["text"] for each in reply["choices"]]
    assert len(texts) == 3
    assert len({json.loads(text)["name"] for text in texts}) > 1


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"grammar": 'root ::= "a"{5,5}'}, "a{5}"),
        ({"grammar": r'root ::= "\u00e9" [0-9]{2}'}, r"é\d\d"),
        ({"grammar": '%llguidance {}\nstart: /[ab]{3}/ "!"'}, "[ab]{3}!"),
        ({"guided_grammar": 'start: "x" | "y"'}, "x|y"),
        ({"guided_regex": "[0-9]{3}-[a-z]+!"}, r"\d{3}-[a-z]+!"),
        ({"guided_regex": "^(yes|no)$"}, "yes|no"),
        ({"guided_choice": ['"a" / b', "cé\n"]}, '"a" / b|cé\n'),
        ({"structured_outputs": {"regex": "[ab]{2}"}}, "[ab]{2}"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"grammar": 'root ::= "red"'}}, "red"),
        ({"json_schema": {"const": "42"}}, '"42"'),
        (
            {"response_format": {"type": "json_object", "schema": {"items": [{"type": "null"}], "maxItems": 1}}},
            ".*",
        ),
    ],
    ids=str,
)
async def test_grammars_and_regular_expressions_are_followed(
    server: Any, fields: dict[str, Any], pattern: str
) -> None:
    reply = await server.ok(CHAT, BODY | fields)
    assert re.fullmatch(pattern, text_of(reply), re.DOTALL)


@pytest.mark.parametrize("fields", [{"json_schema": {}}, {"response_format": {"type": "json_object"}}])
async def test_without_a_schema_the_reply_is_an_object(server: Any, fields: dict[str, Any]) -> None:
    assert text_of(await server.ok(CHAT, BODY | fields)).startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"json_schema": {"not": {}}}, "json_schema", "'not' is not supported"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "response_format.json_schema.schema",
            "'uniqueItems'",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"strict": False, "schema": {"if": {}, "then": {"required": ["a"]}}},
                }
            },
            "response_format.json_schema.schema",
            "'if'",
        ),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema", "schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": 123}}}, "response_format.schema", "type"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}},
            "response_format.schema",
            "hiccup",
        ),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"grammar": "root ::= this is (not valid GBNF"}, "grammar", "line 1"),
        ({"grammar": "root ::= <no-such-token>"}, "grammar", "'<no-such-token>' is not one token"),
        ({"grammar": "root ::= <[258]>"}, "grammar", "258"),
        ({"grammar": "root ::= root"}, "grammar", "no text can match"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, "grammar", "'not'"),
        ({"guided_regex": "a(b"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
        ({"grammar": "x" * (MAX_CONSTRAINT_CHARS + 1)}, "grammar", "longer than"),
        ({"json_schema": {"enum": ["x" * MAX_CONSTRAINT_CHARS]}}, "json_schema", "longer than"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar", "exclude each other"),
        ({"json_schema": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "exclude each other",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
        ({"guided_choice": "a"}, "guided_choice", ""),
        ({"grammar": 5}, "grammar", ""),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema", ""),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_is_wrong_is_refused_by_field(
    server: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    for path in (CHAT, NATIVE):
        status, reply = await server.post(path, BODY | fields)
        assert status == 400, reply
        assert reply["error"]["type"] == "invalid_request_error"
        assert reply["error"]["param"] == param
        assert words in reply["error"]["message"]


async def test_a_control_token_can_be_named(start: Any) -> None:
    server = await start(backend=FakeBackend(n_ctx=512))
    reply = await server.ok(NATIVE, BODY | {"grammar": 'root ::= "a" <[256]> "b" <[99]>', "return_tokens": True})
    assert reply["tokens"][:4] == [97, 256, 98, 99]


@pytest.mark.parametrize("path", [CHAT, NATIVE])
async def test_a_tag_in_a_grammar_is_generated_as_its_token(start: Any, path: str) -> None:
    server = await start(backend=FakeBackend(n_ctx=512, vocab=FakeVocab(tags=["<tool_call>"])))
    reply = await server.ok(path, BODY | {"grammar": 'root ::= "a<tool_call>b"', "return_tokens": True})
    assert text_of(reply) == "a<tool_call>b"
    if path == NATIVE:
        assert reply["tokens"][:3] == [97, 258, 98]
    else:
        assert reply["usage"]["completion_tokens"] == 4


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is waited for where a grammar with the text "expensive" is tried."""
    gate, call = threading.Event(), LocalTrial.__call__

    def gated(self: LocalTrial, constraint: Constraint) -> TrialResult:
        assert "expensive" not in constraint.grammar or gate.wait(30)
        return call(self, constraint)

    monkeypatch.setattr(LocalTrial, "__call__", gated)
    return gate


async def test_a_grammar_that_takes_long_to_check_delays_no_request_without_one(
    server: Any, gate: threading.Event
) -> None:
    expensive = asyncio.create_task(server.ok(CHAT, BODY | {"grammar": 'root ::= "expensive"'}))
    async with asyncio.timeout(10):
        await server.ok(CHAT, BODY | {"max_tokens": 3})
        await server.ok(NATIVE, BODY | {"max_tokens": 3})
    assert not expensive.done()
    gate.set()
    assert text_of(await expensive) == "expensive"


async def test_a_grammar_is_not_checked_for_a_client_that_has_gone(server: Any, gate: threading.Event) -> None:
    def ask(text: str) -> asyncio.Task[Any]:
        return asyncio.create_task(server.ok(NATIVE, BODY | {"grammar": f'root ::= "{text}"'}))

    def n_jobs() -> int:
        return len(server.local.prompts.lanes.jobs)

    busy = ask("expensive")
    while n_jobs() < 1:
        await asyncio.sleep(0.01)
    gone, waiting = ask("gone"), ask("waiting")
    while n_jobs() < 3:
        await asyncio.sleep(0.01)
    gone.cancel()
    while n_jobs() > 2:
        await asyncio.sleep(0.01)
    gate.set()
    assert [text_of(reply) for reply in await asyncio.gather(busy, waiting)] == ["expensive", "waiting"]


async def test_a_request_whose_own_grammar_has_to_be_checked_counts_once(start: Any) -> None:
    server = await start(engine={"grammars": [f'root ::= "{i}"' for i in range(5)]})
    for i in (0, 3):
        assert text_of(await server.ok(CHAT, BODY)) == str(i)
        if i == 0:
            for path in (CHAT, NATIVE):
                assert text_of(await server.ok(path, BODY | {"guided_regex": f"own {path}"})) == f"own {path}"
    assert text_of(await server.ok(NATIVE, BODY)) == "4"
