"""Sandboxed Jinja with the extensions that chat templates use.

Templates come from downloaded files, so they have no access to Python's attributes, files or modules. As in
llama.cpp they may change lists and dicts; `copied` protects those of the caller.
"""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from itertools import islice
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

MAX_ITEMS = 2**20
"""Most items of a list or dict that a template changes, far more than a conversation has."""

_CHANGES: Mapping[type, frozenset[str]] = {
    list: frozenset(("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort")),
    dict: frozenset(("clear", "pop", "popitem", "setdefault", "update")),
}


class ChatSandbox(ImmutableSandboxedEnvironment):
    """The environment of all chat templates.

    A loop over a list to which its body appends would never end, so `call` limits the size of lists and dicts.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            undefined=_LenientUndefined,
        )
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = _to_json
        self.filters["safe"] = str  # Jinja's own would make everything added to it be HTML-escaped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow what Jinja's sandbox allows, and methods that change a list or dict."""
        if attr in _CHANGES.get(type(obj), ()):
            return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function for a template; raises `TemplateError` once it makes a list or dict too large."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, list | dict):
            # Iterators are read first, because one over the list itself, as in `l.extend(l | map(...))`, never
            # ends.
            args = tuple(list(islice(each, MAX_ITEMS + 1)) if isinstance(each, Iterator) else each for each in args)
        result = super().call(context, function, *args, **kwargs)
        if isinstance(owner, list | dict) and len(owner) > MAX_ITEMS:
            raise TemplateError(f"a {type(owner).__name__} has more than {MAX_ITEMS} items")
        return result


def copied(value: Any) -> Any:
    """Return a nested value with copies of its lists and dicts, which a template may change."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


class _LenientUndefined(Undefined):
    """An undefined value as in llama.cpp: its attributes are undefined, and adding it to a text changes nothing.

    So templates that read the description of a tool's parameters also accept parameters without one. Access that
    the sandbox refuses is still an error.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        is_lenient = self._undefined_exception is not SecurityError and not name.startswith("__")
        return self if is_lenient else super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        return self if self._undefined_exception is not SecurityError else super().__getitem__(key)

    def __add__(self, other: Any) -> Any:
        return other if self._adds_nothing_to(other) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other if self._adds_nothing_to(other) else super().__radd__(other)

    def _adds_nothing_to(self, other: Any) -> bool:
        return isinstance(other, str) and self._undefined_exception is not SecurityError


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """Convert the result of filters such as `map` to a list, as in llama.cpp."""
    if isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class _GenerationTag(Extension):
    """`{% generation %}`, which marks replies for training. Ignored here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
