"""Fingerprints of model files: KV on disk is valid only for exactly the weights that computed it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import xxhash

from llamaslot.backend.disk.database import INDEX_ERRORS
from llamaslot.backend.disk.disk_index import DiskIndex
from llamaslot.base.model import ModelFile

_CHUNK_BYTES = 2**24
_log = structlog.get_logger(__name__)


def fingerprint_of(
    files: Sequence[ModelFile],
    on_progress: Callable[[float], bool] = lambda _: True,
    index: DiskIndex | None = None,
) -> bytes | None:
    """Return a digest of the contents of these files, which are read completely unless `index` has their digests.

    `on_progress` gets the fraction of the current file that was read. Returns None once `on_progress` has returned
    False. Raises `OSError`, also if a file has changed since it was loaded.
    """
    fingerprint = xxhash.xxh3_128()
    for file in files:
        path = Path(file.path)
        name = str(path.resolve())
        digest = _indexed_digest(index, name, file.version) if index is not None else None
        is_new = digest is None
        if digest is None:
            digest = _computed_digest(path, on_progress)
            if digest is None:
                return None
        if not file.version or ModelFile.of(path) != file:
            raise OSError(f"{path} has changed since it was loaded")
        if is_new and index is not None:
            with contextlib.suppress(*INDEX_ERRORS):
                index.add_file_digest(name, file.version, digest)
        fingerprint.update(digest)
    return fingerprint.digest()


def _indexed_digest(index: DiskIndex, name: str, version: str) -> bytes | None:
    try:
        return index.file_digest(name, version)
    except INDEX_ERRORS as error:
        _log.warning("disk.digest_unreadable", path=name, error=str(error))
        return None


def _computed_digest(path: Path, on_progress: Callable[[float], bool]) -> bytes | None:
    digest = xxhash.xxh3_128()
    n_read = 0
    with path.open("rb", buffering=0) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            n_read += len(chunk)
            if not on_progress(min(n_read / n_bytes, 1.0) if n_bytes else 1.0):
                return None
    return digest.digest()
