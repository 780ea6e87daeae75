"""Outputs with reasoning, text and calls, cut after any character, and what a client may get of them."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llamaslot.base.events import FinishReason
from llamaslot.base.generation.tools import ParserOptions, encoded_tools
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.families.harmony import ANALYSIS, CHANNEL, END, MESSAGE, START
from tests.formats.messages import EXCERPTS, TOOLS, Message, fed, made

CALLS = [
    ToolCall("edit", json.dumps({"path": "a </b", "old": 'x\n"</tool_call>" < {y}', "all": True}), "a1b2c3d4e"),
    ToolCall("todo", json.dumps({"items": [{"a": "x y"}, {}], "options": {"b": [1.5, 20]}}), "a1b2c3d4f"),
    ToolCall("get_weather", json.dumps({"city": "Paris", "days": 31}), "a1b2c3d4g"),
]
REASONING, CONTENT = "I do: 1 < 2.", "Let me see: [1, 2] < {3}."
REASONS: tuple[FinishReason, ...] = ("eos", "limit", "word")


@dataclass(frozen=True)
class Output:
    """A whole output and what is in it."""

    family: str
    text: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    starts: tuple[tuple[int, str], ...] = ()
    """Where reasoning and calls begin, each with its first marker: its beginning alone may be text."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def call_start(self) -> int:
        """Where the first call's first marker has ended; the length of the text if there is none."""
        start, marker = self.starts[-1]
        return start + max(len(marker), 2) if self.calls else len(self.text)

    def parsed(self, end: int, reason: FinishReason, *, by_character: bool = False) -> tuple[Message, bool]:
        """The message of the text up to `end`, and whether it ended inside a call."""
        parser = made(self.family).parser(ParserOptions(encoded_tools(TOOLS), **self.options))
        text = self.text[:end]
        return fed(parser, list(text) if by_character else [text], reason), parser.output.is_cut

    def check(self, end: int, reason: FinishReason) -> Message:
        """Check all that must hold of the message of the text up to `end`; return it."""
        message, is_cut = self.parsed(end, reason)
        told = f"{self.text[:end]!r}, {reason}: {message}"
        assert self.reasoning.startswith(message.reasoning), told
        assert f"{self.content}\n".startswith(message.content) or self._is_text(end, reason, message.content), told
        n = len(message.calls)
        assert [call.name for call in message.calls] == [call.name for call in self.calls[:n]], told
        whole = [_object(call.arguments) for call in message.calls]
        truth = [json.loads(call.arguments) for call in self.calls]
        assert whole[:-1] == truth[: n - 1] if n else True, told
        last_is_whole = not n or whole[-1] is not None
        if n and last_is_whole:
            # Tags that close a call end a value of which no other end comes.
            ends_in_tag = self.text[:end].rstrip().endswith("</tool_call>")
            is_right = is_closing if reason != "limit" else operator.eq
            assert is_right(whole[-1], truth[n - 1]) or ends_in_tag, told
        assert is_cut or last_is_whole, told
        start, marker = self.starts[-1]
        if end == len(self.text):
            assert n == len(self.calls), told
        if end in (len(self.text), 0) or end < start:
            assert not is_cut, told
        elif end >= self.call_start and (reason == "limit" or self.text[start:end].rstrip() != marker):
            assert n or is_cut, told
        return message

    def _is_text(self, end: int, reason: FinishReason, content: str) -> bool:
        """True if the content ends with the beginning of a first marker where that may be meant as text."""
        for start, marker in self.starts:
            begun = self.text[start:end]
            is_text = len(begun.strip()) < 2 if reason == "limit" else f"{marker}\n".startswith(begun)
            if start < end and is_text:
                earlier = self.text[:start].removeprefix(self.text[: self.text.find(self.content)])
                return content == begun or content == earlier + begun
        return False


def _object(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return None
    assert isinstance(value, dict)
    return value


def is_closing(value: Any, truth: Any) -> bool:
    """True if a value is the beginning of another, of which nothing but closing brackets was added."""
    if isinstance(value, dict) and isinstance(truth, dict):
        pairs = list(zip(value.items(), truth.items(), strict=False))
        return (
            len(pairs) == len(value)
            and all(name == other for (name, _), (other, _) in pairs)
            and all(one == other for (_, one), (_, other) in pairs[:-1])
            and (not pairs or is_closing(pairs[-1][0][1], pairs[-1][1][1]))
        )
    if isinstance(value, list) and isinstance(truth, list):
        n = len(value)
        return not n or (value[:-1] == truth[: n - 1] and n <= len(truth) and is_closing(value[-1], truth[n - 1]))
    return type(value) is type(truth) and value == truth


def outputs(family: str) -> Iterator[Output]:
    """A family's outputs: all kinds of parts, calls alone, and a call in reasoning that is never closed."""
    format_ = made(family)
    calls = tuple(CALLS[:1] if family == "gpt-oss" else CALLS)
    rendered = format_.render(calls)
    if family == "gpt-oss":
        rendered = rendered.removesuffix("<|call|>")
        thought = f"{ANALYSIS}{REASONING}{END}{START}assistant"
        said = f"{CHANNEL}commentary{MESSAGE}{CONTENT}{END}{START}assistant"
        ended = _at(thought + said.partition(END)[0], "<")
        yield Output(
            family,
            thought + said + rendered,
            REASONING,
            CONTENT,
            calls,
            ((0, CHANNEL), ended, _at(thought + said, " to=")),
        )
        yield Output(family, rendered, calls=calls, starts=(_at("", " to="),))
        opened = f"{ANALYSIS}{REASONING}"
        rest = f"{CHANNEL}commentary to=functions.edit{MESSAGE}{calls[0].arguments}"
        yield Output(
            family, opened + rest, REASONING, "", calls, ((0, CHANNEL), _at(opened, f"{CHANNEL}commentary to="))
        )
        return
    markers = (*format_.markers.calls, *format_.markers.ignored, *format_.markers.lines)
    marker = max((each for each in markers if rendered.startswith(each)), key=len)
    said = f"{CONTENT}\n"
    if format_.reasoning is not None:
        tags = format_.reasoning
        opened = f"{tags.start}\n{REASONING}\n"
        thought = f"{opened}{tags.end}\n\n"
        starts = ((0, tags.start), _at(thought + said, marker))
        yield Output(family, thought + said + rendered, REASONING, CONTENT, calls, starts)
        yield Output(family, opened + rendered, REASONING, "", calls, ((0, tags.start), _at(opened, marker)))
        yield Output(
            family,
            f"{REASONING}\n{rendered}",
            REASONING,
            "",
            calls,
            (_at(f"{REASONING}\n", marker),),
            {"reasoning_open": f"{tags.start}\n"},
        )
    else:
        yield Output(family, said + rendered, "", CONTENT, calls, (_at(said, marker),))
    yield Output(family, rendered, calls=calls, starts=(_at("", marker),))


def _at(before: str, marker: str) -> tuple[int, str]:
    return len(before), marker


ALL = [each for family in EXCERPTS for each in outputs(family)]
