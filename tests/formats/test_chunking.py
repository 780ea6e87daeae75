"""Parsing does not depend on how the output is cut into pieces, never fails, and takes linear time."""

from __future__ import annotations

import json
import sys
import tracemalloc
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaslot.base.generation.tools import ParserOptions, encoded_tools
from llamaslot.formats.calls import ToolCall
from tests.formats.messages import EXCERPTS, TOOLS, Case, fed, made
from tests.formats.test_outputs import CASES

BY_FAMILY = {family: [case for case in CASES if case.family == family] for family in EXCERPTS}


@st.composite
def damaged_cases(draw: st.DrawFn, family: str) -> tuple[Case, str]:
    """An output of a family's model from which a part is left out or repeated, or two of them."""
    case = draw(st.sampled_from(BY_FAMILY[family]))
    text = case.text
    damage = draw(st.sampled_from(["none", "cut", "drop", "repeat", "another"]))
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    match damage:
        case "cut":
            text = text[:start]
        case "drop":
            text = text[:start] + text[end:]
        case "repeat":
            text = text[:end] + text[start:]
        case "another":
            text = text[:end] + draw(st.sampled_from(BY_FAMILY[family])).text
    return case, text


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("family", EXCERPTS)
@given(data=st.data(), cuts=st.lists(st.integers(0, 1000), max_size=12), none=st.booleans())
def test_the_pieces_make_no_difference(family: str, data: st.DataObject, cuts: list[int], none: bool) -> None:
    case, text = data.draw(damaged_cases(family))
    options = {**case.options, **({"reasoning_format": "none"} if none else {})}
    tools = options.pop("tools", TOOLS)
    format_ = made(family)

    whole = fed(format_.parser(ParserOptions(encoded_tools(tools), **options)), [text])

    assert fed(format_.parser(ParserOptions(encoded_tools(tools), **options)), cut(text, cuts)) == whole
    assert fed(format_.parser(ParserOptions(encoded_tools(tools), **options)), list(text)) == whole


@pytest.mark.parametrize("family", EXCERPTS)
@given(text=st.text("<>{}[]()|/=\"'\\: \n,a1tool_cal｜▁<", max_size=60))
@example(text='{"name": "python", "arguments": {"a": [{"b": (\\u12')
def test_arguments_of_a_call_that_ends_are_an_object(family: str, text: str) -> None:
    """Whatever is in it: the call of each family, with its arguments replaced by noise."""
    format_ = made(family)
    rendered = format_.render([ToolCall("python", '{"code": "NOISE"}', "abcdefgh1")])
    for noise in (rendered.replace("NOISE", text), rendered.replace('"NOISE"', text)):
        message = fed(
            format_.parser(ParserOptions(encoded_tools(TOOLS))), [noise, " \n", rendered.replace("NOISE", "x")]
        )
        for call in message.calls[:-1]:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("family", EXCERPTS)
def test_a_marker_is_held_back_no_longer_than_needed(family: str) -> None:
    """Text is sent as soon as it cannot be the beginning of a marker."""
    parser = made(family).parser(ParserOptions(encoded_tools(TOOLS)))
    sent = "".join(parser.push(char).content for char in "So it is. ")
    assert sent == "So it is."


@pytest.mark.slow
@pytest.mark.parametrize("family", EXCERPTS)
def test_work_is_linear_in_the_length_of_the_output(family: str) -> None:
    """Near-markers, unfinished calls, deep nesting and whitespace, in pieces: twice the text, twice the work."""
    call = made(family).render([ToolCall("python", '{"code": "x"}', "abcdefgh1")])
    inside, half = call[: call.find("x")], call[: len(call) // 2]
    reasoning = made(family).reasoning
    opened = reasoning.start if reasoning is not None else ""
    parts = (call[:-1], half, call[: call.find("python") + 3], "\n{", "[[", " ")
    tags = ("\n</function>\n", "\n</invoke>\n</parameter>", "\n<parameter=code>\n", "\n</tool_call>\n\n")
    cases = [(start, part) for part in parts for start in ("", inside)]
    for start, part in [*cases, *((inside, tag) for tag in tags), (opened, call), (opened, half)]:
        n = 800 // len(part)
        assert n_calls(family, start + 2 * n * part) < 2.2 * n_calls(family, start + n * part) + 500


@pytest.mark.parametrize("family", EXCERPTS)
def test_text_that_was_passed_on_is_not_kept(family: str) -> None:
    call = made(family).render([ToolCall("python", '{"code": "x"}', "abcdefgh1")])
    for start in ("", call[: call.find("x")]):
        parser = made(family).parser(ParserOptions(encoded_tools(TOOLS)))
        parser.push(start)
        tracemalloc.start()
        for _ in range(300):
            parser.push("some text " * 100)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 50_000


def n_calls(family: str, text: str) -> int:
    """Count the calls of Python functions while a text is parsed in pieces of four characters."""
    parser = made(family).parser(ParserOptions(encoded_tools(TOOLS)))
    n = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal n
        n += event == "call"

    sys.setprofile(count)
    try:
        fed(parser, [text[at : at + 4] for at in range(0, len(text), 4)])
    finally:
        sys.setprofile(None)
    return n
