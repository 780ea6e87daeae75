"""Conversion of the configuration to the settings of the HTTP layer."""

from __future__ import annotations

from llamaslot.api.context import ApiSettings
from llamaslot.api.middleware import host_name, is_loopback
from llamaslot.app.config import Config
from llamaslot.app.config_reader import listed
from llamaslot.app.sampling_config import sampling_defaults
from llamaslot.base.errors import ConfigError


def api_settings(config: Config) -> ApiSettings:
    """Return the settings of the HTTP layer. Raises `ConfigError`."""
    keys = listed(config.api_key)
    if not keys and config.api_key:
        raise ConfigError("--api-key contains no key", param="--api-key")
    has_keys = bool(keys or config.api_key_file)
    _check_host_needs_key(config, has_keys=has_keys)
    if config.cache_salt_from_api_key and not has_keys:
        flag = "--cache-salt-from-api-key"
        raise ConfigError(f"{flag} needs API keys: give --api-key or --api-key-file", param=flag)
    for option in ("cache_ram_per_key", "cache_disk_per_key"):
        if getattr(config, option) and not config.cache_salt_from_api_key:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"{flag} needs --cache-salt-from-api-key: otherwise all keys share their KV", param=flag
            )
    return ApiSettings(
        api_keys=tuple(keys),
        api_key_file=config.api_key_file,
        max_body_bytes=config.max_body_mb * 2**20,
        max_total_body_bytes=config.max_total_body_mb * 2**20,
        body_timeout=config.body_timeout,
        max_logit_bias_entries=config.max_logit_bias_entries,
        max_choices=config.max_choices,
        max_reply_probs=config.max_reply_probs,
        max_stop_strings=config.max_stop_strings,
        max_stop_chars=config.max_stop_chars,
        max_stored_responses=config.max_stored_responses,
        max_stored_responses_bytes=config.max_stored_responses_mb * 2**20,
        max_connections=config.max_connections,
        keep_alive_timeout=config.keep_alive_timeout,
        write_timeout=config.write_timeout,
        max_stream_buffer_bytes=config.max_stream_buffer_kb * 2**10,
        alias=config.alias,
        tags=config.tags,
        owned_by=config.owned_by,
        cors_origins=_cors_origins(config, has_keys=has_keys),
        allowed_hosts=_allowed_hosts(config),
        sse_ping_interval=config.sse_ping_interval,
        metrics=config.metrics,
        slots=config.slots,
        cache_debug_text=config.cache_debug_text,
        cache_salt_from_api_key=config.cache_salt_from_api_key,
        verbose=config.verbose,
        n_predict=config.n_predict,
        reasoning=config.reasoning != "off",
        reasoning_format=config.reasoning_format,
        reasoning_budget=config.reasoning_budget,
        cache_prompt=config.cache_prompt,
        sampling=sampling_defaults(config),
    )


def max_queue_per_client(config: Config) -> int:
    """Return how many requests of one client may wait; 0: no limit per client."""
    if config.max_queue_per_client >= 0:
        return config.max_queue_per_client
    # Without keys, all programs of a machine may count as one client.
    has_keys = bool(config.api_key or config.api_key_file)
    return max(1, config.max_queue // 2) if has_keys and config.max_queue else 0


def _check_host_needs_key(config: Config, *, has_keys: bool) -> None:
    """Raise `ConfigError` if other machines could use the server without a key."""
    outside = [host for host in listed(config.host) if not is_loopback(host)]
    if outside and not has_keys and not config.insecure:
        message = (
            f"--host {outside[0]} lets other machines use this server: give --api-key, or --insecure to allow it"
        )
        raise ConfigError(message, param="--host")


def _cors_origins(config: Config, *, has_keys: bool) -> tuple[str, ...]:
    """Return the origins whose pages may use the server.

    If keys are needed, any page may: browsers add no key by themselves, so a page is limited to its own key.
    """
    if config.cors_origins == "auto":
        return ("*",) if has_keys else ("localhost",)
    return tuple(listed(config.cors_origins))


def _allowed_hosts(config: Config) -> tuple[str, ...]:
    """Return the names that the Host header may have; empty: any name."""
    outside = [host for host in listed(config.host) if not is_loopback(host)]
    names = listed(config.allowed_hosts)
    if outside and not names:
        return ()
    return ("localhost", *map(host_name, [*names, *outside]))
