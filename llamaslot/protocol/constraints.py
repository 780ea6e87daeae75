"""Constraints: the grammar that a reply must match, from structured output and from forced and strict calls.

`read_tools` reads the tools of a chat, and which of them its reply may or must call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import msgspec
from llguidance import LLMatcher

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError
from llamaslot.base.generation.tools import Tool
from llamaslot.base.json_schemas import without_reference
from llamaslot.formats.format import Format
from llamaslot.formats.grammar import Thinking
from llamaslot.protocol.bodies import ChatBody, Options
from llamaslot.text.conversation import clean_tool, refuse_field
from llamaslot.text.grammars.compiling import MAX_CONSTRAINT_CHARS, GrammarChecker, GrammarTooLongError, too_long
from llamaslot.text.grammars.gbnf import TokenOf, gbnf_to_lark, is_lark
from llamaslot.text.grammars.json_schema import MAX_OPTIONAL, json_schema_constraint, prepared_schema

MAX_GRAMMAR_CHARS = 2**19
"""Most characters of a grammar made from a request.

Calls of 200 tools with five parameters take 140,000 to 280,000 characters, depending on the format. The engine's
cache of compiled grammars holds one grammar of this length.
"""
RAW_GRAMMAR = "grammar"
"""The field whose grammar covers the whole output of the model including reasoning, as in llama-server."""
_CONTENT = "content"
"""Name of the grammar of the content within the grammar of the reply."""
_MAX_BLAME_S = 5.0
"""Most CPU time to search for the invalid tool: compiling each may take as long as a whole grammar."""
Mode: TypeAlias = Literal["none", "auto", "required"]
_MODES: Mapping[str, Mode] = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
"""Values of `tool_choice`. `any` is Mistral's, which some clients send."""
_UNDECLARED = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
"""Keywords that may allow arguments which are not in `properties`."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools, and their use in a reply.

    The prompt describes all tools whatever `mode` is, so that requests with another `tool_choice` share its prefix.
    """

    definitions: tuple[dict[str, Any], ...] = ()
    """Tools in the form that chat templates read."""
    tools: tuple[Tool, ...] = ()
    """Tools that may be called."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Field of the request that has the schema of each tool, by the tool's name."""
    strict: frozenset[str] = frozenset()
    """Names of tools whose arguments must follow their schema."""
    mode: Mode = "none"
    parallel: bool = True
    """True if a reply may have several calls."""


def read_tools(body: ChatBody) -> ToolUse:
    """Return the tools of a request; raises `InvalidRequestError`."""
    raw = body.tools or []
    definitions = tuple(clean_tool(tool, index) for index, tool in enumerate(raw))
    functions = [definition["function"] for definition in definitions]
    places: dict[str, str] = {}
    for index, function in enumerate(functions):
        where = places.setdefault(function["name"], f"tools[{index}].function.parameters")
        if not isinstance(function["parameters"], dict):
            refuse_field(where, "must be a JSON schema, an object")
    known = {function["name"] for function in functions}
    choice = body.tool_choice
    mode, names = _choice(choice, known)
    is_named = isinstance(choice, dict) and choice.get("type") != "allowed_tools"
    return ToolUse(
        definitions,
        tuple(
            Tool(function["name"], without_reference(function["parameters"]))
            for function in functions
            if names is None or function["name"] in names
        ),
        places,
        frozenset(each["function"]["name"] for each in raw if each["function"].get("strict") is True),
        mode if definitions else "none",
        parallel=body.parallel_tool_calls is not False and not is_named,
    )


def _choice(choice: Any, known: set[str]) -> tuple[Mode, set[str] | None]:
    """Return the mode of a `tool_choice`, and the names of the tools that it allows (None for all)."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in _MODES:
            refuse_field("tool_choice", f"must be one of {', '.join(_MODES)}")
        if _MODES[choice] == "required" and not known:
            refuse_field("tool_choice", "needs 'tools'")
        return _MODES[choice], None
    if not isinstance(choice, dict):
        refuse_field("tool_choice", "must be a text or an object")
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        named = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        mode = _MODES.get(named) if isinstance(named, str) else None
        if not isinstance(listed, list) or not listed or mode is None:
            message = "'tool_choice.allowed_tools' must have a 'mode' and a list of 'tools'"
            raise InvalidRequestError(message, param="tool_choice")
        return mode, {_name(each, known) for each in listed}
    return "required", {_name(choice, known)}


def _name(choice: Any, known: set[str]) -> str:
    """Return the name in `{"type": "function", "function": {"name": ...}}`, or in `{"type": ..., "name": ...}`."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        refuse_field("tool_choice", "must name a function")
    if name not in known:
        refuse_field("tool_choice", f": '{name}' is not among the 'tools'")
    return name


