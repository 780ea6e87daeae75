"""The constraint of a chat's reply, made from its tools (forced and strict calls) and structured output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.tools import Tool
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import Thinking
from llamaslot.protocol.structured_output import ConstraintReader, check_length
from llamaslot.protocol.tools import ToolUse
from llamaslot.text.grammars.compiling import GrammarTooLongError
from llamaslot.text.grammars.json_schema import MAX_OPTIONAL, prepared_schema

RAW_GRAMMAR = "grammar"
"""The field whose grammar covers the whole output of the model including reasoning, as in llama-server."""
_CONTENT = "content"
"""Name of the grammar of the content within the grammar of the reply."""

_MAX_BLAME_S = 5.0
"""Most CPU time to search for the invalid tool: compiling each may take as long as a whole grammar."""
_UNDECLARED = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
"""Keywords that may allow arguments which are not in `properties`."""


@dataclass(frozen=True, slots=True)
class ReplyConstraints:
    """Makes constraints of replies in a format."""

    format: Format
    constraints: ConstraintReader

    def constraint(self, own: Constraint | None, use: ToolUse, thinking: Thinking) -> Constraint | None:
        """Return the constraint of a reply; `own` is the request's constraint of the content.

        Raises `InvalidRequestError` if calls must follow a schema that cannot be enforced.
        """
        if own is not None and own.param == RAW_GRAMMAR:
            if use.mode != "none":
                raise InvalidRequestError(f"'{own.param}' cannot be combined with 'tools'", param=own.param)
            return own
        if use.mode == "required":
            tools = self._prepared(use, use.tools)
            return self._made(
                use, tools, lambda: self.format.grammar(tools, parallel=use.parallel, thinking=thinking)
            )
        if own is not None:
            return self._around(own, use, thinking)
        if use.mode == "auto" and use.strict:
            tools = self._by_strictness(use)
            return self._made(
                use, tools, lambda: self.format.reply_grammar(tools, parallel=use.parallel, thinking=thinking)
            )
        return None

    def _around(self, own: Constraint, use: ToolUse, thinking: Thinking) -> Constraint:
        """Return a constraint for reasoning followed by content that matches `own`, or by calls."""
        tools = self._by_strictness(use) if use.mode == "auto" else []
        content, *others = _grammars(own.grammar)

        def grammar() -> str:
            top = self.format.reply_grammar(tools, parallel=use.parallel, thinking=thinking, content=_CONTENT)
            if top == self.format.plain_grammar(_CONTENT):
                return own.grammar
            grammars = [{"lark_grammar": top}, {**content, "name": _CONTENT}, *others]
            return msgspec.json.encode({"grammars": grammars}).decode()

        # `own` has been checked, so an error now is caused by the tools.
        made = self._made(use, tools, grammar, "tools" if tools else own.param)
        return msgspec.structs.replace(made, param=own.param)

    def _made(
        self, use: ToolUse, tools: Sequence[Tool], grammar: Callable[[], str], param: str = "tools"
    ) -> Constraint:
        """Return a grammar of replies with calls as a constraint. An error names the invalid tool."""
        try:
            return self.constraints.check(_written(grammar, param))
        except GrammarTooLongError:
            raise
        except InvalidRequestError:
            self._check_each(use, tools)
            raise

    def _check_each(self, use: ToolUse, tools: Sequence[Tool]) -> None:
        """Raise the error of the first tool whose calls cannot be enforced, if found within `_MAX_BLAME_S`."""
        seconds = 0.0
        for tool in tools:
            if seconds > _MAX_BLAME_S:
                break
            if tool.name in use.strict or use.mode == "required":
                written = _written(partial(self.format.grammar, [tool]), use.places[tool.name])
                seconds += self.constraints.check(written).seconds

    def _by_strictness(self, use: ToolUse) -> list[Tool]:
        """Return the tools with the schemas that calls must follow. Tools that are not strict allow any values."""
        strict = [tool for tool in use.tools if tool.name in use.strict]
        return self._prepared(use, [*strict, *(_loose(tool) for tool in use.tools if tool.name not in use.strict)])

    def _prepared(self, use: ToolUse, tools: Sequence[Tool]) -> list[Tool]:
        """Return tools with schemas that llguidance can follow; raises `InvalidRequestError`.

        Schemas whose grammar would be too long are refused before all of them are prepared.
        """
        prepared = []
        n_chars = 0
        for tool in tools:
            # Arguments must be an object, even if the schema also allows null.
            where, parameters = use.places[tool.name], {**tool.parameters, "type": "object"}
            schema = prepared_schema(parameters, where, limits_digits=not self.format.limits_digits)
            prepared.append(Tool(tool.name, schema))
            n_chars += len(msgspec.json.encode(schema))
            check_length(n_chars, "tools")
        return prepared


def _written(grammar: Callable[[], str], param: str) -> Constraint:
    """Return a grammar as a constraint; raises `InvalidRequestError` for schemas that cannot be enforced."""
    try:
        return Constraint(grammar(), param)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"'{param}': {str(error) or 'nested too deeply'}", param=param) from error


def _loose(tool: Tool) -> Tool:
    """Return a tool whose arguments may have any values, and only declared names unless others may be allowed."""
    properties = tool.parameters.get("properties")
    names = properties if isinstance(properties, dict) else {}
    is_open = tool.parameters.get("additionalProperties") or any(key in tool.parameters for key in _UNDECLARED)
    if is_open or len(names) > MAX_OPTIONAL:
        return Tool(tool.name, {"type": "object", "additionalProperties": True})
    return Tool(tool.name, {"type": "object", "properties": {name: {} for name in names}})


def _grammars(grammar: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar in llguidance's JSON form. A grammar that is not JSON is in Lark's form."""
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = msgspec.json.decode(grammar)["grammars"]
    return parts
