"""A folder of segments that outlives the server: `Disk` on files.

    lock            held by the one server that uses the folder
    index.sqlite    which segments there are, on which paths; what is remembered of texts
    segments/       their KV, a file each
    bad/            what was not as it was written, the last few of it

A file comes before its row and goes after it, so a row without a file means that somebody took the file, and a file
without a row is left over from a server that was killed: both are forgotten when the folder is opened. What was
stored with another model, or another way to run it, stays as long as there is room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
import xxhash

from llamaslot.backend.disk import files
from llamaslot.backend.disk.files import BadFileError
from llamaslot.backend.disk.index import Index, Row, named_errors
from llamaslot.base.errors import ConfigError
from llamaslot.base.kv_ops import Kv
from llamaslot.kvcache.offload.disk_io import CorruptSegmentError, SegmentMeta
from llamaslot.prompts.sessions import Session
from llamaslot.prompts.text_anchors import TextAnchor

_MOST_BAD = 8
"""Files to keep that were not as they were written."""
_IS_OURS = re.compile(r"\d{12}\.(kv|tmp)|index\.sqlite.*").fullmatch
_CHUNK = 2**24
"""Bytes of weights to read at a time."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class _File(NamedTuple):
    """What a file must have."""

    n_bytes: int
    path_digest: bytes
    checksum: bytes


