"""Formats with the function's name between control tokens, then arguments in JSON: DeepSeek, Kimi, Mistral."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall, as_json
from llamaslot.formats.format import Format, Layout
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_calls import JsonCalls
from llamaslot.formats.json_value import copy_arguments
from llamaslot.formats.message import CallMarkers, Output, ReasoningTags
from llamaslot.formats.reader import Reader, Steps

_DEEPSEEK_NAME = re.compile(r"[\w.\-:/]+")
_KIMI_ID = re.compile(r"[^\s<]+")
_NAME_IN_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_MISTRAL_NAME = re.compile(r"[^\s\[\]{}\"]+")
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_MISTRAL_ID_PATTERN = "/[a-zA-Z0-9]{9}/"
_ID_LETTERS = string.ascii_letters + string.digits


class DeepSeek(Format):
    """Calls with a separator token; R1 wraps the arguments in a code block.

    V3.1 writes the name, the separator and the arguments. R1 and its distilled models write the word `function`,
    the separator, the name and the arguments in a `` ```json `` block. The parser accepts both, whatever the
    template says.
    """

    name = "deepseek"
    section, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    signs = (section,)
    markers = CallMarkers(calls=(section, opening), left_over=(closing, section_end), inner=(separator,))

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        super().__init__(source, special, reasoning)
        around = {"start": self.section, "end": self.section_end}
        if "```json" in source:
            self._after_name = "\n```json\n"
            opening = f"{self.opening}function{self.separator}"
            self.layout = Layout(opening, f"\n```{self.closing}", "\n", **around)
        else:
            self._after_name = self.separator
            self.layout = Layout(self.opening, self.closing, **around)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        if marker == self.section:
            yield from reader.whitespace()
            yield from reader.accept(self.opening)
        yield from reader.whitespace()
        name = yield from reader.all(_DEEPSEEK_NAME)
        if not name or not (yield from reader.accept(self.separator)):
            return False
        yield from reader.whitespace()
        if not (yield from reader.looking_at("{")):
            name = yield from reader.all(_DEEPSEEK_NAME)
            yield from reader.whitespace()
            yield from reader.accept("```json", "```")
            yield from reader.whitespace()
            if not name or not (yield from reader.looking_at("{")):
                return False
        output.call(name, None)
        yield from copy_arguments(reader, output)
        yield from reader.whitespace()
        yield from reader.accept("```")
        reader.fragment("```")
        yield from reader.whitespace()
        yield from reader.accept(self.closing)
        return True

    def call_text(self, call: ToolCall) -> str:
        return f"{call.name}{self._after_name}{as_json(call.arguments)}"

    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        return writer.sequence(writer.text(tool.name + self._after_name), writer.arguments(tool))


class Kimi(Format):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section.

    Of Kimi K2. `functions.f:0` is the id. The models sometimes omit the section markers or the end marker of a
    call, or start a call without closing their reasoning.
    """

    name = "kimi-k2"
    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    opening, closing = "<|tool_call_begin|>", "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    signs = (section,)
    markers = CallMarkers(
        calls=(section, opening), left_over=(closing,), ignored=(section, section_end), inner=(separator,)
    )
    layout = Layout(opening, closing, start=section, end=section_end)

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        super().__init__(source, special, reasoning or ReasoningTags("<think>", "</think>"))

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        yield from reader.whitespace()
        if marker == self.section:
            if not (yield from reader.accept(self.opening)):
                return False
            yield from reader.whitespace()
        call_id = yield from reader.all(_KIMI_ID)
        yield from reader.whitespace()
        if not call_id or not (yield from reader.accept(self.separator)):
            return False
        yield from reader.whitespace()
        name = _NAME_IN_KIMI_ID.fullmatch(call_id)
        if name is None or not (yield from reader.looking_at("{")):
            return False
        output.call(name[1], call_id)
        yield from copy_arguments(reader, output)
        yield from reader.whitespace()
        yield from reader.accept(self.closing)
        return True

    def render(self, calls: Sequence[ToolCall]) -> str:
        named = []
        for index, call in enumerate(calls):
            prefix = f"functions.{call.name}:"
            # Ids of other servers do not have the model's form.
            has_own_id = call.id is not None and call.id.startswith(prefix)
            named.append(call if has_own_id else replace(call, id=f"{prefix}{index}"))
        return super().render(named)

    def call_text(self, call: ToolCall) -> str:
        return f"{call.id}{self.separator}{as_json(call.arguments)}"

    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        before = writer.text(f"functions.{tool.name}:")
        return writer.sequence(before, "/[0-9]{1,3}/", writer.text(self.separator), writer.arguments(tool))


class Mistral(Format):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}, "id": "..."}]`, or `[TOOL_CALLS]f[ARGS]{...}` for each call.

    Newer models write the second form; Mistral Small 3.2 adds `[CALL_ID]` and the id before `[ARGS]`. The parser
    accepts both forms, whatever the template says, and drops ids that are not nine letters or digits.
    """

    name = "mistral"
    opening, id_opening, separator = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    signs = (opening,)
    markers = CallMarkers(calls=(opening,), inner=(id_opening, separator))

    def __init__(self, source: str, special: Mapping[str, int], reasoning: ReasoningTags | None) -> None:
        super().__init__(source, special, reasoning)
        self._is_named, self._has_id = self.separator in source, self.id_opening in source
        in_list = Layout(separator=", ", start=f"{self.opening}[", end="]")
        self.layout = Layout(self.opening) if self._is_named else in_list

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool], marker: str) -> Steps[bool]:
        yield from reader.whitespace()
        if (yield from reader.looking_at("[", "{")):
            return (yield from JsonCalls(reader, output, ids=_MISTRAL_ID).read_all())
        name = yield from reader.all(_MISTRAL_NAME)
        if not name:
            return False
        call_id = ""
        if (yield from reader.accept(self.id_opening)):
            call_id = yield from reader.all(_MISTRAL_NAME)
        yield from reader.accept(self.separator)
        yield from reader.whitespace()
        if not (yield from reader.looking_at("{")):
            return False
        output.call(name, call_id if _MISTRAL_ID.fullmatch(call_id) else None)
        yield from copy_arguments(reader, output)
        return True

    def call_text(self, call: ToolCall) -> str:
        call_id, arguments = call.id or self.new_id(), as_json(call.arguments)
        if self._is_named:
            return f"{call.name}{self.id_opening + call_id if self._has_id else ''}{self.separator}{arguments}"
        return f'{{"name": "{call.name}", "arguments": {arguments}, "id": "{call_id}"}}'

    def call_expression(self, writer: GrammarWriter, tool: Tool) -> str:
        if self._is_named:
            call_id = writer.sequence(writer.text(self.id_opening), _MISTRAL_ID_PATTERN) if self._has_id else ""
            parts = [writer.text(tool.name), call_id, writer.text(self.separator), writer.arguments(tool)]
        else:
            before = writer.text(f'{{"name": "{tool.name}", "arguments": ')
            after = [writer.text(', "id": "'), _MISTRAL_ID_PATTERN, writer.text('"}')]
            parts = [before, writer.arguments(tool), *after]
        return writer.sequence(*parts)

    def call_id(self, completion_id: str, index: int) -> str:
        """Return an id of nine letters or digits: the templates reject others."""
        digest = hashlib.blake2b(f"{completion_id} {index}".encode(), digest_size=9).digest()
        return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest)
