"""Features that clients may ask for and this server does not offer yet.

A value that would change the answer is refused by name instead of being passed over in silence; one that leaves the
feature off passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamaslot.api.wire import Options
from llamaslot.base.errors import NotSupportedError

_SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


def _falsy(value: Any) -> bool:
    return not value


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
    "samplers": lambda value: value in ("", _SAMPLERS),
    "modalities": lambda value: value == ["text"],
    "web_search_options": lambda value: False,
    "mirostat": _falsy,
    "dynatemp_range": _falsy,
    "dry_multiplier": _falsy,
    "xtc_probability": _falsy,
    "top_n_sigma": lambda value: value <= 0,
    "adaptive_target": lambda value: value < 0,
    "min_keep": _falsy,
    "n_indent": _falsy,
    "t_max_predict_ms": lambda value: value <= 0,
    "return_progress": _falsy,
}
"""For each field whether a value, null excepted, leaves its feature off."""


def refuse(options: Options) -> None:
    """Raise `NotSupportedError` for the first feature that the request turns on."""
    for name, is_off in _OFF.items():
        value = getattr(options, name)
        if value is not None and not is_off(value):
            raise NotSupportedError(f"'{name}' asks for something that this server does not offer", param=name)
    if options.best_of is not None and options.best_of > (options.n or 1):
        raise NotSupportedError("'best_of' above 'n' is not offered", param="best_of")
