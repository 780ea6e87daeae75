"""Features that clients may ask for but this server does not support yet.

A value that would change the answer is refused by name instead of being ignored. A value that leaves the feature
off is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import msgspec

from llamaslot.base.errors import NotSupportedError


def _off(is_off: Callable[[Any], bool]) -> msgspec.Meta:
    """Attach a predicate to a field; it returns True for values other than null that leave the feature off."""
    return msgspec.Meta(extra={"is_off": is_off})


def _only_scores(moderation: Any) -> bool:
    """Return True for OpenAI's `moderation` without a blocking policy: scores would not change the reply."""
    return "block" not in msgspec.json.encode(moderation).decode()


_FALSY = _off(lambda value: not value)
_NO_CHOICE = _off(lambda value: value in ("none", "auto"))


class UnsupportedOptions(msgspec.Struct, kw_only=True):
    """Fields of llama-server or OpenAI that are not supported, each with the values that are accepted."""

    functions: Annotated[Any, _FALSY] = None
    function_call: Annotated[Any, _NO_CHOICE] = None
    lora: Annotated[Any, _FALSY] = None
    modalities: Annotated[list[str] | None, _off(lambda value: value == ["text"])] = None
    moderation: Annotated[Any, _off(_only_scores)] = None


_OFF: dict[str, Callable[[Any], bool]] = {
    name: hint.__metadata__[0].extra["is_off"]
    for name, hint in get_type_hints(UnsupportedOptions, include_extras=True).items()
}
"""Predicates by field."""


def refuse(options: UnsupportedOptions) -> None:
    """Raise `NotSupportedError` for the first feature that a request turns on."""
    for name, is_off in _OFF.items():
        value = getattr(options, name)
        if name == "functions" and options.function_call == "none":
            continue
        if value is not None and not is_off(value):
            raise NotSupportedError(f"'{name}': this value is not supported yet", param=name)
