"""Disk store: a folder with segments and the token memory's records, which survive restarts.

    lock            held by the one server that uses the folder
    index.sqlite    metadata of the segments; records of the token memory
    segments/       KV of the segments, one file each
    corrupt/        the last few files that differed from what was written

A segment's file has a header that identifies it, then its KV as the backend saved it:

    magic, format version, length of the KV, key of model and settings, path digest, checksum of the KV

It is verified byte for byte before it is used, because llama.cpp loads flipped bits without an error, and aborts
the process if bytes are missing. KV is valid only for exactly the weights that computed it, so the key contains a
fingerprint of the model's files.

A file is written before its row and deleted after it. So if a row has no file, somebody removed the file, and if a
file has no row, a server was killed: both are deleted when the folder is opened. Segments of another model, or of
other settings, stay until their space is needed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
import xxhash

from llamaslot.backend.disk.disk_index import INDEX_ERRORS, DiskIndex, SegmentRow, TextTable
from llamaslot.backend.host import new_kv
from llamaslot.backend.storage import FailureLog, open_private, open_regular, private_folder, write_atomically
from llamaslot.base.errors import ConfigError
from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import ModelFile
from llamaslot.kvcache.disk_io import CorruptSegmentError, SegmentMeta, WriteTotals

_MAX_CORRUPT_FILES = 8
"""Most corrupt files that are kept for inspection."""
_UNUSABLE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG)
"""SQLite's error codes for a corrupt index, which is replaced by a new one."""
_IS_OURS = re.compile(r"\d{12}\.(kv|tmp)|index\.sqlite.*").fullmatch

VERSION = 1
KEY_BYTES = 32
_MAGIC = b"llamslot"
_HEADER = struct.Struct(f"<8sQQ{KEY_BYTES}s16s16s")
_HASH_CHUNK_BYTES = 2**20
"""Bytes to hash at a time, so that other threads need not wait for the GIL during a whole segment."""

_CHUNK_BYTES = 2**24

_log = structlog.get_logger(__name__)


class _File(NamedTuple):
    """Index entry of a segment, which its file must match."""

    n_bytes: int
    path_digest: bytes
    checksum: bytes

    @classmethod
    def of(cls, row: SegmentRow) -> _File:
        return cls(row.meta.n_bytes, row.meta.path_digest, row.checksum)


