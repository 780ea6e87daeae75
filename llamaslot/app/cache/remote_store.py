"""Opening the remote store (`--cache-remote`) for a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from llamaslot.app.cache.cache_disk import kv_key
from llamaslot.app.cache.cache_remote import RemoteSettings
from llamaslot.backend.disk import fingerprint_of
from llamaslot.backend.remote.redis_store import RedisStore
from llamaslot.backend.remote.reply_parser import ReplyParser
from llamaslot.backend.remote.sealing import Sealer
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import ModelInfo


def open_remote(
    settings: RemoteSettings,
    info: ModelInfo,
    model_key: bytes | None,
    on_progress: Callable[[float], bool],
) -> RedisStore | None:
    """Return the store for a model; None if `on_progress` stopped the fingerprinting or prefixes are not offloaded.

    `model_key` is the key that the disk tier computed with `kv_key`. Without it, the model's files are read
    completely to fingerprint them. The connection is made on first use, so the store need not run yet. Raises
    `ConfigError`.
    """
    if info.segment_size is None:
        return None
    if model_key is None:
        try:
            weights = fingerprint_of(info.kv_files, on_progress)
        except OSError as error:
            raise ConfigError(f"--cache-remote: the model cannot be read: {error}", param="--model") from None
        if weights is None:
            return None
        model_key = kv_key(info, weights)
    return RedisStore(connect(settings), Sealer(settings.secret, model_key), settings.store, info.segment_size)


def connect(settings: RemoteSettings, n_retries: int | None = None) -> Redis:
    """Return a client, which connects on first use and retries `n_retries` times (None: redis-py's default)."""
    options: dict[str, Any] = {}
    if settings.url.startswith("rediss://"):
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
        if settings.ca_file:
            options["ssl_ca_certs"] = settings.ca_file
    if settings.password:
        options["password"] = settings.password
    if n_retries is not None:
        options["retry"] = Retry(NoBackoff(), n_retries)
    return Redis.from_url(
        settings.url,
        protocol=2,
        parser_class=ReplyParser,
        # Not redis-py's timeouts: each call has one time limit of its own, which also closes the connection.
        socket_connect_timeout=None,
        socket_timeout=None,
        health_check_interval=0,
        **options,
    )
