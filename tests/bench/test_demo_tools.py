"""The demo model's dialogues with tools: as the chat template renders them, and nothing examined that is taught."""

from __future__ import annotations

import json
import random
import re

import pytest

from bench.demo.chat_template import CHAT_TEMPLATE
from bench.demo.checker import is_grammatical, sentences
from bench.demo.corpus import chatml, held_out
from bench.demo.evaluate import DEFAULT_MODEL, dialogue_sets
from bench.demo.tool_grammar import TOOLS
from bench.demo.tool_talk import (
    CALL_OPEN,
    ToolWriter,
    held_out_calls,
    held_out_without_call,
    openai_form,
    tool_talk,
)
from bench.demo.values import is_held_out
from bench.demo.writer import MARK_CLOSE, MARK_OPEN, Message, TalkWriter, plain
from llamaslot.formats.recognition import format_of
from llamaslot.text.template import ChatTemplate

PLAIN_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def template(source: str = CHAT_TEMPLATE) -> ChatTemplate:
    return ChatTemplate(source, bos_token="", eos_token="<|im_end|>")


def rendered(source: ChatTemplate, messages: list[Message]) -> str:
    chat, tools = openai_form(messages)
    return "".join(part.text for part in source.render(chat, tools=tools))


def test_the_template_renders_what_the_model_is_taught() -> None:
    source = template()
    rng = random.Random(5)
    talks = [tool_talk(rng, 2000) for _ in range(40)]
    talks += [dialogue.answering().messages for dialogue in held_out_calls(40, 3)]
    n_calls = 0
    for talk in talks:
        # A conversation that ends in a reply is to be continued; all of these end in a question or result.
        cut = max(index for index, message in enumerate(talk) if message["role"] == "user") + 1
        messages: list[Message] = [{"role": m["role"], "content": plain(m["content"])} for m in talk[:cut]]
        assert rendered(source, messages) == chatml(messages)
        n_calls += sum(message["content"].startswith(CALL_OPEN) for message in messages)
    assert n_calls > 200


def test_without_tools_the_template_is_plain_chatml() -> None:
    source, before = template(), template(PLAIN_CHATML)
    for dialogue in held_out(40, 4):
        assert source.render(dialogue.messages) == before.render(dialogue.messages)
        assert source.render(dialogue.messages, add_generation_prompt=False) == before.render(
            dialogue.messages, add_generation_prompt=False
        )


def test_the_template_has_tools_calls_and_results_and_is_of_the_hermes_family() -> None:
    source = template()
    assert source.takes_tools
    assert source.takes_calls
    assert format_of(CHAT_TEMPLATE, {}).name == "hermes"


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ({}, "{}"),
        ({"type": "object", "properties": {"a": {"enum": [1]}}}, '{"a": "any"}'),
        ({"properties": {"a": {"type": ["string", "null"]}, "b": {"type": "object"}}},
         '{"a": ["string", "null"], "b": "object"}'),
    ],
)  # fmt: skip
def test_schemas_of_any_kind_are_rendered(parameters: dict[str, object], line: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    (part,) = template().render([{"role": "user", "content": "?"}], tools=[tool])
    expected = f'<tools>\n{{"name": "f", "arguments": {line}}}\n</tools><|im_end|>\n'
    assert part.text.startswith(f"<|im_start|>system\n{expected}<|im_start|>user\n?")


def test_results_of_several_calls_are_one_message() -> None:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": f"call{i}", "type": "function", "function": function} for i in range(2)]
    results = [{"role": "tool", "tool_call_id": f"call{i}", "content": f"result {i}"} for i in range(2)]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Well.", "tool_calls": calls}]
    (part,) = template().render([*messages, *results])
    call = '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert f"<|im_start|>assistant\nWell.{call}{call}<|im_end|>\n" in part.text
    responses = "".join(f"\n<tool_response>\nresult {i}\n</tool_response>" for i in range(2))
    assert f"<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n" in part.text


def test_the_checker_knows_every_reply_that_the_assistant_is_taught_with_tools() -> None:
    rng = random.Random(7)
    said = [
        plain(message["content"])
        for _ in range(150)
        for message in tool_talk(rng, 3000)
        if message["role"] == "assistant"
    ]
    assert len(said) > 1500
    assert not [sentence for text in said for sentence in sentences(text) if not is_grammatical(sentence)]


@pytest.mark.parametrize(
    "sentence",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": "b}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": [1, 2]}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": "b"}}',
        '{"name": "add", "arguments": {"a": "b"}}',
        '<tool_call>\n{"name": "add_note", "arguments": {"a": "b"}}\n</tool_call>',
        "The weather in is.",
    ],
)
def test_the_checker_refuses_broken_calls(sentence: str) -> None:
    assert not is_grammatical(sentence)


def test_a_seed_repeats_a_conversation_with_tools() -> None:
    assert tool_talk(random.Random(3), 3000) == tool_talk(random.Random(3), 3000)
    assert list(held_out_calls(5, 1)) == list(held_out_calls(5, 1))
    assert list(held_out_without_call(5, 1)) == list(held_out_without_call(5, 1))


@pytest.mark.parametrize("examined", [False, True])
def test_no_arguments_of_a_tool_are_both_taught_and_examined(examined: bool) -> None:
    seen = set()
    for seed in range(200):
        tools = ToolWriter(TalkWriter(random.Random(seed), held_out=examined), 3)
        for tool in tools.tools:
            tools.call(tool)
            call = json.loads(plain(tools.writer.messages[-3]["content"]).split("\n")[1])
            assert call["name"] == tool.name
            values: list[object] = []
            for value in call["arguments"].values():
                values += value if isinstance(value, list) else [value]
            assert is_held_out(f"tool {tool.name}", "|".join(map(str, values))) == examined
            seen.add(tool)
    assert seen == set(TOOLS)


def test_the_model_card_has_a_row_for_each_set_of_dialogues() -> None:
    card = (DEFAULT_MODEL.parent / "MODEL_CARD.md").read_text()
    table = card.partition("| dialogues |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|(]+?)(?: \(\d+\))? \|", table, re.MULTILINE)
    assert rows == [*(name for name, _ in dialogue_sets(5, 1, len)), "chatter"]


def test_what_has_to_be_copied_stands_in_the_conversation_before() -> None:
    """Marked names and strings of calls, and results in answers, are in earlier messages."""
    rng = random.Random(11)
    for _ in range(60):
        talk = tool_talk(rng, 2000)
        for index, message in enumerate(talk):
            text = message["content"]
            marks = text.count(MARK_OPEN)
            assert marks == text.count(MARK_CLOSE)
            assert not marks or message["role"] == "assistant"
            before = "\n".join(plain(m["content"]).lower() for m in talk[:index])
            for part in text.split(MARK_OPEN)[1:]:
                assert part.partition(MARK_CLOSE)[0].strip().lower() in before
