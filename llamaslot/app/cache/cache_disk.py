"""Folders of the disk tier (`--cache-disk`) and of slot files (`--slot-save-path`), and the key of their content.

The disk tier is locked before the model is loaded and opened afterwards.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import structlog

from llamaslot.app.cache.cache_budgets import Budgets, about_tokens
from llamaslot.app.config import Config
from llamaslot.backend.disk import DiskStore, SlotFiles, fingerprint_of
from llamaslot.backend.files import private_folder
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import ModelInfo
from llamaslot.kvcache.cache_settings import MAX_SEGMENT_TOKENS

_log = structlog.get_logger(__name__)
_FLAG = "--cache-disk"
_MIB = 2**20
_MAX_AUTO_BYTES = 64 * 2**30
"""Upper limit of `--cache-disk-size auto`."""
_AUTO_DISK_FRACTION = 0.5
"""Fraction of free disk space that `--cache-disk-size auto` uses."""


def lock_disk(config: Config) -> DiskStore | None:
    """Lock the configured folder against other servers; None if none is configured. Raises `ConfigError`."""
    if not config.cache_disk:
        return None
    if config.cache_ram == 0:
        raise ConfigError(f"{_FLAG} needs the RAM tier, which --cache-ram 0 turns off", param=_FLAG)
    folder = Path(config.cache_disk).expanduser()
    try:
        return DiskStore(folder)
    except OSError as error:
        raise ConfigError(f"{_FLAG}: {folder} cannot be used: {error.strerror or error}", param=_FLAG) from None


def open_disk(
    disk: DiskStore, config: Config, info: ModelInfo, budgets: Budgets, on_progress: Callable[[float], bool]
) -> str:
    """Open the segments of this model; return a line for the user, empty if prefixes cannot be offloaded.

    The first time, this reads the model's files completely to fingerprint them. `on_progress` is called with the
    fraction read and stops the reading by returning False. Raises `ConfigError`.
    """
    if not budgets.ram_bytes or info.segment_size is None:
        return ""
    try:
        weights = disk.fingerprint(info.kv_files, on_progress)
        if weights is None:
            return ""
        disk.open(kv_key(info, weights), _capacity(disk, config, info.segment_size.of(MAX_SEGMENT_TOKENS)))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{_FLAG}: {disk.folder} cannot be used: {reason}", param=_FLAG) from None
    n_others = disk.n_other_bytes
    others = f", {n_others / _MIB:,.1f} MiB of other models" if n_others else ""
    return (
        f"Disk stores up to {disk.capacity / _MIB:,.0f} MiB of prefixes in {disk.folder}"
        f"{about_tokens(info.segment_size, disk.capacity)}; it already contains "
        f"{(disk.n_bytes - n_others) / _MIB:,.1f} MiB of this model{others}"
    )


def slot_save_path(config: Config) -> Path | None:
    """Return the folder of slot files; None if none is configured. Raises `ConfigError`."""
    if not config.slot_save_path:
        return None
    folder = Path(config.slot_save_path).expanduser()
    try:
        private_folder(folder)
    except OSError as error:
        flag = "--slot-save-path"
        raise ConfigError(f"{flag}: {folder} cannot be used: {error.strerror or error}", param=flag) from None
    return folder


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


def _capacity(disk: DiskStore, config: Config, n_least: int) -> int:
    if config.cache_disk_size == "auto":
        return min(int((shutil.disk_usage(disk.folder).free + disk.n_bytes) * _AUTO_DISK_FRACTION), _MAX_AUTO_BYTES)
    n_bytes = config.cache_disk_size * _MIB
    if n_bytes < n_least:
        raise ConfigError(
            f"--cache-disk-size {config.cache_disk_size} is less than one segment of this model "
            f"({n_least / _MIB:,.1f} MiB)",
            param="--cache-disk-size",
        )
    return n_bytes
