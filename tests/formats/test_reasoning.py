"""Reasoning: where it is open, where it goes, and what stays in the content."""

from __future__ import annotations

import itertools
import json

import pytest

from llamaslot.base.generation.tools import ParserOptions, encoded_tools
from llamaslot.formats.calls import ToolCall
from tests.formats.messages import EXCERPTS, TOOLS, fed, made, parsed

OPEN = {"reasoning_open": "<think>\n"}


@pytest.mark.parametrize(
    ("text", "options", "content", "reasoning"),
    [
        ("I'm\nthinking\n</think>\n\nHello\n", OPEN, "Hello\n", "I'm\nthinking"),
        ("\n</think>\n\nHello", OPEN, "Hello", ""),
        ("</think>Hello", OPEN, "Hello", ""),
        ("I'm thinking \n", OPEN, "", "I'm thinking"),
        ("<think>\nI'm thinking</think>Hello", OPEN, "Hello", "I'm thinking"),
        ("\n <think>\n\n</think>\n\nHello", {}, "Hello", ""),
        ("</think>\n\nHello", {}, "Hello", ""),
        ("\nHello <think>no</think>", {}, "\nHello <think>no</think>", ""),
        ("a </thin</think>b", OPEN, "b", "a </thin"),
        (" thinking</think>Hello", {"reasoning_open": "<think>\nI'm"}, "Hello", " thinking"),
        ("I'm\nthinking</think>\n\nHello", {**OPEN, "reasoning_format": "deepseek"}, "Hello", "I'm\nthinking"),
        (
            "I'm\nthinking\n</think>\n\nHello",
            {**OPEN, "reasoning_format": "none"},
            "<think>\nI'm\nthinking\n</think>\n\nHello",
            "",
        ),
        ("<think>a</think>\n\nHello", {"reasoning_format": "none"}, "<think>a</think>\n\nHello", ""),
    ],
)
def test_reasoning_is_told_from_content(text: str, options: dict[str, str], content: str, reasoning: str) -> None:
    message = parsed("hermes-thinking", text, **options)
    assert (message.content, message.reasoning, message.calls) == (content, reasoning, [])


def test_without_tags_in_the_template_there_is_no_reasoning() -> None:
    assert parsed("hermes", "<think>a</think>b").content == "<think>a</think>b"


def test_channels_stay_in_the_content_if_reasoning_is_not_wanted() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    message = parsed("gpt-oss", text, reasoning_format="none")
    assert message.content == "<|channel|>analysis<|message|>a<|end|>b"
    text = "<|channel>thought\na<channel|>b"
    assert parsed("gemma4", text, reasoning_format="none").content == text


def test_two_sections_of_reasoning_are_two_lines() -> None:
    text = "<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d"
    message = parsed("gemma4", text)
    assert (message.content, message.reasoning) == ("bd", "a\nc")