class ConstraintReader:
    """Reads and checks constraints. Usable on any thread.

    Without `may_compile`, methods raise `UnknownGrammarError` for a grammar that has not been checked before.
    """

    def __init__(
        self,
        checker: GrammarChecker,
        token_of: TokenOf,
        tags: Mapping[str, int] = MappingProxyType({}),
        *,
        may_compile: bool = True,
    ) -> None:
        self._checker = checker
        self._token_of = token_of
        self._tags = tags
        self._may_compile = may_compile

    def read(self, options: Options) -> Constraint | None:
        """Return the constraint that a request asks for; raises `InvalidRequestError` if it is not supported."""
        asked = _asked(options)
        if len(asked) > 1:
            names = " and ".join(f"'{param}'" for param, _, _ in asked)
            raise InvalidRequestError(f"{names} exclude each other", param=asked[1][0])
        if not asked:
            return None
        ((param, kind, value),) = asked
        whitespace = options.structured_outputs is not None and options.structured_outputs.disable_any_whitespace
        return self.check(self._constraint(param, kind, value, compact=bool(whitespace)))

    def grammar(self, name: str, text: str) -> Constraint:
        """Return the constraint of a grammar in GBNF or Lark; `name` names it in `InvalidRequestError`s."""
        return self.check(self._constraint(name, "grammar", text, compact=False))

    def check(self, constraint: Constraint) -> Constraint:
        """Return a constraint with its cost.

        Raises `InvalidRequestError` for a grammar that is too long, too expensive, invalid or not supported.
        """
        _check_length(len(constraint.grammar), constraint.param)
        return self._checker.check(constraint, may_compile=self._may_compile)

    def for_reply(
        self, format_: Format, own: Constraint | None, use: ToolUse, thinking: Thinking
    ) -> Constraint | None:
        """Return the constraint of a chat's reply; `own` is the request's constraint of the content.

        Raises `InvalidRequestError`, which names the tool, if calls must follow a schema that cannot be enforced.
        """
        if own is not None and own.param == RAW_GRAMMAR:
            if use.mode != "none":
                refuse_field(own.param, "cannot be combined with 'tools'")
            return own
        options: Any = {"parallel": use.parallel, "thinking": thinking}
        if use.mode == "required":
            own, tools = None, _prepared(format_, use, use.tools)
            grammar = partial(format_.grammar, tools, **options)
        elif own is None and not (use.mode == "auto" and use.strict):
            return None
        else:
            # Tools that are not strict allow any values.
            strict = [tool for tool in use.tools if tool.name in use.strict]
            loose = [_loose(tool) for tool in use.tools if tool.name not in use.strict]
            tools = _prepared(format_, use, [*strict, *loose]) if use.mode == "auto" else []
            grammar = partial(_reply_grammar, format_, tools, own, options)
        try:
            # `own` has been checked, so an error now is caused by the tools.
            made = self.check(_written(grammar, "tools" if own is None or tools else own.param))
        except GrammarTooLongError:
            raise
        except InvalidRequestError:
            self._check_each(format_, use, tools)
            raise
        return made if own is None else msgspec.structs.replace(made, param=own.param)

    def _check_each(self, format_: Format, use: ToolUse, tools: Sequence[Tool]) -> None:
        """Raise the error of the first tool whose calls cannot be enforced, if found within `_MAX_BLAME_S`."""
        seconds = 0.0
        for tool in tools:
            if seconds > _MAX_BLAME_S:
                break
            if tool.name in use.strict or use.mode == "required":
                seconds += self.check(_written(partial(format_.grammar, [tool]), use.places[tool.name])).seconds

    def _constraint(self, param: str, kind: str, value: Any, *, compact: bool) -> Constraint:
        # Checked before the conversion, which takes long for a long text.
        if isinstance(value, str) and len(value) > MAX_CONSTRAINT_CHARS:
            raise too_long(param)
        match kind:
            case "regex":
                return Constraint(LLMatcher.grammar_from_regex(value), param)
            case "choice":
                options = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
                if len(options) > MAX_CONSTRAINT_CHARS:
                    raise too_long(param)
                return Constraint(LLMatcher.grammar_from_lark(f"start: {options}"), param)
            case "grammar":
                lark = value if is_lark(value) else self._lark(value, param)
                return Constraint(LLMatcher.grammar_from_lark(lark), param)
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise InvalidRequestError(f"'{param}' is not valid JSON: {error}", param=param) from error
        return json_schema_constraint(value, param, compact=compact)

    def _lark(self, gbnf: str, param: str) -> str:
        """Convert a GBNF grammar to Lark. Tags match as tokens or text; only as text if that would be too long."""
        try:
            lark = gbnf_to_lark(gbnf, param, self._token_of, self._tags)
            if len(LLMatcher.grammar_from_lark(lark)) <= MAX_GRAMMAR_CHARS:
                return lark
            return gbnf_to_lark(gbnf, param, self._token_of)
        except RecursionError as error:
            raise InvalidRequestError(f"'{param}': nested too deeply", param=param) from error


