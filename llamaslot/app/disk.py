"""The disk on which prefixes outlive the server: opened where it was asked for and can be used."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from llamaslot.app.config import Config
from llamaslot.app.tiers import Budgets
from llamaslot.backend.disk import DiskStore
from llamaslot.base.errors import ConfigError
from llamaslot.base.model import ModelInfo

_FLAG = "--cache-disk"
_MIB = 2**20
_MOST = 64 * 2**30
_SHARE = 0.5
"""Bytes, and share of what is free, to take at most where nothing else is said."""


def open_disk(config: Config, info: ModelInfo, budgets: Budgets) -> DiskStore | None:
    """What the configuration names, with what this model stored there before; None where nothing can be stored.

    Takes as long as it takes to read the model's files, the first time. Raises `ConfigError`.
    """
    if not config.cache_disk:
        return None
    if config.cache_ram == 0:
        raise ConfigError(f"{_FLAG} needs RAM to read into: raise --cache-ram", param=_FLAG)
    if not budgets.ram_bytes:
        return None
    disk = DiskStore(Path(config.cache_disk).expanduser())
    try:
        weights = disk.weigh([Path(each) for each in info.kv_files])
        disk.open(hashlib.blake2b(info.kv_facts.encode() + weights, digest_size=32).digest())
        n_free = shutil.disk_usage(disk.folder).free + disk.n_bytes
        if config.cache_disk_size == "auto":
            disk.capacity = min(int(n_free * _SHARE), _MOST)
        else:
            disk.capacity = config.cache_disk_size * _MIB
    except OSError as error:
        disk.close()
        raise ConfigError(f"{_FLAG} {disk.folder} cannot be used: {error}", param=_FLAG) from None
    except BaseException:
        disk.close()
        raise
    return disk


def disk_line(disk: DiskStore, info: ModelInfo) -> str:
    """What is stored where, to print."""
    assert info.segment_size is not None
    n_bytes = sum(record.n_bytes for record in disk.records)
    n_tokens = disk.capacity // info.segment_size.per_token
    return (
        f"{disk.folder} stores {disk.capacity / _MIB:,.0f} MiB of prefixes, about {n_tokens:,} tokens; "
        f"{n_bytes / _MIB:,.0f} MiB are there already"
    )
