"""The constraint of a chat's reply, made from its tools (forced and strict calls) and its structured output."""

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
"""The field whose grammar matches all that the model generates, as in llama-server, reasoning included."""
_CONTENT = "content"
"""Name of the grammar of the content beside that of the reply around it."""

_MAX_BLAME_S = 5.0
"""CPU time to look for the tool that is wrong: each may take as long to compile as a grammar may."""
_UNDECLARED = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
"""Keywords that may allow names of arguments which `properties` does not have."""


@dataclass(frozen=True, slots=True)
class ReplyConstraints:
    """Makes the constraints of replies in a format."""

    format: Format
    constraints: ConstraintReader

    def constraint(self, own: Constraint | None, use: ToolUse, thinking: Thinking) -> Constraint | None:
        """Return what a reply must match; `own` is what the request says of its content.

        Raises `InvalidRequestError` for tools whose schemas cannot be followed but must be.
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
        """Return a constraint for reasoning, and then content of a form of its own, or calls."""
        tools = self._by_strictness(use) if use.mode == "auto" else []
        content, *others = _grammars(own.grammar)

        def grammar() -> str:
            top = self.format.reply_grammar(tools, parallel=use.parallel, thinking=thinking, content=_CONTENT)
            if top == self.format.plain_grammar(_CONTENT):
                return own.grammar
            grammars = [{"lark_grammar": top}, {**content, "name": _CONTENT}, *others]
            return msgspec.json.encode({"grammars": grammars}).decode()

        # `own` was checked: what is wrong now is in the tools.
        made = self._made(use, tools, grammar, "tools" if tools else own.param)
        return msgspec.structs.replace(made, param=own.param)

    def _made(
        self, use: ToolUse, tools: Sequence[Tool], grammar: Callable[[], str], param: str = "tools"
    ) -> Constraint:
        """Return a grammar of replies with calls as a constraint; an error names the tool that is wrong."""
        try:
            return self.constraints.check(_written(grammar, param))
        except GrammarTooLongError:
            raise
        except InvalidRequestError:
            self._check_each(use, tools)
            raise

    def _check_each(self, use: ToolUse, tools: Sequence[Tool]) -> None:
        """Raise the error of the first tool of which no calls can be forced, if it is found soon."""
        seconds = 0.0
        for tool in tools:
            if seconds > _MAX_BLAME_S:
                break
            if tool.name in use.strict or use.mode == "required":
                written = _written(partial(self.format.grammar, [tool]), use.places[tool.name])
                seconds += self.constraints.check(written).seconds

    def _by_strictness(self, use: ToolUse) -> list[Tool]:
        """Return the tools with the schemas that calls must follow; those that are not strict allow any value."""
        strict = [tool for tool in use.tools if tool.name in use.strict]
        return self._prepared(use, [*strict, *(_loose(tool) for tool in use.tools if tool.name not in use.strict)])

    def _prepared(self, use: ToolUse, tools: Sequence[Tool]) -> list[Tool]:
        """Return tools with the schemas that llguidance follows; raises `InvalidRequestError`.

        Also for schemas of which the grammar will be too long, before all of them are prepared.
        """
        prepared = []
        n_chars = 0
        for tool in tools:
            # Also where the schema allows null besides.
            where, parameters = use.places[tool.name], {**tool.parameters, "type": "object"}
            schema = prepared_schema(parameters, where, limits_digits=not self.format.limits_digits)
            prepared.append(Tool(tool.name, schema))
            n_chars += len(msgspec.json.encode(schema))
            check_length(n_chars, "tools")
        return prepared


def _written(grammar: Callable[[], str], param: str) -> Constraint:
    """Return the grammar of replies with calls; raises `InvalidRequestError` for schemas that it cannot follow."""
    try:
        return Constraint(grammar(), param)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"'{param}': {str(error) or 'nested too deeply'}", param=param) from error


def _loose(tool: Tool) -> Tool:
    """Return a tool whose arguments have the declared names, or any where others may be allowed, and any value."""
    properties = tool.parameters.get("properties")
    names = properties if isinstance(properties, dict) else {}
    is_open = tool.parameters.get("additionalProperties") or any(key in tool.parameters for key in _UNDECLARED)
    if is_open or len(names) > MAX_OPTIONAL:
        return Tool(tool.name, {"type": "object", "additionalProperties": True})
    return Tool(tool.name, {"type": "object", "properties": {name: {} for name in names}})


def _grammars(grammar: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar in llguidance's JSON form; one that is text is in Lark's."""
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = msgspec.json.decode(grammar)["grammars"]
    return parts
