"""Reasoning: where it is open, where it goes, and what stays in the content."""

from __future__ import annotations

import pytest

from llamaslot.base.generation.tools import ParserOptions
from tests.formats.messages import EXCERPTS, made, parsed

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
