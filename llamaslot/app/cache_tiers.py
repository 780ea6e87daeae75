"""Tiers of the cache behind RAM: disk tier (`--cache-disk`), slot files, remote tier (`--cache-remote`).

Folders are locked, and the remote store's secrets read, before the model is loaded; both tiers are opened
afterwards, because their content is valid only for the model's exact weights (`kv_key`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from llamaslot.app.config import Config
from llamaslot.backend.disk import DiskStore, SlotFiles, fingerprint_of
from llamaslot.backend.remote import StoreSettings
from llamaslot.backend.storage import private_folder
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import read_named, read_named_text
from llamaslot.base.model import ModelInfo
from llamaslot.kvcache.cache_settings import MAX_SEGMENT_TOKENS, Budgets

if TYPE_CHECKING:
    from llamaslot.backend.remote.redis_store import RedisStore

KEY_VARIABLE = "LLAMASLOT_CACHE_REMOTE_KEY"
PASSWORD_VARIABLE = "LLAMASLOT_CACHE_REMOTE_PASSWORD"
_DISK_FLAG, _REMOTE_FLAG = "--cache-disk", "--cache-remote"
_MAX_AUTO_BYTES = 64 * 2**30
"""Upper limit of `--cache-disk-size auto`."""
_AUTO_DISK_FRACTION = 0.5
"""Fraction of free disk space that `--cache-disk-size auto` uses."""
_SCHEMES = ("redis", "rediss", "unix")
_MIN_SECRET_BYTES = 16
_MIB = 2**20

_log = structlog.get_logger(__name__)


def lock_disk(config: Config) -> DiskStore | None:
    """Lock the configured folder against other servers; None if none is configured. Raises `ConfigError`."""
    if not config.cache_disk:
        return None
    if config.cache_ram == 0:
        raise ConfigError(f"{_DISK_FLAG} needs the RAM tier, which --cache-ram 0 turns off", param=_DISK_FLAG)
    folder = Path(config.cache_disk).expanduser()
    try:
        return DiskStore(folder)
    except OSError as error:
        raise _unusable(_DISK_FLAG, folder, error) from None


def open_disk(
    disk: DiskStore, config: Config, info: ModelInfo, budgets: Budgets, on_progress: Callable[[float], bool]
) -> bool:
    """Open the segments of this model; return False if prefixes cannot be offloaded, or the reading was stopped.

    The first time, this reads the model's files completely to fingerprint them. `on_progress` is called with the
    fraction read and stops the reading by returning False. Raises `ConfigError`.
    """
    if not budgets.ram_bytes or info.segment_size is None:
        return False
    try:
        weights = disk.fingerprint(info.kv_files, on_progress)
        if weights is None:
            return False
        disk.open(kv_key(info, weights), _capacity(disk, config, info.segment_size.of(MAX_SEGMENT_TOKENS)))
    except OSError as error:
        raise _unusable(_DISK_FLAG, disk.folder, error) from None
    return True


def slot_save_path(config: Config) -> Path | None:
    """Return the folder of slot files; None if none is configured. Raises `ConfigError`."""
    if not config.slot_save_path:
        return None
    folder = Path(config.slot_save_path).expanduser()
    try:
        private_folder(folder)
    except OSError as error:
        raise _unusable("--slot-save-path", folder, error) from None
    return folder


def _unusable(flag: str, folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{flag}: {folder} cannot be used: {error.strerror or error}", param=flag)


def slot_files(folder: Path | None, info: ModelInfo, disk: DiskStore | None) -> SlotFiles | None:
    """Return the slot files in that folder; None if slots cannot be saved.

    Without a disk tier, the model's files are read completely (fingerprinted) when the first slot file is used.
    """
    if folder is None or info.segment_size is None:
        return None

    def key() -> bytes:
        if disk is not None and disk.key:
            return disk.key
        _log.info("slot_files.fingerprinting", files=[each.path for each in info.kv_files])
        weights = fingerprint_of(info.kv_files)
        assert weights is not None
        return kv_key(info, weights)

    return SlotFiles(folder, key, info.segment_size, info.n_ctx_slot, info.checkpoint_size)


def kv_key(info: ModelInfo, weights: bytes) -> bytes:
    """Return a digest of everything that the content of KV depends on."""
    return hashlib.blake2b(info.kv_facts.encode() + weights, digest_size=32).digest()


def auto_disk_bytes(folder: Path, n_own: int = 0) -> int:
    """Return the bytes of `--cache-disk-size auto` for an existing folder, which has `n_own` bytes of the tier."""
    return min(int((shutil.disk_usage(folder).free + n_own) * _AUTO_DISK_FRACTION), _MAX_AUTO_BYTES)


def _capacity(disk: DiskStore, config: Config, n_least: int) -> int:
    if config.cache_disk_size == "auto":
        return auto_disk_bytes(disk.folder, disk.n_bytes)
    n_bytes = config.cache_disk_size * _MIB
    if n_bytes < n_least:
        raise ConfigError(
            f"--cache-disk-size {config.cache_disk_size} is less than one segment of this model "
            f"({n_least / _MIB:,.1f} MiB)",
            param="--cache-disk-size",
        )
    return n_bytes


def remote_settings(config: Config) -> StoreSettings | None:
    """Return the settings of the remote store; None if none is configured. Raises `ConfigError`."""
    if not config.cache_remote:
        for option in ("cache_remote_key_file", "cache_remote_password_file", "cache_remote_ca"):
            if getattr(config, option):
                flag = "--" + option.replace("_", "-")
                raise ConfigError(f"{flag} needs {_REMOTE_FLAG}", param=flag)
        return None
    if config.cache_ram == 0:
        raise ConfigError(f"{_REMOTE_FLAG} needs the RAM tier, which --cache-ram 0 turns off", param=_REMOTE_FLAG)
    address = _checked_url(config.cache_remote)
    if config.cache_remote_ca and not config.cache_remote.startswith("rediss://"):
        raise ConfigError(
            "--cache-remote-ca needs TLS: a --cache-remote that begins with rediss://", param="--cache-remote-ca"
        )
    if config.cache_remote.startswith("rediss://"):
        _check_certificates(config.cache_remote_ca)
    secret = _secret(KEY_VARIABLE, config.cache_remote_key_file, "--cache-remote-key-file").encode()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"{_REMOTE_FLAG} needs a secret of at least {_MIN_SECRET_BYTES} bytes that all servers of the fleet "
            f"share: give --cache-remote-key-file or set {KEY_VARIABLE}",
            param="--cache-remote-key-file",
        )
    return StoreSettings(
        max_bytes=config.cache_remote_size * _MIB,
        ttl_s=config.cache_remote_ttl,
        timeout_s=config.cache_remote_timeout / 1e3,
        address=address,
        url=config.cache_remote,
        secret=secret,
        password=_secret(PASSWORD_VARIABLE, config.cache_remote_password_file, "--cache-remote-password-file"),
        ca_file=config.cache_remote_ca,
    )


def open_remote(
    settings: StoreSettings,
    info: ModelInfo,
    model_key: bytes | None,
    on_progress: Callable[[float], bool],
) -> RedisStore | None:
    """Return the store for a model; None if `on_progress` stopped the fingerprinting or prefixes are not offloaded.

    `model_key` is the disk tier's key. Without it, the model's files are read completely to fingerprint them. The
    connection is made on first use, so the store need not run yet. Raises `ConfigError`.
    """
    # Imported only if needed: redis takes much memory, and time to import.
    from llamaslot.backend.remote.redis_store import RedisStore, Sealer  # noqa: PLC0415
    from llamaslot.backend.remote.store_connection import connect  # noqa: PLC0415

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
    return RedisStore(connect(settings), Sealer(settings.secret, model_key), settings, info.segment_size)


def _checked_url(url: str) -> str:
    """Return the URL without user and password, for messages. Raises `ConfigError` for an unusable one."""
    try:
        parts = urlsplit(url)
        is_complete = bool(parts.path if parts.scheme == "unix" else parts.hostname and parts.port != 0)
    except ValueError as error:
        raise ConfigError(f"{_REMOTE_FLAG}: {error}", param=_REMOTE_FLAG) from None
    if parts.scheme not in _SCHEMES or not is_complete:
        raise ConfigError(
            f"{_REMOTE_FLAG} must be redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH",
            param=_REMOTE_FLAG,
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"{_REMOTE_FLAG} must not have options after '?' or '#'", param=_REMOTE_FLAG)
    if parts.password is not None:
        raise ConfigError(
            f"{_REMOTE_FLAG} must not contain the password, because other users could see it: use "
            f"--cache-remote-password-file or {PASSWORD_VARIABLE}",
            param=_REMOTE_FLAG,
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
