"""Outputs that end anywhere: a call is complete or known not to be, and nothing of it is in the text."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions, encoded_tools
from llamaslot.formats.calls import ToolCall
from tests.formats.cut_outputs import ALL, REASONS, Output
from tests.formats.messages import EXCERPTS, TOOLS, fed, made

STEP = 1 if os.environ.get("LLAMASLOT_TESTS") == "long" else 13


@pytest.mark.slow
@pytest.mark.parametrize("output", ALL, ids=lambda output: f"{output.family}: {output.text[:12]!r}")
def test_an_output_can_end_anywhere(output: Output) -> None:
    """By the model itself, at the limit, or at a stop string; where it is cut into pieces makes no difference."""
    first = ALL.index(output) % STEP
    for end in [*range(first, len(output.text), STEP), len(output.text)]:
        for reason in REASONS[: 2 + (end % 9 == 0)]:
            message = output.check(end, reason)
            if end % 9 == 0:
                assert output.parsed(end, reason, by_character=True)[0] == message


ALL_REASONS = pytest.mark.parametrize("reason", REASONS)
PROSE = [
    "The tag is </tool",
    "a </tool_call> b",
    "1 <",
    "x </",
    "{",
    "[",
    "[1, 2",
    "[link",
    "{a",
    '{"answer": "4',
    "a\n{",
    '{"name": "Bob',
    '{"id": "5',
    '{"type": "circle',
    "a [TOOL CALLS",
    "</think",
    "to=me",
    "assistan",
]


@pytest.mark.parametrize("family", EXCERPTS)
@ALL_REASONS
def test_text_that_begins_no_call_stays(family: str, reason: FinishReason) -> None:
    for text in PROSE:
        parser = made(family).parser(ParserOptions(encoded_tools(TOOLS)))
        message = fed(parser, [text], reason)
        assert (message.content, message.calls, parser.output.is_cut) == (text, [], False), text
        plain = made(family).parser(ParserOptions(encoded_tools(TOOLS), parse_tools=False))
        assert fed(plain, [text], reason).content == text


FORCED = [each for each in ALL if each.calls and not each.content]


@pytest.mark.parametrize("output", FORCED, ids=lambda output: f"{output.family}: {output.text[:12]!r}")
def test_a_forced_call_has_no_content_wherever_it_is_cut(output: Output) -> None:
    """Where only calls may come, the beginning of one is no text."""
    options = ParserOptions(encoded_tools(TOOLS), calls_only=True, **output.options)
    for end in range(min(len(output.text), 60)):
        for reason in REASONS:
            assert fed(made(output.family).parser(options), [output.text[:end]], reason).content == ""


def tagged(family: str, *tags: str) -> str:
    """A call without the tags that close its last value, and with `tags` behind that instead."""
    format_ = made(family)
    whole = format_.render([ToolCall("python", json.dumps({"code": "ls -la"}))])
    return whole[: whole.index("ls -la") + len("ls -la")] + "".join(tags)


FUNCTION, TOOL, INVOKE, MINIMAX = "\n</function>", "\n</tool_call>", "\n</invoke>", "\n</minimax:tool_call>"
TAGS: dict[str, list[str]] = {
    "qwen3-coder": [
        FUNCTION + TOOL,
        FUNCTION + TOOL + "\n",
        FUNCTION,
        TOOL,
        "\n</parameter",
        "\n</parame",
        "\n</funct",
        "\n</parameter" + FUNCTION + TOOL,
        FUNCTION + "\n</tool",
        FUNCTION + "\n<function=no_arguments>\n</function>" + TOOL,
    ],
    "glm-4.6": [TOOL, "</tool_call>", "\n</tool_c", "</arg_value", "</arg_val", "</arg_value" + TOOL],
    "minimax-m2": [
        INVOKE + MINIMAX,
        "</invoke>" + MINIMAX,
        MINIMAX,
        INVOKE,
        "</parameter",
        "</param",
        INVOKE + "\n</mini",
    ],
}
TAGS["qwen3.5"], TAGS["glm-4.7"] = TAGS["qwen3-coder"], TAGS["glm-4.6"]


@pytest.mark.parametrize(("family", "tags"), [(family, tags) for family, each in TAGS.items() for tags in each])
def test_a_value_ends_where_its_closing_tag_is_missing_or_cut(family: str, tags: str) -> None:
    text = tagged(family, tags)
    for pieces in ([text], list(text)):
        parser = made(family).parser(ParserOptions(encoded_tools(TOOLS)))
        message = fed(parser, pieces)
        assert (message.content, parser.output.is_cut) == ("", False)
        assert (message.calls[0].name, message.calls[0].arguments) == ("python", '{"code": "ls -la"}')
        # At the limit more of the value might have followed the same tags, so that the call is not complete.
        cut = made(family).parser(ParserOptions(encoded_tools(TOOLS)))
        if not tags.endswith("no_arguments>\n</function>" + TOOL) and not tags.startswith(
            ("\n</parameter\n", "</arg_value\n")
        ):
            assert fed(cut, pieces, "limit").calls[0].arguments.startswith('{"code": "ls -la')
            assert cut.output.is_cut


@pytest.mark.parametrize("family", TAGS)
def test_a_value_ends_before_the_next_parameter_or_call(family: str) -> None:
    format_ = made(family)
    arguments: dict[str, Any] = {"path": "a", "old": "b", "new": "c d"}
    whole = format_.render([ToolCall("edit", json.dumps(arguments)), ToolCall("no_arguments", "{}")])
    close = {"g": "</arg_value>", "q": "\n</parameter>", "m": "</parameter>"}[family[0]]
    for n in range(3):
        parts = whole.split(close)
        text = close.join(parts[: n + 1]) + close.join(["", *parts[n + 1 :]]).removeprefix(close)
        message = fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), list(text))
        found = [(call.name, json.loads(call.arguments)) for call in message.calls]
        assert (message.content, found) == ("", [("edit", arguments), ("no_arguments", {})]), text


CLOSING_TAG = re.compile(r"\n?</[^>]+>")


@pytest.mark.parametrize("family", TAGS)
def test_a_closing_tag_may_be_cut_or_missing_before_other_tags(family: str) -> None:
    """That of a value, of a call, or of the section: neither a value nor the content has anything of it."""
    format_ = made(family)
    arguments = {"path": "a", "old": "b c", "new": "d"}
    whole = format_.render([ToolCall("edit", json.dumps(arguments)), ToolCall("get_weather", '{"city": "e"}')])
    for found in CLOSING_TAG.finditer(whole, whole.index("b c")):
        if found[0] != "</arg_key>":
            tag = found[0].strip()
            for left in ("", *(found[0].removesuffix(tag) + tag[:n] for n in (len(tag) // 2, len(tag) - 1))):
                text = whole[: found.start()] + left + whole[found.end() :]
                for pieces in ([text], list(text)):
                    message = fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), pieces)
                    calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
                    assert calls == [("edit", arguments), ("get_weather", {"city": "e"})], text
                    assert message.content == "", text


@pytest.mark.parametrize("family", EXCERPTS)
def test_what_is_left_of_a_text_that_ends_a_call_is_no_content(family: str) -> None:
    format_ = made(family)
    calls = [ToolCall("python", '{"code": "x"}', f"a1b2c3d4{n}") for n in range(2)]
    rendered = format_.render(calls)
    for marker in format_.markers.left_over:
        for n in range(2, len(marker)):
            text = rendered.replace(marker, marker[:n], 1)
            message = fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), list(text))
            assert (message.content, [call.name for call in message.calls]) == ("", ["python"] * 2), text
            # Text that begins like one is text.
            told = f"{rendered}\n{marker[:n]} is told"
            assert (
                fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), list(told)).content
                == f"{marker[:n]} is told"
            )


@pytest.mark.parametrize("family", ["qwen3-coder", "qwen3.5"])
def test_the_name_of_a_parameter_ends_at_a_line_break(family: str) -> None:
    format_ = made(family)
    arguments = {"path": "a\nb", "new": "c"}
    text = format_.render([ToolCall("edit", json.dumps(arguments))]).replace("<parameter=path>", "<parameter=path")
    message = fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), list(text))
    assert [json.loads(call.arguments) for call in message.calls] == [arguments]


@pytest.mark.parametrize("family", TAGS)
@pytest.mark.parametrize(
    "value",
    [
        "<parameter=x>\n1",
        "a\n<parameter=x>\nb",
        "a\n</function>\n</tool_call>\nb",
        "a\n</tool_call>\n\nb",
        "</invoke>b",
        "a\n</minimax:tool_call> b",
        "a\n<arg_key>x</arg_key>b",
        "a</arg_value>b",
        "a\n</parameter>b",
        "</parameter x",
    ],
)
def test_tags_in_the_middle_of_a_value_belong_to_it(family: str, value: str) -> None:
    format_ = made(family)
    text = format_.render([ToolCall("edit", json.dumps({"old": value, "new": "c"}))])
    for pieces in ([text], list(text)):
        message = fed(format_.parser(ParserOptions(encoded_tools(TOOLS))), pieces)
        assert [json.loads(call.arguments) for call in message.calls] == [{"old": value, "new": "c"}]
