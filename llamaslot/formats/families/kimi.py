"""Tool calls of Kimi K2, whose ids consist of the function's name and a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.fields import as_json
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_value import copy_arguments
from llamaslot.formats.message import CallMarkers, ReadCalls, ReasoningTags
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps

SECTION_OPEN, SECTION_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_OPEN, CALL_CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"[^\s<]+")
_NAME_IN_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Kimi(Format):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section.

    `functions.f:0` is the id. The models sometimes omit the section markers or the end marker of a call, or start a
    call without closing their reasoning.
    """

    name = "kimi-k2"
    markers = CallMarkers(
        calls=(SECTION_OPEN, CALL_OPEN), left_over=(CALL_CLOSE,), ignored=(SECTION_OPEN, SECTION_CLOSE)
    )

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        super().__init__(source, special, reasoning or ReasoningTags("<think>", "</think>"))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template mentions the section marker."""
        return SECTION_OPEN in source

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        return (*super().preserved, ARGUMENTS)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""

        def read(marker: str) -> Steps[bool]:
            yield from reader.whitespace()
            if marker == SECTION_OPEN:
                if not (yield from reader.accept(CALL_OPEN)):
                    return False
                yield from reader.whitespace()
            call_id = yield from reader.all(_ID)
            yield from reader.whitespace()
            if not call_id or not (yield from reader.accept(ARGUMENTS)):
                return False
            yield from reader.whitespace()
            name = _NAME_IN_ID.fullmatch(call_id)
            if name is None or not (yield from reader.looking_at("{")):
                return False
            output.call(name[1], call_id)
            yield from copy_arguments(reader, output)
            yield from reader.whitespace()
            yield from reader.accept(CALL_CLOSE)
            return True

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        rendered = [
            f"{CALL_OPEN}{_id_of(call, index)}{ARGUMENTS}{as_json(call.arguments)}{CALL_CLOSE}"
            for index, call in enumerate(calls)
        ]
        return f"{SECTION_OPEN}{''.join(rendered)}{SECTION_CLOSE}"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        functions = [
            writer.rule(
                writer.sequence(
                    writer.text(f"functions.{tool.name}:"),
                    "/[0-9]{1,3}/",
                    writer.text(ARGUMENTS),
                    writer.arguments(tool),
                )
            )
            for tool in tools
        ]
        call = writer.rule(
            writer.sequence(writer.text(CALL_OPEN), writer.choice(functions), writer.text(CALL_CLOSE))
        )
        calls = writer.repeated(call, "", parallel=parallel)
        return writer.sequence(writer.text(SECTION_OPEN), calls, writer.text(SECTION_CLOSE))


def _id_of(call: ToolCall, index: int) -> str:
    """Return the call's id if it has the model's form, otherwise a new id of that form."""
    expected = f"functions.{call.name}:"
    return call.id if call.id is not None and call.id.startswith(expected) else f"{expected}{index}"
