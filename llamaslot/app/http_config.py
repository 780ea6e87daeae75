"""From the configuration to the settings of the HTTP layer and the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import structlog

from llamaslot.api.context import ApiSettings
from llamaslot.api.middleware import host_name, is_loopback
from llamaslot.app.config import Config
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import ModelInfo
from llamaslot.text.builtin_templates import resolve
from llamaslot.text.template import ChatTemplate
from llamaslot.text.volatile import pattern

_log = structlog.get_logger(__name__)
_FALLBACK_TEMPLATE = "chatml"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Options that are fields of `Sampling` too."""


def api_settings(config: Config) -> ApiSettings:
    """Return the settings of the HTTP layer. Raises `ConfigError`."""
    keys = listed(config.api_key)
    if not keys and config.api_key:
        raise ConfigError("--api-key is given, but there is no key in it", param="--api-key")
    has_keys = bool(keys or config.api_key_file)
    _check_host_needs_key(config, has_keys=has_keys)
    if config.cache_salt_from_api_key and not has_keys:
        flag = "--cache-salt-from-api-key"
        raise ConfigError(f"{flag} needs API keys: give --api-key or --api-key-file", param=flag)
    return ApiSettings(
        api_keys=tuple(keys),
        api_key_file=config.api_key_file,
        max_body_bytes=config.max_body_mb * 2**20,
        max_total_body_bytes=config.max_total_body_mb * 2**20,
        body_timeout=config.body_timeout,
        max_logit_bias_entries=config.max_logit_bias_entries,
        max_connections=config.max_connections,
        keep_alive_timeout=config.keep_alive_timeout,
        alias=config.alias,
        cors_origins=tuple(listed(config.cors_origins)),
        allowed_hosts=_allowed_hosts(config),
        sse_ping_interval=config.sse_ping_interval,
        metrics=config.metrics,
        slots=config.slots,
        cache_debug_text=config.cache_debug_text,
        cache_salt_from_api_key=config.cache_salt_from_api_key,
        n_predict=config.n_predict,
        cache_prompt=config.cache_prompt,
        sampling={name: value for name in _SAMPLING if (value := getattr(config, name)) is not None},
    )


def listed(text: str) -> list[str]:
    """Return the items of a comma-separated list."""
    return [each for each in map(str.strip, text.split(",")) if each]


def _check_host_needs_key(config: Config, *, has_keys: bool) -> None:
    """Raise `ConfigError` if other machines could use the server without a key."""
    outside = [host for host in listed(config.host) if not is_loopback(host)]
    if outside and not has_keys and not config.insecure:
        message = (
            f"--host {outside[0]} lets other machines use this server: give --api-key, or --insecure if they may"
        )
        raise ConfigError(message, param="--host")


def _allowed_hosts(config: Config) -> tuple[str, ...]:
    """Return the names that the Host header may have, none for any."""
    outside = [host for host in listed(config.host) if not is_loopback(host)]
    names = listed(config.allowed_hosts)
    if outside and not names:
        return ()
    return ("localhost", *map(host_name, [*names, *outside]))


def read_template(config: Config) -> tuple[str, str]:
    """The Jinja source that the configuration names, and the flag that named it; both empty where none did."""
    if config.chat_template_file:
        return _read(config.chat_template_file, "--chat-template-file"), "--chat-template-file"
    return (resolve(config.chat_template), "--chat-template") if config.chat_template else ("", "")


def chat_template(
    info: ModelInfo,
    source: str,
    flag: str,
    volatile: re.Pattern[str] | None = None,
    *,
    escape_special: bool = True,
) -> ChatTemplate:
    """The template to render conversations by: the configured one, the model's own, or ChatML."""
    origin = flag or "the model's own template (--chat-template takes another)"
    source = source or info.chat_template
    if not source:
        _log.warning("template.missing", fallback=_FALLBACK_TEMPLATE)
        source = resolve(_FALLBACK_TEMPLATE)
    try:
        return ChatTemplate(
            source,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
            adds_bos=info.adds_bos,
            adds_eos=info.adds_eos,
            control_tokens=info.control_tokens,
            mark_control_tokens=escape_special,
            volatile=volatile,
        )
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.message}", param="--chat-template") from None


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param=flag) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text", param=flag) from None


def configured_template(config: Config) -> Callable[[ModelInfo], ChatTemplate]:
    """Return a function that gives the template for a loaded model. Raises `ConfigError`."""
    source, flag = read_template(config)
    volatile = pattern(config.drop_volatile)

    def template_for(info: ModelInfo) -> ChatTemplate:
        chosen, origin = source, flag
        if not config.jinja and not source:
            chosen, origin = resolve(info.builtin_template), "--no-jinja"
        return chat_template(info, chosen, origin, volatile, escape_special=config.escape_special)

    return template_for
