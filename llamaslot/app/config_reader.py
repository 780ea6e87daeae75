"""Reading the configuration. Precedence: flag, environment variable, configuration file, default.

Every invalid value raises a `ConfigError` that names its source: the flag, the variable or the file's key.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from llamaslot.app.config import Config, options
from llamaslot.app.option import Option
from llamaslot.base.errors import ConfigError
from llamaslot.base.named_files import read_named_text


def read_config(flags: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Return the configuration from flags, environment and the file that either names. Raises `ConfigError`."""
    table = {option.name: option for option in options()}
    file = flags.config or environ.get("LLAMASLOT_CONFIG")
    found: dict[str, tuple[str, Any]] = {}
    if file:
        for key, value in _read_toml(Path(file)).items():
            found[_known_key(key, table, file)] = (f"{key} in {file}", value)
    for option in table.values():
        negated = option.env.replace("_ARG_", "_ARG_NO_")
        if option.is_bool and negated != option.env and negated in environ:
            found[option.name] = (negated, False)
        elif environ.get(option.env):
            found[option.name] = (option.env, environ[option.env])
        if getattr(flags, option.name, None) is not None:
            found[option.name] = (option.flag, getattr(flags, option.name))
    if flags.name:
        if getattr(flags, "model", None) not in (None, flags.name):
            raise ConfigError(f"two models are given: {flags.name} and {flags.model}", param="--model")
        found["model"] = ("MODEL", flags.name)
    values = {name: _convert(table[name], source, value) for name, (source, value) in found.items()}
    return _checked(Config(**values))


def listed(text: str) -> list[str]:
    """Return the items of a comma-separated list."""
    return [each for each in map(str.strip, text.split(",")) if each]


def _convert(option: Option, source: str, value: Any) -> Any:
    if isinstance(value, str) and value.lower() in option.words:
        return option.words[value.lower()]
    if option.is_list and isinstance(value, str):
        value = [value]
    try:
        return msgspec.convert(value, option.kind, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).lower()
        if option.choices and not reason.endswith(">= 0"):
            reason = f"expected one of {', '.join(option.choices)}"
        raise ConfigError(f"{source}: {value!r} is invalid: {reason}", param=option.flag) from None


def _checked(config: Config) -> Config:
    if min(config.ubatch_size, config.batch_size) < config.parallel:
        raise ConfigError("--ubatch-size and --batch-size must be at least --parallel", param="--ubatch-size")
    if config.kv_mem_fraction == 0:
        raise ConfigError("--kv-mem-fraction must be greater than 0", param="--kv-mem-fraction")
    if config.cache_type_v not in ("f32", "f16", "bf16") and config.flash_attn == "off":
        raise ConfigError("a quantized --cache-type-v needs flash attention", param="--cache-type-v")
    if config.chat_template and config.chat_template_file:
        raise ConfigError("give --chat-template or --chat-template-file, not both", param="--chat-template")
    if not config.jinja and (config.chat_template_file or "{" in config.chat_template):
        raise ConfigError(
            "--no-jinja allows only built-in templates: give the name of one as --chat-template", param="--no-jinja"
        )
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_named_text(path, "--config"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", param="--config") from None


def _known_key(key: str, table: Mapping[str, Option], file: str) -> str:
    name = key.replace("-", "_")
    if name in table:
        return name
    nearest = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"{file} has an unknown key {key}{hint}", param="--config")
