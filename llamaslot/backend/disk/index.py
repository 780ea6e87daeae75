"""The index of a disk tier: which segments there are, on which paths, in which order they were used.

An SQLite file in WAL mode, so that it is whole whenever the process ends. Each row has its own tokens alone: those
before it are with the row that it names as its parent, which is there as long as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamaslot.backend.disk.texts import ANCHORS_SCHEMA, SESSIONS_SCHEMA, Texts
from llamaslot.kvcache.offload.disk_io import SegmentMeta

_SCHEMA_VERSION = 4
_MOST = 2**62
_SCHEMA = """
    CREATE TABLE segments (
        number INTEGER PRIMARY KEY,
        key BLOB NOT NULL,
        parent INTEGER,
        namespace TEXT NOT NULL,
        start INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        n_bytes INTEGER NOT NULL,
        path BLOB NOT NULL,
        checksum BLOB NOT NULL,
        used INTEGER NOT NULL
    );
    CREATE INDEX segments_by_use ON segments (used);
    CREATE TABLE weights (
        path TEXT PRIMARY KEY,
        stat TEXT NOT NULL,
        digest BLOB NOT NULL
    );
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Metadata of a segment, and what its file must match."""

    meta: SegmentMeta
    key: bytes
    checksum: bytes


class Index:
    """Used by one thread at a time. Every method but `close` raises `sqlite3.Error` where the file is unusable."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            with named_errors():
                self._prepare()
        except sqlite3.Error:
            self._database.close()
            raise
        self._last_use = 0
        self.texts = Texts(self._database)
        """What is kept of texts; its errors may be Python's too, see `named_errors`."""

    def rows(self) -> list[Row]:
        """All segments, the least recently used first; to be called before any is added or used."""
        columns = "number, parent, namespace, start, tokens, n_bytes, path, key, checksum, used"
        with named_errors():
            found = list(self._database.execute(f"SELECT {columns} FROM segments ORDER BY used"))
        rows = [_row(row) for row in found]
        self._last_use = found[-1][-1] if found else 0
        return rows

    def add(self, row: Row) -> None:
        """Note a segment, as the last used."""
        meta = row.meta
        self._last_use += 1
        self._database.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(meta.number, row.key, meta.parent, meta.namespace, meta.start, meta.tokens),
                *(meta.n_bytes, meta.path_digest, row.checksum, self._last_use),
            ),
        )

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget segments."""
        self._change("DELETE FROM segments WHERE number = ?", ((number,) for number in numbers))

    def use(self, numbers: Sequence[int]) -> None:
        """Note that segments were used, in this order."""
        uses = [(self._last_use + i, number) for i, number in enumerate(numbers, 1)]
        self._last_use += len(uses)
        self._change("UPDATE segments SET used = ? WHERE number = ?", uses)

    def digest(self, path: str, stat: str) -> bytes | None:
        """What was noted for a file of weights, if it is still the same file."""
        with named_errors():
            found = self._database.execute("SELECT digest FROM weights WHERE (path, stat) = (?, ?)", (path, stat))
            row = found.fetchone()
        return row[0] if row and isinstance(row[0], bytes) else None

    def note_digest(self, path: str, stat: str, digest: bytes) -> None:
        """Remember the digest of a file of weights."""
        self._database.execute("REPLACE INTO weights VALUES (?, ?, ?)", (path, stat, digest))

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _prepare(self) -> None:
        execute = self._database.execute
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        version: int = execute("PRAGMA user_version").fetchone()[0]
        is_new = not execute("SELECT 1 FROM sqlite_master").fetchone()
        if version == 0 and is_new:
            schema = _SCHEMA + ANCHORS_SCHEMA + SESSIONS_SCHEMA
            self._database.executescript(f"BEGIN; {schema} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
        elif version != _SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"its version is {version}, not {_SCHEMA_VERSION}")

    def _change(self, statement: str, rows: Iterable[tuple[int, ...]]) -> None:
        self._database.execute("BEGIN")
        try:
            self._database.executemany(statement, rows)
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


@contextmanager
def named_errors() -> Iterator[None]:
    """Python trips over what a damaged file makes SQLite say."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(str(error)) from None


def _row(columns: tuple[Any, ...]) -> Row:
    """Raises `sqlite3.DatabaseError` for what cannot have been written."""
    number, parent, namespace, start, tokens, n_bytes, path, key, checksum, used = columns
    ints = (number, start, n_bytes, used, *(() if parent is None else (parent,)))
    if not (
        all(isinstance(each, int) and 0 <= each < _MOST for each in ints)
        and isinstance(namespace, str)
        and all(isinstance(each, bytes) for each in (tokens, path, key, checksum))
    ):
        raise sqlite3.DatabaseError("a row has something of another type")
    return Row(SegmentMeta(number, parent, namespace, start, tokens, n_bytes, path), key, checksum)
