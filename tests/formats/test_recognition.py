"""Which format a chat template belongs to, and which control tokens it needs to see."""

from __future__ import annotations

import pytest

from llamaslot.formats.recognition import FORMATS, format_of
from tests.formats.messages import EXCERPTS, made

NAMES = {
    "hermes": "hermes",
    "hermes-thinking": "hermes",
    "qwen3-coder": "qwen3-coder",
    "qwen3.5": "qwen3-coder",
    "glm-4.6": "glm4",
    "glm-4.7": "glm4",
    "minimax-m2": "minimax-m2",
    "llama3": "llama3",
    "llama-pythonic": "llama-pythonic",
    "mistral-nemo": "mistral",
    "mistral-small": "mistral",
    "ministral": "mistral",
    "deepseek-r1": "deepseek",
    "deepseek-v3.1": "deepseek",
    "granite-3": "granite",
    "granite-4": "granite",
    "gemma4": "gemma4",
    "function-gemma": "function-gemma",
    "lfm2": "lfm2",
    "lfm2.5": "lfm2",
    "gpt-oss": "gpt-oss",
    "kimi-k2": "kimi-k2",
    "generic": "generic",
    "generic-thinking": "generic",
}


@pytest.mark.parametrize("family", EXCERPTS)
def test_a_template_is_recognised_by_its_marks(family: str) -> None:
    assert made(family).name == NAMES[family]


def test_every_format_is_found_and_has_a_name_of_its_own() -> None:
    assert {made(family).name for family in EXCERPTS} == {each.name for each in FORMATS}
    assert len({each.name for each in FORMATS}) == len(FORMATS)


def test_smollm3_is_known_by_its_name_since_some_templates_mention_no_calls() -> None:
    format_ = format_of("You are a helpful AI assistant named SmolLM, <think> Thought section </think>", {})
    assert format_.name == "hermes"
    assert format_.reasoning is not None


def test_reasoning_tags_are_found_without_tools() -> None:
    format_ = format_of("{{ message.content.split('</seed:think>') }}", {})
    assert format_.reasoning is not None
    assert (format_.reasoning.start, format_.name) == ("<seed:think>", "generic")


@pytest.mark.parametrize(
    ("family", "texts"),
    [
        ("hermes-thinking", {"<tool_call>", "</tool_call>", "<think>", "</think>"}),
        ("mistral-small", {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}),
        ("gpt-oss", {"<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"}),
        ("gemma4", {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'}),
        ("kimi-k2", {"<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<think>"}),
        ("lfm2", {"<|tool_call_start|>", "<|tool_call_end|>"}),
        ("deepseek-v3.1", {"<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"}),
        ("llama3", {"<|python_tag|>"}),
    ],
)
def test_control_tokens_that_a_parser_needs_are_preserved(family: str, texts: set[str]) -> None:
    assert texts <= set(made(family).preserved)