@pytest.mark.parametrize(
    ("family", "prompt", "opened"),
    [
        ("hermes-thinking", "<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("hermes-thinking", "<think>\n\n</think>\n\n", ""),
        ("hermes-thinking", "what is <think>?<|im_end|>\n<|im_start|>assistant\n", ""),
        ("hermes", "assistant\n<think>\n", ""),
        ("ministral", "[/INST][THINK]", "[THINK]"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "<|channel>thought\n"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", ""),
        ("gpt-oss", "<|start|>assistant", ""),
        ("gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
    ],
)
def test_open_reasoning_is_found_at_the_end_of_a_prompt(family: str, prompt: str, opened: str) -> None:
    assert made(family).reasoning_open_at(prompt) == opened


@pytest.mark.parametrize("family", [name for name in EXCERPTS if made(name).reasoning])
def test_reasoning_is_streamed(family: str) -> None:
    format_ = made(family)
    assert format_.reasoning is not None
    parser = format_.parser(ParserOptions(reasoning_open=format_.reasoning.start))
    assert "".join(parser.push(char).reasoning for char in " Let me see. ") == "Let me see."


REASONING_FAMILIES = [name for name in EXCERPTS if made(name).reasoning and name != "gpt-oss"]
CALL = ToolCall("get_weather", '{"city": "Paris"}', "a1b2c3d4e")


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("family", REASONING_FAMILIES)
def test_a_call_in_reasoning_that_is_not_closed_is_a_call(family: str, opened: bool) -> None:
    """Otherwise an agent would get neither text nor a call."""
    format_ = made(family)
    assert format_.reasoning is not None
    start, end = format_.reasoning.start, format_.reasoning.end
    options = {"reasoning_open": f"{start}\n"} if opened else {}
    before = "" if opened else f"{start}\n"
    call = format_.render([CALL])
    for text in (f"{before}I do\n{call}", f"{before}I do\n{call}\n{call}"):
        message = parsed(family, text, **options)
        assert (message.content, message.reasoning) == ("", "I do")
        assert {(each.name, json.loads(each.arguments)["city"]) for each in message.calls} == {
            ("get_weather", "Paris")
        }
        assert len(message.calls) == text.count("Paris")
    message = parsed(family, f"{before}\n{call}", **options)
    assert (message.content, message.reasoning, len(message.calls)) == ("", "", 1)
    # Not one that is only considered: the reasoning goes on behind it, and is closed.
    for behind in ("", " would do, too"):
        message = parsed(family, f"{before}I could\n{call}{behind}\n{end}No.", **options)
        assert (message.content, message.calls) == ("No.", [])
        assert message.reasoning == f"I could\n{call}{behind}"
    # Behind the closed reasoning nothing follows: an agent would get neither text nor a call.
    for calls, behind in itertools.product((call, f"{call}\n{call}"), ("", "\n\n")):
        closed = f"{before}I do\n{calls}\n{end}{behind}"
        for pieces in ([closed], list(closed), [closed[:-3], closed[-3:]]):
            parser = format_.parser(ParserOptions(encoded_tools(TOOLS), **options))
            message = fed(parser, pieces)
            assert (message.content, message.reasoning) == ("", "I do")
            assert len(message.calls) == closed.count("Paris")
            assert not parser.output.is_cut
        assert fed(format_.parser(ParserOptions(encoded_tools(TOOLS), **options)), [closed], "limit").calls == []
    message = parsed(family, f"{before}I could\n{call} would do, too\n{end}", **options)
    assert (message.content, message.calls) == ("", [])
    message = parsed(family, f"{before}I could\n{call}\n{end}\n\n{call}", **options)
    assert (message.content, message.reasoning, len(message.calls)) == ("", f"I could\n{call}", 1)
    # Reasoning about calls that have no meaning is streamed, and does not end.
    message = parsed(family, f"{before}I could\n{call[:-20]} or not\n{end}No.", **options)
    assert (message.content, message.calls) == ("No.", [])


@pytest.mark.parametrize("family", REASONING_FAMILIES)
def test_an_end_tag_in_the_arguments_of_a_call_closes_no_reasoning(family: str) -> None:
    format_ = made(family)
    assert format_.reasoning is not None
    start, end = format_.reasoning.start, format_.reasoning.end
    code = {"code": f"a{end}b"}
    call = format_.render([ToolCall("python", json.dumps(code), "a1b2c3d4e")])
    for text in (f"{start}\nI do\n{call}", f"{start}\nI do\n{call}\n{end}", f"{start}\nI do\n{call}\n{call}"):
        for pieces in ([text], list(text)):
            message = fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), pieces)
            assert (message.content, message.reasoning) == ("", "I do")
            assert [json.loads(each.arguments) for each in message.calls] == [code] * text.count("python")


def test_a_channel_without_the_end_of_the_last_begins_a_call() -> None:
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
    for text in (f"<|channel|>analysis<|message|>I do{call}", f"<|channel|>analysis<|message|>I do<|end|>{call}"):
        message = parsed("gpt-oss", text)
        assert (message.content, message.reasoning) == ("", "I do")
        assert [(each.name, each.arguments) for each in message.calls] == [("get_weather", '{"city": "Paris"}')]
