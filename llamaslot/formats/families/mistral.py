"""Tool calls of old and new Mistral models, whose ids are nine letters or digits."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping, Sequence

from llamaslot.base.generation.tools import Tool
from llamaslot.formats.calls import ToolCall
from llamaslot.formats.fields import as_json
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import GrammarWriter
from llamaslot.formats.json_calls import JsonCalls
from llamaslot.formats.json_value import copy_arguments
from llamaslot.formats.message import CallMarkers, ReadCalls
from llamaslot.formats.output import Output
from llamaslot.formats.reader import Reader, Steps

OPEN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_LETTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[^\s\[\]{}\"]+")
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ID_PATTERN = "/[a-zA-Z0-9]{9}/"


class Mistral(Format):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}, "id": "..."}]`, or `[TOOL_CALLS]f[ARGS]{...}` for each call.

    Newer models write the second form; Mistral Small 3.2 adds `[CALL_ID]` and the id before `[ARGS]`. The parser
    accepts both forms, whatever the template says, and drops ids that are not nine letters or digits.
    """

    name = "mistral"
    markers = CallMarkers(calls=(OPEN,))

    @classmethod
    def recognises(cls, source: str) -> bool:
        """Return True if the template mentions the marker."""
        return OPEN in source

    @property
    def preserved(self) -> tuple[str, ...]:
        """Control tokens whose text must stay in the output for the parser."""
        return (*super().preserved, ID, ARGUMENTS)

    def read_calls(self, reader: Reader, output: Output, tools: Mapping[str, Tool]) -> ReadCalls:
        """Return the function that reads the calls a marker begins."""
        objects = JsonCalls(reader, output, ids=_ID)

        def read(_: str) -> Steps[bool]:
            yield from reader.whitespace()
            if (yield from reader.looking_at("[", "{")):
                return (yield from objects.read_all())
            name = yield from reader.all(_NAME)
            if not name:
                return False
            call_id = ""
            if (yield from reader.accept(ID)):
                call_id = yield from reader.all(_NAME)
            yield from reader.accept(ARGUMENTS)
            yield from reader.whitespace()
            if not (yield from reader.looking_at("{")):
                return False
            output.call(name, call_id if _ID.fullmatch(call_id) else None)
            yield from copy_arguments(reader, output)
            return True

        return read

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        if self._named:
            return "".join(
                f"{OPEN}{call.name}{ID + (call.id or self.new_id()) if self._with_id else ''}"
                f"{ARGUMENTS}{as_json(call.arguments)}"
                for call in calls
            )
        objects = [
            f'{{"name": "{call.name}", "arguments": {as_json(call.arguments)}, "id": "{call.id or self.new_id()}"}}'
            for call in calls
        ]
        return f"{OPEN}[{', '.join(objects)}]"

    def calls_expression(self, writer: GrammarWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return a grammar expression for one or more calls."""
        if not self._named:
            objects = [
                writer.rule(
                    writer.sequence(
                        writer.text(f'{{"name": "{tool.name}", "arguments": '),
                        writer.arguments(tool),
                        writer.text(', "id": "'),
                        _ID_PATTERN,
                        writer.text('"}'),
                    )
                )
                for tool in tools
            ]
            calls = writer.repeated(writer.rule(writer.choice(objects)), writer.text(", "), parallel=parallel)
            return writer.sequence(writer.text(f"{OPEN}["), calls, writer.text("]"))
        call_id = writer.sequence(writer.text(ID), _ID_PATTERN) if self._with_id else ""
        functions = [
            writer.rule(
                writer.sequence(writer.text(tool.name), call_id, writer.text(ARGUMENTS), writer.arguments(tool))
            )
            for tool in tools
        ]
        call = writer.rule(writer.sequence(writer.text(OPEN), writer.choice(functions)))
        return writer.repeated(call, "", parallel=parallel)

    def call_id(self, completion_id: str, index: int) -> str:
        """Return an id of nine letters or digits: the templates reject others."""
        digest = hashlib.blake2b(f"{completion_id} {index}".encode(), digest_size=9).digest()
        return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest)

    @property
    def _named(self) -> bool:
        return ARGUMENTS in self.source

    @property
    def _with_id(self) -> bool:
        return ID in self.source