def _asked(options: Options) -> list[tuple[str, str, Any]]:
    """Return the field, the kind and the value of each constraint that a request asks for."""
    asked: list[tuple[str, str, Any]] = []
    form = options.response_format
    if form is not None and form.type == "json_schema":
        schema = form.json_schema.schema if form.json_schema is not None else None
        asked.append(("response_format.json_schema.schema", "json", {} if schema is None else schema))
    elif (
        form is not None and form.type == "json_object" and (form.schema is not None or options.json_schema is None)
    ):
        asked.append(("response_format.schema", "json", {} if form.schema is None else form.schema))
    asked += [
        (name, kind, value)
        for name, kind, value in (
            ("json_schema", "json", options.json_schema),
            ("grammar", "grammar", options.grammar or None),
            ("guided_json", "json", options.guided_json),
            ("guided_regex", "regex", options.guided_regex),
            ("guided_choice", "choice", options.guided_choice),
            ("guided_grammar", "grammar", options.guided_grammar),
        )
        if value is not None
    ]
    if (more := options.structured_outputs) is not None:
        asked += [
            (f"structured_outputs.{kind}", kind, value)
            for kind in ("json", "regex", "choice", "grammar")
            if (value := getattr(more, kind)) is not None
        ]
        asked += [("structured_outputs.json_object", "json", {})] if more.json_object else []
    return asked


def _reply_grammar(format_: Format, tools: Sequence[Tool], own: Constraint | None, options: Any) -> str:
    """Return the grammar of reasoning, then content and calls; with `own`, of content that matches it, or calls."""
    if own is None:
        return format_.reply_grammar(tools, **options)
    top = format_.reply_grammar(tools, **options, content=_CONTENT)
    if top == f"start: @{_CONTENT}\n":
        return own.grammar
    # llguidance's JSON form of a grammar has several parts. One that is not JSON is in Lark's form.
    parts: list[dict[str, Any]] = [{"lark_grammar": own.grammar}]
    if own.grammar.startswith("{"):
        parts = msgspec.json.decode(own.grammar)["grammars"]
    content, *others = parts
    grammars = [{"lark_grammar": top}, {**content, "name": _CONTENT}, *others]
    return msgspec.json.encode({"grammars": grammars}).decode()


def _prepared(format_: Format, use: ToolUse, tools: Sequence[Tool]) -> list[Tool]:
    """Return tools with schemas that llguidance can follow; raises `InvalidRequestError`.

    Schemas whose grammar would be too long are refused before all of them are prepared.
    """
    prepared = []
    n_chars = 0
    for tool in tools:
        # Arguments must be an object, even if the schema also allows null.
        where, parameters = use.places[tool.name], {**tool.parameters, "type": "object"}
        schema = prepared_schema(parameters, where, limits_digits=not format_.limits_digits)
        prepared.append(Tool(tool.name, schema))
        n_chars += len(msgspec.json.encode(schema))
        _check_length(n_chars, "tools")
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


def _check_length(n_chars: int, param: str) -> None:
    """Raise `GrammarTooLongError` for a grammar of more than `MAX_GRAMMAR_CHARS`."""
    if n_chars > MAX_GRAMMAR_CHARS:
        message = (
            f"'{param}': its grammar would have {n_chars} characters (limit: {MAX_GRAMMAR_CHARS}); simplify it"
        )
        raise GrammarTooLongError(message, param=param)
