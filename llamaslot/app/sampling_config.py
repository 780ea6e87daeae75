"""Conversion of the configuration to the default sampling of requests."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import fields

from llamaslot.app.config import Config, options
from llamaslot.base.errors import ConfigError
from llamaslot.base.generation.sampling import INFILL, Sampling, named_samplers
from llamaslot.base.model import ModelInfo
from llamaslot.protocol.bodies import MAX_BREAKER_CHARS, MAX_BREAKERS

_CONVERTED = {"samplers", "logit_bias"}
_SAME_FIELDS = {field.name for field in fields(Sampling)} & {option.name for option in options()} - _CONVERTED
"""Options whose values are fields of `Sampling` without conversion."""
_BIAS = re.compile(r"\s*(\d{1,10})\s*([+-](?:inf|\d+\.?\d*|\.\d+))\s*")
_MAX_BIAS = 1e6
"""Largest absolute value of a bias, except for -inf."""
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE = re.compile(r"\\([nrt'\"\\])")


def sampling_defaults(config: Config) -> dict[str, Any]:
    """Return the fields of `Sampling` that options set; for the others the model file's values apply.

    Raises `ConfigError` for invalid samplers, biases or sequence breakers.
    """
    found = {name: value for name in _SAME_FIELDS if (value := getattr(config, name)) is not None}
    if not config.ignore_eos:
        del found["ignore_eos"]
    if found.get("dry_base", 1) < 1:
        # As in llama-server, a value below 1 stands for the default.
        del found["dry_base"]
    if config.samplers or config.sampler_seq:
        found["samplers"] = _samplers(config)
    if config.logit_bias:
        found["logit_bias"] = dict(map(_bias, config.logit_bias))
    if config.dry_sequence_breaker:
        found["dry_sequence_breakers"] = _breakers(config.dry_sequence_breaker)
    return found


def check_vocabulary(config: Config, info: ModelInfo) -> None:
    """Raise `ConfigError` for a bias of a token outside the model's vocabulary."""
    for token in sampling_defaults(config).get("logit_bias", {}):
        if token >= info.n_vocab:
            raise ConfigError(
                f"--logit-bias names token {token}, but the model's vocabulary ends at {info.n_vocab - 1}",
                param="--logit-bias",
            )


def _samplers(config: Config) -> tuple[str, ...]:
    if config.samplers and config.sampler_seq:
        raise ConfigError("give --samplers or --sampler-seq, not both", param="--samplers")
    flag = "--samplers" if config.samplers else "--sampler-seq"
    asked = [name.strip() for name in config.samplers.split(";") if name.strip()] or list(config.sampler_seq)
    found: list[str] = []
    for name in asked:
        names = named_samplers([name] if config.samplers else name)
        if not names or names[0] == INFILL:
            raise ConfigError(f"{flag}: unknown sampler '{name}'", param=flag)
        found += names
    return tuple(found)


def _bias(text: str) -> tuple[int, float]:
    match = _BIAS.fullmatch(text)
    bias = float(match[2]) if match else float("nan")
    if match is None or (abs(bias) > _MAX_BIAS and bias != float("-inf")):
        raise ConfigError(
            f"--logit-bias: '{text}' is not a token id with a bias, such as 15043+1", param="--logit-bias"
        )
    return int(match[1]), bias


def _breakers(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sequence breakers; as in llama-server, `none` removes those before it, `\\n` is a line break."""
    breakers: list[str] = []
    for text in texts:
        breakers = [] if text == "none" else [*breakers, _ESCAPE.sub(lambda match: _ESCAPES[match[1]], text)]
    if len(breakers) > MAX_BREAKERS or any(len(text) > MAX_BREAKER_CHARS for text in breakers):
        raise ConfigError(
            f"--dry-sequence-breaker: at most {MAX_BREAKERS} texts of at most {MAX_BREAKER_CHARS} characters",
            param="--dry-sequence-breaker",
        )
    return tuple(breakers)
