"""Features that clients may ask for and this server does not support yet.

A value that would change the answer is refused by name instead of being ignored; a value that leaves the feature
off is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from llamaslot.api.bodies import Options
from llamaslot.base.errors import NotSupportedError

SAMPLERS = ["penalties", "top_k", "typ_p", "top_p", "min_p", "temperature"]
"""The samplers of this server in their order, under llama-server's names."""
_UNSUPPORTED_SAMPLERS = ("dry", "top_n_sigma", "xtc", "adaptive_p")
"""Samplers of llama-server that do nothing while their own fields below are off."""
_SAMPLER_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "a": "adaptive_p",
}  # fmt: skip


def _falsy(value: Any) -> bool:
    return not value


def _keeps_order(samplers: Any) -> bool:
    """Return True for our order, as llama-server's list of names or string of letters, and for an empty string."""
    if isinstance(samplers, str):
        samplers = [_SAMPLER_LETTERS.get(letter) for letter in samplers] or SAMPLERS
    return (
        isinstance(samplers, list) and [name for name in samplers if name not in _UNSUPPORTED_SAMPLERS] == SAMPLERS
    )


_OFF: dict[str, Callable[[Any], bool]] = {
    "tools": _falsy,
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": _falsy,
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: value.type == "text",
    "grammar": _falsy,
    "json_schema": lambda value: False,  # even {} asks for JSON
    "logprobs": _falsy,
    "top_logprobs": _falsy,
    "n_probs": _falsy,
    "echo": _falsy,
    "suffix": _falsy,
    "lora": _falsy,
    "samplers": _keeps_order,
    "modalities": lambda value: value == ["text"],
    "web_search_options": lambda value: False,
    "mirostat": _falsy,
    "dynatemp_range": _falsy,
    "dry_multiplier": _falsy,
    "xtc_probability": _falsy,
    "top_n_sigma": lambda value: value <= 0,
    "adaptive_target": lambda value: value < 0,
    "min_keep": lambda value: value <= 1,
    "n_indent": _falsy,
    "t_max_predict_ms": lambda value: value <= 0,
    "return_progress": _falsy,
}
"""A predicate per field: True for a value, other than null, that leaves the feature off."""


def refuse(options: Options, *, but_for: Container[str] = ()) -> None:
    """Raise `NotSupportedError` for the first feature that the request turns on, the fields `but_for` aside."""
    for name, is_off in _OFF.items():
        value = getattr(options, name)
        if value is not None and name not in but_for and not is_off(value):
            raise NotSupportedError(f"'{name}' asks for something that is not supported yet", param=name)
    if options.best_of is not None and options.best_of > (options.n or 1):
        raise NotSupportedError("'best_of' above 'n' is not supported yet", param="best_of")
