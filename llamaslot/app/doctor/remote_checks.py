"""Checks of the remote store (`--cache-remote`): does it answer and store objects, how fast, and who can read them?

They warn but never fail, because a server starts and serves without its store.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions

from llamaslot.api.middleware import is_loopback
from llamaslot.app.cache_tiers import PASSWORD_VARIABLE
from llamaslot.app.config import Config
from llamaslot.app.doctor import Check, ok, shown_size, warn
from llamaslot.app.doctor.checks import others_can_read
from llamaslot.backend.remote import StoreSettings
from llamaslot.backend.remote.store_connection import allowing, connect

_NAME = "--cache-remote"
_MEASURED_BYTES = 2**22
"""Size of the object used to measure the store; a block of 512 tokens has 4 MiB or more with many models."""
_TRANSFER_TIMEOUT_S = 10.0
"""Time limit for writing and reading that object."""
_EXPIRES_S = 60
"""Expiry of the test objects, in case they cannot be deleted."""
_SERVES_WITHOUT = "without it, the server starts but shares nothing"


def remote_checks(settings: StoreSettings, config: Config) -> list[Check]:
    """Return the checks of a configured store."""
    return [*asyncio.run(_asked(settings)), *_readers(settings, config)]


async def _asked(settings: StoreSettings) -> list[Check]:
    """Check the store itself; if it does not answer, return only the reason."""
    client: Any = connect(settings, n_retries=0)
    timeout_s, began = settings.timeout_s, time.perf_counter()
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await client.ping()
                connected = time.perf_counter()
                await client.ping()
        except (exceptions.RedisError, OSError, TimeoutError, ValueError) as error:
            return [_unreachable(settings, error)]
        found = (
            f"{settings.address} connected in {1e3 * (connected - began):,.1f} ms, "
            f"PING {1e3 * (time.perf_counter() - connected):,.1f} ms"
        )
        return [await _objects(client, timeout_s, found), *await _memory(client, settings)]
    finally:
        with suppress(exceptions.RedisError, OSError, TimeoutError):
            await asyncio.wait_for(client.aclose(), timeout_s)


def _unreachable(settings: StoreSettings, error: Exception) -> Check:
    """Return a check that names the flag that is probably wrong."""
    reason = str(error).strip().rstrip(".")
    found = f"{settings.address} cannot be used: {reason or type(error).__name__}"
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        what = "correct" if settings.password else "give"
        advice = f"{what} --cache-remote-password-file (or {PASSWORD_VARIABLE}), and the user in --cache-remote"
    elif "CERTIFICATE_VERIFY_FAILED" in reason:
        advice = (
            "give its CA certificate as --cache-remote-ca, and use the certificate's host name in --cache-remote"
        )
    elif "SSL" in reason:
        advice = "if the store has no TLS, use --cache-remote redis:// instead of rediss://"
    elif isinstance(error, TimeoutError | exceptions.TimeoutError):
        found = f"{settings.address} does not answer within {1e3 * settings.timeout_s:,.0f} ms"
        advice = "correct host and port of --cache-remote or raise --cache-remote-timeout"
    elif "closed" in reason.lower():
        advice = "if the store has TLS, use --cache-remote rediss:// instead of redis://"
    else:
        advice = "start the store or correct --cache-remote"
    return warn(_NAME, found, f"{advice}: {_SERVES_WITHOUT}")


async def _objects(client: Any, timeout_s: float, found: str) -> Check:
    """Write, read and delete a small object with the commands that a server uses, then measure a large one."""
    prefix = f"llamaslot:1:doctor:{os.urandom(8).hex()}:"
    names = [prefix + kind for kind in "diklnm"]
    small, large = os.urandom(64), os.urandom(_MEASURED_BYTES)
    late = (
        f"writing and reading a small object took over {1e3 * timeout_s:,.0f} ms",
        "raise --cache-remote-timeout",
    )
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await _write_small(client, prefix, small)
                read = await client.hmget(prefix + "d", ["kv"])
                await client.unlink(*names)
            late = (
                f"writing and reading {shown_size(_MEASURED_BYTES)} took over {_TRANSFER_TIMEOUT_S:.0f} s",
                "use a closer store: prefixes that take longer to fetch than to compute are not fetched",
            )
            async with asyncio.timeout(_TRANSFER_TIMEOUT_S):
                began = time.perf_counter()
                await client.set(prefix + "m", large, ex=_EXPIRES_S)
                write_s, began = time.perf_counter() - began, time.perf_counter()
                with allowing(2 * _MEASURED_BYTES):
                    read_large = await client.get(prefix + "m")
                read_s = time.perf_counter() - began
        except TimeoutError:
            return warn(_NAME, f"{found}; {late[0]}", late[1])
        except (exceptions.RedisError, OSError, ValueError) as error:
            return warn(_NAME, f"{found}; an object cannot be stored: {error}", _refused(error))
    finally:
        # If the store hung, the connection is unusable now and this fails; the objects expire anyway.
        with suppress(exceptions.RedisError, OSError, TimeoutError):
            await asyncio.wait_for(client.unlink(*names), timeout_s)
    if (read, read_large) != ([small], large):
        return warn(
            _NAME,
            f"{found}; it does not return the bytes that were written",
            "use another store, or a maxmemory that suffices",
        )
    write_rate, read_rate = (_MEASURED_BYTES / max(each, 1e-9) / 2**20 for each in (write_s, read_s))
    size = shown_size(_MEASURED_BYTES)
    return ok(_NAME, f"{found}; {size}: writes {write_rate:,.0f} MiB/s, reads {read_rate:,.0f} MiB/s")


async def _write_small(client: Any, prefix: str, data: bytes) -> None:
    """Write one key of each type that a server writes."""
    async with client.pipeline(transaction=False) as pipe:
        pipe.hset(prefix + "d", mapping={"kv": data})
        pipe.set(prefix + "i", data, ex=_EXPIRES_S)
        pipe.lpush(prefix + "k", data)
        pipe.zadd(prefix + "l", {data: 1.0})
        pipe.incrby(prefix + "n", len(data))
        for kind in "dkln":
            pipe.expire(prefix + kind, _EXPIRES_S)
        # Not `raise_on_error`: its message would contain the data.
        for answer in await pipe.execute(raise_on_error=False):
            if isinstance(answer, Exception):
                raise answer


def _refused(error: Exception) -> str:
    if isinstance(error, exceptions.ReadOnlyError):
        return "give the primary's address as --cache-remote: this is a replica"
    if isinstance(error, exceptions.NoPermissionError):
        return "allow the user of --cache-remote to read and write ~llamaslot:1:* in the store's ACL"
    if isinstance(error, exceptions.OutOfMemoryError):
        return "raise the store's maxmemory and set its maxmemory-policy to allkeys-lru"
    return f"check the store: {_SERVES_WITHOUT}"


async def _memory(client: Any, settings: StoreSettings) -> list[Check]:
    """Compare the store's memory limit with `--cache-remote-size`; managed stores may not report theirs."""
    limit, policy = await _limit_and_policy(client, settings.timeout_s)
    if limit is None:
        return []
    wanted = settings.max_bytes
    found = f"maxmemory {shown_size(limit) if limit else 'not set'}, {policy or 'policy unknown'}"
    advice = ""
    if limit and wanted > limit:
        found += f"; --cache-remote-size {wanted // 2**20:,} MiB"
        advice = f"raise maxmemory or give --cache-remote-size {max(limit // 2**20, 1)}"
    elif limit and policy.startswith(("noeviction", "volatile-")):
        advice = "set maxmemory-policy allkeys-lru: with other policies, a full store may refuse objects"
    elif not limit and not wanted:
        found += "; --cache-remote-size 0"
        advice = "set one of them: nothing limits the store's memory"
    return [warn("remote memory", found, advice) if advice else ok("remote memory", found)]


