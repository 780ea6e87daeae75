"""Settings of the remote tier (`--cache-remote`): its address and secrets, checked before the model is loaded."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from llamaslot.app.config import Config
from llamaslot.backend.remote.store_settings import StoreSettings
from llamaslot.base.errors import ConfigError
from llamaslot.base.named_files import read_named, read_named_text

KEY_VARIABLE = "LLAMASLOT_CACHE_REMOTE_KEY"
PASSWORD_VARIABLE = "LLAMASLOT_CACHE_REMOTE_PASSWORD"
_FLAG = "--cache-remote"
_SCHEMES = ("redis", "rediss", "unix")
_MIN_SECRET_BYTES = 16
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Settings of the remote store. Never print the URL, secret or password; `shown` and the numbers are safe."""

    url: str
    secret: bytes
    password: str
    ca_file: str
    store: StoreSettings

    @property
    def shown(self) -> str:
        """The URL without the user name."""
        return self.store.address


def remote_settings(config: Config) -> RemoteSettings | None:
    """Return the settings of the remote store; None if none is configured. Raises `ConfigError`."""
    if not config.cache_remote:
        for option in ("cache_remote_key_file", "cache_remote_password_file", "cache_remote_ca"):
            if getattr(config, option):
                flag = "--" + option.replace("_", "-")
                raise ConfigError(f"{flag} needs {_FLAG}", param=flag)
        return None
    if config.cache_ram == 0:
        raise ConfigError(f"{_FLAG} needs the RAM tier, which --cache-ram 0 turns off", param=_FLAG)
    shown = _checked_url(config.cache_remote)
    if config.cache_remote_ca and not config.cache_remote.startswith("rediss://"):
        raise ConfigError(
            "--cache-remote-ca needs TLS: a --cache-remote that begins with rediss://", param="--cache-remote-ca"
        )
    if config.cache_remote.startswith("rediss://"):
        _check_certificates(config.cache_remote_ca)
    secret = _secret(KEY_VARIABLE, config.cache_remote_key_file, "--cache-remote-key-file").encode()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"{_FLAG} needs a secret of at least {_MIN_SECRET_BYTES} bytes that all servers of the fleet share: "
            f"give --cache-remote-key-file or set {KEY_VARIABLE}",
            param="--cache-remote-key-file",
        )
    return RemoteSettings(
        config.cache_remote,
        secret,
        _secret(PASSWORD_VARIABLE, config.cache_remote_password_file, "--cache-remote-password-file"),
        config.cache_remote_ca,
        StoreSettings(
            max_bytes=config.cache_remote_size * _MIB,
            ttl_s=config.cache_remote_ttl,
            timeout_s=config.cache_remote_timeout / 1e3,
            address=shown,
        ),
    )


def remote_line(settings: RemoteSettings) -> str:
    """Return the start line about the remote tier."""
    limit = f", at most {settings.store.max_bytes / _MIB:,.0f} MiB" if settings.store.max_bytes else ""
    return f"Remote tier: {settings.shown}, shared with all servers that have the same key and model{limit}"


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_complete = bool(parts.path if parts.scheme == "unix" else parts.hostname and parts.port != 0)
    except ValueError as error:
        raise ConfigError(f"{_FLAG}: {error}", param=_FLAG) from None
    if parts.scheme not in _SCHEMES or not is_complete:
        raise ConfigError(
            f"{_FLAG} must be redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH", param=_FLAG
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"{_FLAG} must not have options after '?' or '#'", param=_FLAG)
    if parts.password is not None:
        raise ConfigError(
            f"{_FLAG} must not contain the password, because other users could see it: use "
            f"--cache-remote-password-file or {PASSWORD_VARIABLE}",
            param=_FLAG,
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _secret(variable: str, path: str, flag: str) -> str:
    """Return a secret from a file's first line or an environment variable; empty without either."""
    if not path:
        return os.environ.get(variable, "")
    return read_named_text(Path(path).expanduser(), flag).partition("\n")[0].strip()


def _check_certificates(path: str) -> None:
    """Raise `ConfigError` unless the file contains certificates; the client would read it only when connecting."""
    flag = "--cache-remote-ca"
    if path and not Path(path).is_dir():
        # Read it here first, because OpenSSL would block on a pipe.
        read_named(Path(path), flag)
    try:
        ssl.create_default_context(cafile=path or None)
    except ssl.SSLError:
        raise ConfigError(f"{flag}: no PEM certificate in {path}", param=flag) from None
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror or error}", param=flag) from None
