"""Tool calls of Gemma 4 and FunctionGemma, whose arguments are not JSON."""

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
    """`<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`: unquoted names, and a control token as string quote.

    Reasoning is a channel called `thought`. The models also write needless channel markers; the parser drops them.
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
        """Return True if the template mentions the marker and `call:`."""
        return cls.opening in source and _KEYWORD in source

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        channel = ("<|channel>", "<channel|>", "<|turn>") if self.reasoning else ()
        return (self.opening, self.closing, self.quote, *channel)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""

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
        """Return a grammar expression for one or more calls.

        Raises `ValueError` for schema keywords that cannot be enforced, because the notation is not JSON.
        """
        functions = [
            writer.rule(writer.sequence(writer.text(tool.name), Notation(writer, tool, self.quote).arguments()))
            for tool in tools
        ]
        opening, closing = writer.text(self.opening + _KEYWORD), writer.text(self.closing)
        call = writer.rule(writer.sequence(opening, writer.choice(functions), closing))
        return writer.repeated(call, "", parallel=parallel)


class FunctionGemma(Gemma):
    """The same with `<start_function_call>`, `<end_function_call>` and `<escape>`, and without reasoning."""

    name = "function-gemma"
    opening, closing, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    markers = CallMarkers(calls=(opening,), left_over=(closing,))