class DiskStore:
    """`SegmentDisk` in a folder.

    Call `fingerprint` for the model's files first, then `open` with a key derived from the fingerprint.
    """

    def __init__(self, folder: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Raises `ConfigError` if another server uses the folder, `OSError` if it cannot be used."""
        self.folder = folder
        self._wall_clock = wall_clock
        self._failures = FailureLog()
        self.capacity = 0
        self.first_number = 0
        self.key = b""
        """Digest of everything that the KV depends on: model and settings. Empty until `open`."""
        self.texts: TextTable
        """Records of the token memory of the key, from `open` on."""
        self._segments = folder / "segments"
        self._corrupt = folder / "corrupt"
        self._own: dict[int, _File] = {}
        """Segments of the key. The reading thread only looks up single ones."""
        self._others: dict[int, _File] = {}
        """Segments of other keys, and ignored ones, the least recently used first."""
        self._unerased: dict[int, int] = {}
        """KV bytes of segments whose deletion failed, by number; 0 if only the row is left."""
        private_folder(folder)
        for each in (self._segments, self._corrupt):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "is a symlink", str(each))
            each.chmod(0o700)
        self._lock = _locked(folder / "lock")
        try:
            self._index = self._opened_index()
        except BaseException:
            os.close(self._lock)
            raise
        self.n_bytes = sum(row.meta.n_bytes for row in self._index.initial_rows)
        """KV bytes of all segments, including those whose deletion failed."""
        total_bytes, budget_used_bytes, written_at = self._index.writes()
        self.written = WriteTotals(total_bytes, budget_used_bytes, max(0.0, wall_clock() - written_at))
        """Bytes that earlier servers wrote, read from the index when it was opened."""
        self._n_written = total_bytes

    @property
    def n_other_bytes(self) -> int:
        """KV bytes of segments of other keys, and of ignored ones."""
        return sum(file.n_bytes for file in self._others.values())

    def fingerprint(self, files: Sequence[ModelFile], on_progress: Callable[[float], bool]) -> bytes | None:
        """Return `fingerprint_of` these files; those that have not changed are not read again."""
        return fingerprint_of(files, on_progress, self._index)

    def open(self, key: bytes, capacity: int) -> None:
        """Use the segments of a key of `KEY_BYTES`, within `capacity` bytes. Deletes incomplete ones.

        Raises `OSError`.
        """
        self.key, self.capacity = key, capacity
        self.texts = TextTable(self._index.database, key, self._failures)
        sizes = {each.name: each.lstat().st_size for each in self._segments.iterdir() if _IS_OURS(each.name)}
        lost = []
        for row in self._index.initial_rows:
            number = row.meta.number
            self.first_number = max(self.first_number, number + 1)
            (self._own if row.key == key else self._others)[number] = _File.of(row)
            if sizes.pop(self._path(number).name, None) != file_size(row.meta.n_bytes):
                lost.append(number)
        self.erase(lost)
        for name in sizes:
            (self._segments / name).unlink()
        if lost or sizes:
            _log.info("disk.orphans_removed", rows_without_file=len(lost), files_without_row=len(sizes))

    def take_segments(self) -> list[SegmentMeta]:
        """Return the segments found at `open`, the least recently used first, and free the list."""
        rows, self._index.initial_rows = self._index.initial_rows, []
        return [row.meta for row in rows if row.meta.number in self._own]

    def write(self, meta: SegmentMeta, kv: Kv) -> bool:
        """Write a segment durably; returns False if that failed."""
        path = self._path(meta.number)
        try:
            self._evict_others(meta.n_bytes)
            row = SegmentRow(meta, self.key, write_segment(path, self.key, meta.path_digest, kv))
            self._index.add(row)
        except (OSError, *INDEX_ERRORS) as error:
            self._failures.add("disk.write_failed", error, segment=meta.number)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return False
        self._own[meta.number] = _File.of(row)
        self.n_bytes += meta.n_bytes
        return True

    def count_write(self, n_bytes: int, budget_used_bytes: int) -> None:
        """Store for the next start that `n_bytes` more were written, and how much of the daily budget is in use."""
        self._n_written += n_bytes
        with self._logged("disk.count_failed"):
            self._index.set_writes(self._n_written, budget_used_bytes, self._wall_clock())

    def read(self, number: int) -> Kv | None:
        """Return the KV of a segment exactly as it was written; None if it cannot be read now.

        Raises `CorruptSegmentError` if it can never be read. A corrupt file is moved to `corrupt/`.
        """
        file = self._own.get(number)
        if file is None:
            raise CorruptSegmentError(f"segment {number} is not here")
        path = self._path(number)
        try:
            return read_segment(path, self.key, *file)
        except CorruptFileError as error:
            self._failures.add("disk.corrupt_file", error, segment=number, moved_to=str(self._corrupt))
            with contextlib.suppress(OSError):
                self._move_aside(path)
            raise CorruptSegmentError(str(error)) from None
        except FileNotFoundError as error:
            self._failures.add("disk.file_missing", error, segment=number)
            raise CorruptSegmentError("the file is gone") from None
        except (OSError, MemoryError) as error:
            self._failures.add("disk.read_failed", error, segment=number)
        return None

    def erase(self, numbers: Sequence[int]) -> None:
        """Delete segments, and retry earlier deletions that failed. Some of them may never have been written."""
        for number in numbers:
            file = self._own.pop(number, None) or self._others.pop(number, None)
            if file is not None:
                self._unerased[number] = file.n_bytes
        given = dict.fromkeys([*numbers, *self._unerased])
        has_rows = True
        with self._logged("disk.erase_failed"):
            self._index.remove(given)
            has_rows = False
        for number in given:
            try:
                self._path(number).unlink(missing_ok=True)
            except OSError as error:
                self._failures.add("disk.erase_failed", error, segment=number)
                continue
            if number in self._unerased:
                self.n_bytes -= self._unerased.pop(number)
                if has_rows:
                    self._unerased[number] = 0

    def delete_again(self) -> bool:
        """Retry deletions that failed; returns True if none is left."""
        if self._unerased:
            self.erase(())
        return self.texts.delete_again() and not self._unerased

    def ignore(self, numbers: Sequence[int]) -> None:
        """Keep these segments only until their space is needed."""
        for number in numbers:
            self._others[number] = self._own.pop(number)

    def mark_used(self, numbers: Sequence[int]) -> None:
        """Mark segments as the most recently used, the last one as the latest."""
        with self._logged("disk.mark_used_failed"):
            self._index.mark_used(numbers)

    def reparent(self, numbers: Sequence[int], parent: int) -> None:
        """Record a new parent of segments. If that fails, they are deleted at the next start."""
        with self._logged("disk.reparent_failed"):
            self._index.reparent(numbers, parent)

    def close(self) -> None:
        """Release the folder for other servers."""
        self._index.database.close()
        os.close(self._lock)

    @contextlib.contextmanager
    def _logged(self, event: str) -> Iterator[None]:
        """Log errors of an unusable index, rather than raise them."""
        try:
            yield
        except INDEX_ERRORS as error:
            self._failures.add(event, error)

    def _evict_others(self, n_bytes: int) -> None:
        """Delete segments of other keys until `n_bytes` more fit. Segments of this key are evicted by the cache."""
        if self._unerased and self.n_bytes + n_bytes > self.capacity:
            self.erase(())
        evicted = []
        n_over = self.n_bytes + n_bytes - self.capacity
        for number, file in self._others.items():
            if n_over <= 0:
                break
            n_over -= file.n_bytes
            evicted.append(number)
        if evicted:
            self.erase(evicted)

    def _opened_index(self) -> DiskIndex:
        """Open the index, replacing a corrupt one by a new one. Raises `OSError` if that is impossible."""
        path = self.folder / "index.sqlite"
        # SQLite creates its journal files with the mode of the index, so all are made private here.
        for each in (path, *self.folder.glob(f"{path.name}-*")):
            os.close(open_private(each))
        try:
            return DiskIndex(path)
        except INDEX_ERRORS as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in _UNUSABLE:
                raise OSError(f"{path}: {error}") from error
            _log.warning("disk.corrupt_index", error=str(error), moved_to=str(self._corrupt))
            for each in self.folder.glob(f"{path.name}*"):
                self._move_aside(each)
        return self._opened_index()

    def _move_aside(self, path: Path) -> None:
        path.replace(self._corrupt / path.name)
        ours = [each for each in self._corrupt.iterdir() if _IS_OURS(each.name)]
        oldest_first = sorted(ours, key=lambda each: each.stat().st_mtime_ns)
        for each in oldest_first[:-_MAX_CORRUPT_FILES]:
            each.unlink()

    def _path(self, number: int) -> Path:
        return self._segments / f"{number:012}.kv"


def _locked(path: Path) -> int:
    """Return a descriptor that holds the lock until it is closed, at the latest when the process ends."""
    descriptor = open_private(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise
        reason = f"another server uses {path.parent}; give each its own --cache-disk"
        raise ConfigError(reason, param="--cache-disk") from None
    return descriptor


class CorruptFileError(Exception):
    """A file's content differs from what was written."""


def file_size(n_kv_bytes: int) -> int:
    """Return the size of the file of a segment with `n_kv_bytes` of KV, in bytes."""
    return _HEADER.size + n_kv_bytes


def checksum_of(*views: memoryview) -> bytes:
    """Return the 128-bit XXH3 of these bytes."""
    digest = xxhash.xxh3_128()
    for view in views:
        for start in range(0, len(view), _HASH_CHUNK_BYTES):
            digest.update(view[start : start + _HASH_CHUNK_BYTES])
    return digest.digest()


def write_segment(path: Path, key: bytes, path_digest: bytes, kv: Kv) -> bytes:
    """Write a segment's file atomically, and return the checksum of its KV. Raises `OSError`."""
    checksum = checksum_of(kv.data)
    header = _HEADER.pack(_MAGIC, VERSION, len(kv), key, path_digest, checksum)
    write_atomically(path, [memoryview(header), kv.data], temporary=path.with_suffix(".tmp"))
    return checksum


def read_segment(path: Path, key: bytes, n_bytes: int, path_digest: bytes, checksum: bytes) -> Kv:
    """Return the KV in a segment's file.

    Raises `CorruptFileError` unless key, path digest, length and checksum match, and `OSError` if it is unreadable.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != file_size(n_bytes):
            raise CorruptFileError("its length differs from what was written")
        if file.read(_HEADER.size) != _HEADER.pack(_MAGIC, VERSION, n_bytes, key, path_digest, checksum):
            raise CorruptFileError("its header differs from what was written")
        kv = new_kv(n_bytes)
        n_read = file.readinto(kv.data)
    if n_read < n_bytes or checksum_of(kv.data) != checksum:
        raise CorruptFileError("its checksum differs from what was written")
    return kv


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
        digest = None
        if index is not None:
            try:
                digest = index.file_digest(name, file.version)
            except INDEX_ERRORS as error:
                _log.warning("disk.digest_unreadable", path=name, error=str(error))
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
