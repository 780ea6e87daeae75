"""Structured output: makes the constraint that a request's fields ask for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from llguidance import LLMatcher

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError
from llamaslot.protocol.structured_options import StructuredOptions
from llamaslot.text.grammars.compiling import MAX_CONSTRAINT_CHARS, GrammarChecker, GrammarTooLongError, too_long
from llamaslot.text.grammars.gbnf import TokenOf, gbnf_to_lark, is_lark
from llamaslot.text.grammars.json_schema import json_schema_constraint

MAX_GRAMMAR_CHARS = 2**19
"""Most characters of a grammar made from a request.

Calls of 200 tools with five parameters take 140,000 to 280,000 characters, depending on the format. The engine's
cache of compiled grammars holds one grammar of this length.
"""


def check_length(n_chars: int, param: str) -> None:
    """Raise `GrammarTooLongError` for a grammar of more than `MAX_GRAMMAR_CHARS`."""
    if n_chars > MAX_GRAMMAR_CHARS:
        message = (
            f"'{param}': its grammar would have {n_chars} characters (limit: {MAX_GRAMMAR_CHARS}); simplify it"
        )
        raise GrammarTooLongError(message, param=param)


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

    def read(self, options: StructuredOptions) -> Constraint | None:
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
        check_length(len(constraint.grammar), constraint.param)
        return self._checker.check(constraint, may_compile=self._may_compile)

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


def _asked(options: StructuredOptions) -> list[tuple[str, str, Any]]:
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
