"""Histories of agents in every template: nothing is refused or left out, and what a template takes stays as it is.

The templates are ours and the built-in ones, and those of the folders that `test_shipped_templates.py` names.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from llamaslot.base.errors import InvalidRequestError
from llamaslot.protocol.bodies import ChatBody
from llamaslot.protocol.chat_prompt import ChatReader
from llamaslot.protocol.replies.rendering import n_common_characters
from llamaslot.text.builtin_templates import builtin_names, resolve
from llamaslot.text.message_order import MessageOrder, _one_call_each
from llamaslot.text.template import ChatTemplate
from tests.conftest import LONG
from tests.prompt_threads import SETTINGS
from tests.text.test_shipped_templates import FILES, FURTHER_FILES

SOURCES: dict[str, str] = {
    **{f"builtin {name}": resolve(name) for name in builtin_names()},
    **{file.stem: file.read_text() for file in (*FILES, *FURTHER_FILES)},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"description of {name}",
            "parameters": {"type": "object", "properties": {"value": {"type": "string", "description": "?"}}},
        },
    }
    for name in ("first_function", "second_function")
]
TURNS = """
u us s d a us ud su usu suu uu uau aa au auau uaau suuaauu ua uaa aau sa sd ds sdu sssu usau uaus uasct
uct uctu uctau uctaus uctct uctuau uauctu uauctau uctaa uctuctu uctctctu sct sctct sctau ct ctct cta actu act
uCt uCtu uCtau uC1u uCw uCwau uCtCt uXt uXtau uxt uxtau uctxtu sxct uxtxtxtau suCtCtau uaxtu
ucu sucu ucau uc ut utau uat uatu stu suctsau suctsctau udct uctsct
""".split()  # noqa: SIM905
"""u, s, d, a: messages of user, system, developer, assistant; c, C: one call, two; x, X: the same beside a text;
t: their results; 1: one of them; w: in the other order."""


def history(turns: str, ids: str = "call{:05}") -> tuple[list[dict[str, Any]], list[str]]:
    """Messages, and all texts of them."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    pending: list[str] = []
    roles = {"u": "user", "s": "system", "d": "developer", "a": "assistant"}
    for n, turn in enumerate(turns):
        if turn in roles:
            messages.append({"role": roles[turn], "content": f"text{n}of{roles[turn]}"})
            texts.append(messages[-1]["content"])
        elif turn in "cCxX":
            pending = [ids.format(10 * n + i) for i in range(2 if turn.isupper() else 1)]
            calls = []
            for i, (call_id, tool) in enumerate(zip(pending, TOOLS, strict=False)):
                name, value = tool["function"]["name"], f"argument{n}of{i}"
                arguments = json.dumps({"value": value})
                calls.append(
                    {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
                )
                texts += [name, value]
            content = f"text{n}beside" if turn in "xX" else ""
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            texts.append(content)
        else:
            pending = pending or [ids.format(10 * n)]
            for i, call_id in enumerate(sorted(pending[: 1 if turn == "1" else 2], reverse=turn == "w")):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": f"result{n}of{i}"})
                texts.append(messages[-1]["content"])
            pending = []
    return messages, texts


def reader(source: str) -> ChatReader:
    return ChatReader(ChatTemplate(source, bos_token="<bos>", eos_token="<eos>"), {}, lambda text: (), SETTINGS)


def prompt(chat: ChatReader, messages: list[dict[str, Any]], tools: Any = TOOLS, *, reply: bool = True) -> str:
    body = ChatBody(messages=messages, tools=tools, add_generation_prompt=reply)
    return "".join(part.text for part in chat.render(body))


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param, SOURCES[request.param]


@pytest.fixture(scope="module")
def chat(source: tuple[str, str]) -> ChatReader:
    return reader(source[1])


def cases() -> Iterator[tuple[str, Any, bool]]:
    """Turns, tools, and whether a reply is asked for."""
    turns = [*TURNS, *map("".join, itertools.product(("u", "s", "a", "ct", "Xt"), repeat=4))] if LONG else TURNS
    for n, each in enumerate(turns):
        # The call at the end of a conversation cannot be continued.
        yield each, TOOLS, each[-1] != "c"
        if n % 3 == 0 or LONG:
            yield each, None, each[-1] != "c"


@pytest.mark.slow
def test_nothing_is_refused_or_left_out_and_what_a_template_takes_is_not_changed(
    chat: ChatReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [tool["function"]["description"] for tool in TOOLS]
    for turns, given, reply in cases():
        messages, texts = history(turns)
        described = [text for text in tools if given and text in prompt(chat, history("u")[0])]
        written = prompt(chat, messages, given, reply=reply)
        assert [text for text in (*texts, *described) if text not in written] == [], turns
        try:
            with monkeypatch.context() as patch:
                patch.setattr(ChatTemplate, "_message_order", lambda *_, **__: MessageOrder())
                as_it_is = prompt(chat, messages, given, reply=reply)
        except InvalidRequestError:
            continue
        if all(text in as_it_is for text in (*texts, *described)) and turns != "uc":
            assert written == as_it_is, turns


FOREIGN_IDS = (
    "chatcmpl-tool-0123456789{:05}", "toolu_01A09q90qw90lq917{:05}", "call_{:04}", "fc_{}", "{}",
    "3f2504e0-4f89-41d3-9a0c-{:012}", "functions.first_function:{}",
)  # fmt: skip


def test_ids_of_other_servers_and_missing_ones(chat: ChatReader) -> None:
    for ids, turns in itertools.product(FOREIGN_IDS, ("uctau", "uCwau", "uctXtu", "ctct")):
        messages, texts = history(turns, ids)
        for dropped in ((), ("tool_call_id",), ("tool_call_id", "id")) if ids == FOREIGN_IDS[0] or LONG else ((),):
            for message in messages:
                for each in (message, *message.get("tool_calls", ())):
                    for key in dropped:
                        each.pop(key, None)
            written = prompt(chat, messages)
            assert [text for text in texts if text not in written] == [], (ids, turns, dropped)


def test_mapped_ids_are_the_same_for_call_and_result_and_differ_for_others() -> None:
    source = (
        "{% macro checked(id) %}{% if id|length != 9 %}{{ raise_exception('No id') }}{% endif %}<{{ id }}>"
        "{% endmacro %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}"
        "{{ checked(c.id) }}{% endfor %}{% if m.role == 'tool' %}{{ checked(m.tool_call_id) }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    chat = reader(source)
    messages, _ = history("u" + "ct" * 200, "call_with_a_long_name_{}")
    messages += history("ct", "ninechars")[0]
    found = [part.partition(">")[0] for part in prompt(chat, messages).split("<")[1:]]
    assert found[::2] == found[1::2]
    assert len(set(found)) == 201
    assert found[-1] == "ninechars"
    assert all(each.isalnum() and len(each) == 9 for each in found)


def test_a_growing_conversation_keeps_its_prefix_where_the_template_does(chat: ChatReader) -> None:
    """Each step of a tool loop and each turn adds text only, if it does so with one call a message."""
    for grown, plainer in (("uCtCtCt", "uctctct"), ("uxtxtxt", "uctctct"), ("uctuctuct", "uctauctauct")):
        if _keeps(chat, plainer):
            assert _keeps(chat, grown), grown


def _keeps(chat: ChatReader, turns: str) -> bool:
    """True if prompts before and after each reply share all but the end of a turn."""
    ends = [i + 1 for i, turn in enumerate(turns) if turn == "t"]
    prompts = [prompt(chat, history(turns[:end])[0], reply=False) for end in ends]
    pairs = itertools.pairwise(prompts)
    return all(n_common_characters(earlier, later) > len(earlier) - 100 for earlier, later in pairs)


def called(*values: str, text: str | None = None, thought: str = "") -> dict[str, Any]:
    """A message that calls a function with each of the values, which are also the ids of the calls."""
    calls = [
        {
            "type": "function",
            "id": value,
            "function": {"name": "first_function", "arguments": json.dumps({"value": value})},
        }
        for value in values
    ]
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    return message | ({"reasoning_content": thought} if thought else {})


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def result(of: str, content: Any = None) -> dict[str, Any]:
    return said("tool", f"result of {of}" if content is None else content, tool_call_id=of)


ASKED, THEN = said("user", "first question"), said("user", "second question")
LAST = said("user", "third question")
OLD_RESULT = said("function", "old result", name="first_function")
OLD_CALL = {"name": "first_function", "arguments": '{"value": "VALUE1"}'}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "calls of the older form": [
        ASKED, said("assistant", None, function_call=OLD_CALL), OLD_RESULT, THEN,
    ],
    "the same without content": [
        ASKED, {"role": "assistant", "function_call": OLD_CALL}, OLD_RESULT,
    ],
    "calls in two messages, then their results": [
        ASKED, called("VALUE1"), called("VALUE2"), result("VALUE1"), result("VALUE2"), THEN,
    ],
    "a foreign result before the call's own": [
        ASKED, called("VALUE1"), result("VALUE9"), result("VALUE1"), said("assistant", "reply"), THEN,
    ],
    "a question between results": [
        ASKED, called("VALUE1", "VALUE2"), result("VALUE1"), THEN, result("VALUE2"), LAST,
    ],
    "several results of one call": [
        ASKED, called("VALUE1"), result("VALUE1"), result("VALUE1", "more of it"), THEN,
    ],
    "three calls, results of two": [
        ASKED, called("VALUE1", "VALUE2", "VALUE3"), result("VALUE3"), result("VALUE1"), THEN,
    ],
    "the same id twice": [
        ASKED, called("VALUE1"), result("VALUE1"), called("VALUE1"), result("VALUE1", "other result"), THEN,
    ],
    "empty results": [ASKED, called("VALUE1", "VALUE2"), result("VALUE1", ""), result("VALUE2", []), THEN],
    "results of parts": [
        ASKED, called("VALUE1"), result("VALUE1", [{"type": "text", "text": text} for text in ("one", "two")]),
    ],
    "empty replies": [ASKED, said("assistant", ""), THEN, said("assistant", None), said("user", []), THEN],
    "empty replies in a row": [ASKED, said("assistant", None), said("assistant", ""), said("assistant", []), THEN],
    "text and reasoning beside a call": [
        ASKED, called("VALUE1", text="text beside it", thought="thought"), result("VALUE1"),
    ],
}  # fmt: skip


def test_nothing_is_left_out_of_unusual_histories(chat: ChatReader) -> None:
    for (name, messages), tools in itertools.product(HISTORIES.items(), (TOOLS, None)):
        written = prompt(chat, messages, tools)
        assert [text for text in _strings(messages) if text not in written] == [], name


def _strings(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") or ""
        yield from [content] if isinstance(content, str) else (part["text"] for part in content)
        functions = [call["function"] for call in message.get("tool_calls", [])]
        for function in [*functions, message.get("function_call")]:
            yield from [function["name"], *json.loads(function["arguments"]).values()] if function else []


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _nested(depth: int, key: str) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = _object(inner=schema) if key == "object" else {"type": "array", "items": schema}
    return schema


TREE = _object(child={"$ref": "#/$defs/tree"}, root={"$ref": "#"}, children={"items": {"$ref": "#/$defs/tree"}})
SCHEMAS: dict[str, Any] = {
    "list of types": _object(a={"type": ["string", "null"]}, b={"type": ["null"]}, c={"type": []}),
    "anyOf": _object(a={"anyOf": [{"type": "null"}, {"type": "string"}]}, b={"anyOf": []}),
    "oneOf": _object(a={"oneOf": [{"const": None}, {"$ref": "#/$defs/x"}]}) | {"$defs": {"x": _object(y={})}},
    "allOf": _object(a={"allOf": [_object(b=True), {"required": ["b"]}]}),
    "recursive": {**TREE, "$defs": {"tree": TREE}},
    "self": {"$ref": "#"},
    "broken references": _object(a={"$ref": "#/none"}, b={"$ref": 5}, c={"$ref": "https://json-schema.org"}),
    "no type": _object(a={"description": "?"}, b={}),
    "booleans": _object(a=True, b=False),
    "true": True,
    "empty": {},
    "no properties": {"type": "object"},
    "no type of the root": {"properties": {"a": {"type": "string"}}},
    "choice at the root": {"anyOf": [_object(a={"type": "string"}), _object(b={"type": "string"})]},
    "properties of another type": {"type": "object", "properties": None},
    "list of properties": {"type": "object", "properties": ["a"]},
    "properties of no schema": _object(a=None, b="string", c=[]),
    "required of another type": {**_object(a={"type": "string"}), "required": None},
    "enum": _object(
        a={"enum": ["x"]}, b={"enum": [1, "x", None]}, c={"enum": []}, d={"const": 5}, e={"enum": None}
    ),
    "arrays": _object(a={"type": "array"}, b={"type": "array", "items": {"type": "array"}}, c={"items": True}),
    "tuples": _object(a={"type": "array", "items": [{"type": "string"}]}, b={"prefixItems": [{}]}),
    "other types": _object(a={"type": "null"}, b={"type": "date"}, c={"type": None}, d={"type": 5}),
    "other descriptions": _object(a={"type": "string", "description": None}, b={"description": ["x"]}),
    "maps": _object(a={"type": "object", "additionalProperties": True}, b={"additionalProperties": {}}),
    "names of methods": _object(items={"type": "string"}, keys={"type": "string"}, get={"type": "object"}),
    "deep objects": _nested(190, "object"),
    "deep arrays": _object(a=_nested(190, "array")),
}


def test_tools_whose_schemas_a_template_cannot_print(chat: ChatReader) -> None:
    named = {"name": "function_to_be_found", "description": "description to be found"}
    is_described = "description of first_function" in prompt(chat, history("u")[0])
    for schema_name, schema in SCHEMAS.items():
        tool = {"type": "function", "function": {**named, "parameters": schema}}
        before = json.dumps(tool)
        written = prompt(chat, history("uctau")[0], [tool, *TOOLS])
        assert json.dumps(tool) == before
        if is_described:
            assert [text for text in named.values() if text not in written] == [], schema_name


def test_an_error_blames_the_tools_for_what_the_template_does_with_them() -> None:
    chat = reader(
        "{{ messages }}{% for t in tools or [] %}{% if "
        "'second' in t.function.name %}{{ raise_exception('not this one') }}{% endif %}{{ t }}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match="the tools: not this one") as raised:
        prompt(chat, history("u")[0])
    assert raised.value.param == "tools"


def test_calls_without_ids_are_followed_by_their_results_in_order() -> None:
    """Ollama's have none."""
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    results = [{"role": "tool", "content": text} for text in ("A", "B")]
    divided = [*_one_call_each([{"role": "assistant", "content": "", "tool_calls": calls}, *results])]
    assert [each.get("content") or each["tool_calls"][0]["function"]["name"] for each in divided] == [
        "a",
        "A",
        "b",
        "B",
    ]