async def _limit_and_policy(client: Any, timeout_s: float) -> tuple[int | None, str]:
    """Return the limit in bytes (0: no limit, None: not reported) and the name of the eviction policy."""
    found: dict[str, Any] = {}
    for ask, what in ((client.info, "memory"), (client.config_get, "maxmemory*")):
        with suppress(exceptions.RedisError, OSError, TimeoutError, ValueError):
            for key, value in (await asyncio.wait_for(ask(what), timeout_s)).items():
                found[_text(key).replace("-", "_")] = _text(value)
        if "maxmemory" in found:
            break
    limit = found.get("maxmemory", "")
    return int(limit) if limit.isdecimal() else None, found.get("maxmemory_policy", "")


def _readers(settings: StoreSettings, config: Config) -> Iterator[Check]:
    """Check whether others can read the transferred data or the store's secrets."""
    name = "remote access"
    for path in (config.cache_remote_key_file, config.cache_remote_password_file):
        if path and others_can_read(Path(path).expanduser()):
            yield warn(name, f"other users may read {path}", f"chmod 600 {path}")
    parts = urlsplit(settings.url)
    if parts.scheme == "redis" and not is_loopback(parts.hostname or ""):
        advice = "use rediss:// and a store with TLS, or a private network: KV and password are sent unencrypted"
        yield warn(name, f"{settings.address} is another machine, without TLS", advice)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
