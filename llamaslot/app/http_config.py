"""Conversion of the configuration to the settings of the HTTP layer, with the default sampling of requests."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec.structs import fields

from llamaslot.api.context import ApiSettings
from llamaslot.api.middleware import host_name, is_loopback
from llamaslot.app.config import Config, options
from llamaslot.app.config_reader import listed
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


def api_settings(config: Config) -> ApiSettings:
    """Return the settings of the HTTP layer: options of the same name, and those that are converted.

    Raises `ConfigError`.
    """
    keys = listed(config.api_key)
    if not keys and config.api_key:
        raise ConfigError("--api-key contains no key", param="--api-key")
    has_keys = bool(keys or config.api_key_file)
    outside = [host for host in listed(config.host) if not is_loopback(host)]
    if outside and not has_keys and not config.insecure:
        message = (
            f"--host {outside[0]} lets other machines use this server: give --api-key, or --insecure to allow it"
        )
        raise ConfigError(message, param="--host")
    if config.cache_salt_from_api_key and not has_keys:
        flag = "--cache-salt-from-api-key"
        raise ConfigError(f"{flag} needs API keys: give --api-key or --api-key-file", param=flag)
    for option in ("cache_ram_per_key", "cache_disk_per_key"):
        if getattr(config, option) and not config.cache_salt_from_api_key:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"{flag} needs --cache-salt-from-api-key: otherwise all keys share their KV", param=flag
            )
    origins, names = listed(config.cors_origins), listed(config.allowed_hosts)
    if config.cors_origins == "auto":
        # With keys, any page may use it: browsers add no key by themselves, so a page is limited to its own key.
        origins = ["*"] if has_keys else ["localhost"]
    converted: dict[str, Any] = {
        "api_keys": tuple(keys),
        "max_body_bytes": config.max_body_mb * 2**20,
        "max_total_body_bytes": config.max_total_body_mb * 2**20,
        "max_stored_responses_bytes": config.max_stored_responses_mb * 2**20,
        "max_stream_buffer_bytes": config.max_stream_buffer_kb * 2**10,
        "cors_origins": tuple(origins),
        # Any name if other machines may use the server under names that are not given.
        "allowed_hosts": ("localhost", *map(host_name, [*names, *outside])) if names or not outside else (),
        "reasoning": config.reasoning != "off",
        "template_kwargs": template_kwargs(config),
        "sampling": sampling_defaults(config),
    }
    same = {name: getattr(config, name) for name in ApiSettings.__struct_fields__ if name not in converted}
    return ApiSettings(**same, **converted)


def template_kwargs(config: Config) -> dict[str, Any]:
    """Return the variables of the chat template that flags set. Raises `ConfigError`."""
    flag = "--chat-template-kwargs"
    try:
        found = msgspec.json.decode(config.chat_template_kwargs or "{}", type=dict[str, Any])
        # The prompt worker gets it in this form, which has no larger integers.
        msgspec.msgpack.encode(found)
    except (msgspec.DecodeError, UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{flag} is not a JSON object: {error}", param=flag) from None
    # As in llama-server, the level that the template itself chooses.
    return found if config.reasoning_effort == "default" else found | {"reasoning_effort": config.reasoning_effort}


def max_queue_per_client(config: Config) -> int:
    """Return how many requests of one client may wait; 0: no limit per client."""
    if config.max_queue_per_client >= 0:
        return config.max_queue_per_client
    # Without keys, all programs of a machine may count as one client.
    has_keys = bool(config.api_key or config.api_key_file)
    return max(1, config.max_queue // 2) if has_keys and config.max_queue else 0


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
