"""Calls of Gemma 4 and FunctionGemma, in a notation of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.families.gemma_notation import Notation, rendered
from llamaslot.formats.fields import fields_of
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_value import copy_arguments
from llamaslot.formats.message import CallMarkers, ReadCalls, ReasoningTags
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps

_NAME = re.compile(r"[^\s{}<]+")
_KEYWORD = "call:"


class Gemma(Format):
    """`<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`: names have no quotes, strings quotes of their own.

    Reasoning is a channel called `thought`. The models open and close channels without need, which is left out.
    """

    name = "gemma4"
    limits_digits = True
    opening, closing, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = CallMarkers(calls=(opening,), left_over=(closing,), ignored=("<|channel>", "<|turn>model\n"))

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        tags = ReasoningTags("<|channel>thought", "<channel|>", anywhere=True)
        super().__init__(source, special, tags if "<|channel>" in source else reasoning)

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template mentions the marker and the word before the name."""
        return cls.opening in source and _KEYWORD in source

    @property
    def preserved(self) -> tuple[str, ...]:
        """Texts of control tokens that the parser needs in the output."""
        channel = ("<|channel>", "<channel|>", "<|turn>") if self.reasoning else ()
        return (self.opening, self.closing, self.quote, *channel)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the computation that reads calls."""

        def read(_: str) -> Steps[bool]:
            yield from reader.whitespace()
            if not (yield from reader.accept(_KEYWORD)):
                return False
            name = yield from reader.all(_NAME)
            if not name or not (yield from reader.looking_at("{")):
                return False
            output.call(name, None)
            quotes = (self.quote, '"')
            yield from copy_arguments(reader, output, quotes=quotes, escapes=False)
            yield from reader.whitespace()
            yield from reader.accept(self.closing)
            return True

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return "".join(
            f"{self.opening}{_KEYWORD}{call.name}{rendered(fields_of(call.arguments), self.quote)}{self.closing}"
            for call in calls
        )

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar's expression for at least one call.

        The notation is no JSON. Raises `ValueError` for keywords of a schema that it cannot enforce.
        """
        functions = [
            writer.rule(writer.sequence(writer.text(tool.name), Notation(writer, tool, self.quote).arguments()))
            for tool in tools
        ]
        opening, closing = writer.text(self.opening + _KEYWORD), writer.text(self.closing)
        call = writer.rule(writer.sequence(opening, writer.choice(functions), closing))
        return writer.repeated(call, "", parallel=parallel)


class FunctionGemma(Gemma):
    """The same with `<start_function_call>`, `<end_function_call>` and `<escape>`; it does not reason."""

    name = "function-gemma"
    opening, closing, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    markers = CallMarkers(calls=(opening,), left_over=(closing,))