class DiskStore:
    """See `Disk`. First `weigh` the model's files, then `open` with a key made of that."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` where another server uses the folder, `OSError` where it cannot be used."""
        self.folder = folder
        self.capacity = 0
        self.first_number = 0
        self.n_bytes = 0
        """What all segments take, those of other keys too."""
        self.n_own_bytes = 0
        """Of them, those of this key."""
        self._segments = folder / "segments"
        self._bad = folder / "bad"
        self._own: dict[int, _File] = {}
        """What was stored with this key; the reading thread only looks single ones up."""
        self._others: dict[int, int] = {}
        """Bytes of what was stored with other keys, the least recently used first."""
        self._found: list[Row] = []
        """What the index had."""
        self.key = b""
        """What everything that is written belongs to; empty until it is opened."""
        for each in (folder, self._segments, self._bad):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(folder / "lock")
        try:
            self._index = self._opened_index()
            self._found = _ends_first(self._index_rows())
            self.n_bytes = sum(row.meta.n_bytes for row in self._found)
        except BaseException:
            os.close(self._lock)
            raise

    def fingerprint(self, paths: Sequence[Path], on_progress: Callable[[float], bool]) -> bytes | None:
        """A digest of these files, remembered until one of them changes; reads them whole the first time.

        None once `on_progress`, which gets the share read, has returned False. Raises `OSError`.
        """
        digest = xxhash.xxh3_128()
        for path in paths:
            about = path.stat()
            stat = f"{about.st_size} {about.st_mtime_ns} {about.st_ino}"
            name = str(path.resolve())
            known = self._known_digest(name, stat)
            if known is None:
                known = _digest(path, about.st_size, on_progress)
                if known is None:
                    return None
                with contextlib.suppress(sqlite3.Error):
                    self._index.note_digest(name, stat, known)
            digest.update(known)
        return digest.digest()

    def _known_digest(self, name: str, stat: str) -> bytes | None:
        try:
            return self._index.digest(name, stat)
        except sqlite3.Error as error:
            _log.warning("disk.digest_lost", path=name, error=str(error))
            return None

    def open(self, key: bytes, capacity: int) -> None:
        """Find out what is stored under a key of `files.KEY_BYTES`, drop what is not whole, keep to so many bytes.

        Raises `OSError`.
        """
        self.key, self.capacity = key, capacity
        sizes = {each.name: each.stat().st_size for each in self._segments.iterdir() if _IS_OURS(each.name)}
        lost = []
        for row in self._found:
            number, n_bytes = row.meta.number, row.meta.n_bytes
            self.first_number = max(self.first_number, number + 1)
            self._others[number] = n_bytes
            if sizes.pop(_name(number), None) != files.size(n_bytes):
                lost.append(number)
            elif row.key == key:
                del self._others[number]
                self._note(row)
        self._found = [row for row in self._found if row.meta.number in self._own]
        self.erase(lost)
        for name in sizes:
            (self._segments / name).unlink()
        if lost or sizes:
            _log.info("disk.tidied", rows_without_file=len(lost), files_without_row=len(sizes))

    def take_segments(self) -> list[SegmentMeta]:
        """See `Disk.take_segments`."""
        found, self._found = self._found, []
        return [row.meta for row in found]

    def write(self, meta: SegmentMeta, kv: Kv) -> bool:
        """See `Disk.write`."""
        path = self._path(meta.number)
        try:
            self._make_room(meta.n_bytes)
            row = Row(meta, self.key, files.write(path, self.key, meta.path_digest, kv))
            try:
                self._index.add(row)
            except BaseException:
                path.unlink()
                raise
        except (OSError, sqlite3.Error) as error:
            _log.warning("disk.write_failed", segment=meta.number, error=str(error))
            return False
        self._note(row)
        self.n_bytes += meta.n_bytes
        return True

    def read(self, number: int) -> Kv | None:
        """See `Disk.read`; a file that is not as it was written is moved aside."""
        file = self._own.get(number)
        if file is None:
            raise CorruptSegmentError(f"segment {number} is not here")
        path = self._path(number)
        try:
            return files.read(path, self.key, file.path_digest, file.n_bytes, file.checksum)
        except BadFileError as error:
            _log.warning("disk.bad_file", segment=number, error=str(error), moved_to=str(self._bad))
            with contextlib.suppress(OSError):
                self._set_aside(path)
            raise CorruptSegmentError(str(error)) from None
        except FileNotFoundError:
            _log.warning("disk.file_is_gone", segment=number)
            raise CorruptSegmentError("the file is gone") from None
        except (OSError, MemoryError) as error:
            _log.warning("disk.read_failed", segment=number, error=str(error) or type(error).__name__)
        return None

    def erase(self, numbers: Sequence[int]) -> None:
        """See `Disk.erase`."""
        try:
            self._index.remove(numbers)
        except sqlite3.Error as error:
            _log.warning("disk.erase_failed", error=str(error))
        for number in numbers:
            file = self._own.pop(number, None)
            self.n_own_bytes -= file.n_bytes if file is not None else 0
            self.n_bytes -= file.n_bytes if file is not None else self._others.pop(number, 0)
            with contextlib.suppress(OSError):
                self._path(number).unlink(missing_ok=True)

    def ignore(self, numbers: Sequence[int]) -> None:
        """See `SegmentDisk.ignore`."""
        for number in numbers:
            self._others[number] = self._own.pop(number).n_bytes
            self.n_own_bytes -= self._others[number]

    def mark_used(self, numbers: Sequence[int]) -> None:
        """See `SegmentDisk.mark_used`."""
        try:
            self._index.use(numbers)
        except sqlite3.Error as error:
            _log.warning("disk.use_failed", error=str(error))

    def anchors(self) -> list[TextAnchor]:
        """See `Disk.anchors`."""
        return self._of_texts(self._index.texts.anchors, otherwise=[])

    def write_anchor(self, anchor: TextAnchor) -> None:
        """See `Disk.write_anchor`."""
        self._of_texts(self._index.texts.add_anchor, anchor, otherwise=None)

    def sessions(self) -> list[tuple[bytes, Session]]:
        """See `Disk.sessions`."""
        return self._of_texts(self._index.texts.sessions, otherwise=[])

    def write_session(self, digest: bytes, session: Session) -> None:
        """See `Disk.write_session`."""
        self._of_texts(self._index.texts.put_session, digest, session, otherwise=None)

    def drop_session(self, digest: bytes) -> None:
        """See `Disk.drop_session`."""
        self._of_texts(self._index.texts.drop_session, digest, otherwise=None)

    def clear_texts(self) -> None:
        """See `Disk.clear_texts`."""
        self._of_texts(self._index.texts.clear, otherwise=None)

    def close(self) -> None:
        """See `Disk.close`."""
        self._index.close()
        os.close(self._lock)

    def _of_texts(self, method: Callable[..., T], *arguments: object, otherwise: T) -> T:
        """What a method of `Texts` gives for this key, or something else where the index is unusable."""
        try:
            with named_errors():
                return method(self.key, *arguments)
        except sqlite3.Error as error:
            _log.warning("disk.texts_failed", error=str(error))
            return otherwise

    def _note(self, row: Row) -> None:
        meta = row.meta
        self._own[meta.number] = _File(meta.n_bytes, meta.path_digest, row.checksum)
        self.n_own_bytes += meta.n_bytes

    def _make_room(self, n_bytes: int) -> None:
        """Erase of what was stored with other keys what leaves no room for so many bytes; the core sees to the
        rest.
        """
        gone = []
        n_over = self.n_bytes + n_bytes - self.capacity
        for number, n_other in self._others.items():
            if n_over <= 0:
                break
            n_over -= n_other
            gone.append(number)
        if gone:
            self.erase(gone)

    @property
    def _index_path(self) -> Path:
        return self.folder / "index.sqlite"

    def _opened_index(self) -> Index:
        # SQLite gives the files beside it the same mode.
        os.close(os.open(self._index_path, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            return Index(self._index_path)
        except sqlite3.Error as error:
            self._set_index_aside(error)
            return self._opened_index()

    def _index_rows(self) -> list[Row]:
        try:
            return self._index.rows()
        except sqlite3.Error as error:
            self._index.close()
            self._set_index_aside(error)
            self._index = self._opened_index()
            return []

    def _set_index_aside(self, error: sqlite3.Error) -> None:
        """Start without an index that is damaged; raises `OSError` for what has another reason."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise OSError(f"{self._index_path}: {error}") from error
        _log.warning("disk.bad_index", error=str(error), moved_to=str(self._bad))
        for suffix in ("", "-wal", "-shm"):
            path = self.folder / f"{self._index_path.name}{suffix}"
            if path.exists():
                self._set_aside(path)

    def _set_aside(self, path: Path) -> None:
        path.replace(self._bad / path.name)
        ours = [each for each in self._bad.iterdir() if _IS_OURS(each.name)]
        kept = sorted(ours, key=lambda each: each.stat().st_mtime_ns)
        for each in kept[:-_MOST_BAD]:
            each.unlink()

    def _path(self, number: int) -> Path:
        return self._segments / _name(number)


def _name(number: int) -> str:
    return f"{number:012}.kv"


def _ends_first(rows: Sequence[Row]) -> list[Row]:
    """Rows by their last use, none before those behind it: only the use of a path's end is noted."""
    uses = {row.meta.number: i for i, row in enumerate(rows)}
    for row in sorted(rows, key=lambda row: -row.meta.start):
        parent = row.meta.parent
        if parent in uses:
            uses[parent] = max(uses[parent], uses[row.meta.number])
    return sorted(rows, key=lambda row: (uses[row.meta.number], -row.meta.start))


def _locked(path: Path) -> int:
    """A descriptor that holds the lock until it is closed, if only by the end of the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise
        reason = f"another server uses {path.parent}; give each its own --cache-disk"
        raise ConfigError(reason, param="--cache-disk") from None
    return descriptor


def fingerprint_of(paths: Sequence[Path]) -> bytes:
    """A digest of these files, which are read whole: what `DiskStore.fingerprint` gives. Raises `OSError`."""
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(_digest(path, path.stat().st_size, lambda _: True) or b"")
    return digest.digest()


def _digest(path: Path, n_bytes: int, on_progress: Callable[[float], bool]) -> bytes | None:
    digest = xxhash.xxh3_128()
    n_read = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            n_read += len(chunk)
            if not on_progress(n_read / n_bytes):
                return None
    return digest.digest()
