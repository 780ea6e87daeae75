"""Index of the disk tier: an SQLite file with the metadata of all segments, and records of the token memory.

Segments are in the order of their last use. In WAL mode the file stays consistent whenever the process ends. Each
row has only its segment's own tokens: those before them are in the row of its parent segment, which is never
deleted first.

Each row of a text has a checksum, because SQLite does not notice a changed byte, and belongs to a key, because
other models have other tokens. A damaged row is skipped, so that its text is tokenized again.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from llamaslot.backend.storage import FailureLog
from llamaslot.base import text_records
from llamaslot.base.text_records import TextRecord
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.cache_settings import MAX_SEGMENT_TOKENS
from llamaslot.kvcache.disk_io import SegmentMeta

_SCHEMA_VERSION = 5
_INTEGER_LIMIT = 2**62
"""Exclusive limit of integers in the index; a larger one means that the row is damaged."""
_TEXTS_FORMAT = 2
"""A part of the checksum: rows of another format are skipped. To be raised with changes of the records."""
_TRIM_INTERVAL = 256
"""Number of rows of texts written between two checks of their limit."""
_MAX_LENGTHS = {
    "segments": {
        "namespace": 2**12,
        "tokens": MAX_SEGMENT_TOKENS * WIDTH,
        **dict.fromkeys(("path_digest", "key", "checksum"), 64),
    },
    "texts": dict.fromkeys(("key", "kind", "digest", "parent", "session", "checksum"), 2**10),
}
"""Most bytes of written values, by table and column. Checked at start, because the file is not trusted. The content
of texts is limited for all rows together (`_trim`).
"""
_SCHEMA = """
    CREATE TABLE segments (
        number INTEGER PRIMARY KEY,
        parent INTEGER,
        namespace TEXT NOT NULL,
        start INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        n_bytes INTEGER NOT NULL,
        path_digest BLOB NOT NULL,
        key BLOB NOT NULL,
        checksum BLOB NOT NULL,
        last_use INTEGER NOT NULL
    );
    CREATE INDEX segments_by_use ON segments (last_use);
    CREATE TABLE file_digests (
        path TEXT PRIMARY KEY,
        version TEXT NOT NULL,
        digest BLOB NOT NULL
    );
"""
_WRITES_SCHEMA = """
    CREATE TABLE IF NOT EXISTS writes (
        id INTEGER PRIMARY KEY CHECK (id = 0),
        total_bytes INTEGER NOT NULL,
        budget_bytes INTEGER NOT NULL,
        written_at REAL NOT NULL
    );
"""
"""Bytes written to the folder. Created if missing, so that folders of earlier versions stay usable."""
_TEXTS_SCHEMA = """
    CREATE TABLE IF NOT EXISTS texts (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL,
        kind TEXT NOT NULL,
        digest BLOB NOT NULL,
        parent BLOB NOT NULL,
        session BLOB NOT NULL,
        content BLOB NOT NULL,
        checksum BLOB NOT NULL,
        UNIQUE (key, kind, digest)
    );
    DROP TABLE IF EXISTS anchors;
    DROP TABLE IF EXISTS sessions;
    DROP TABLE IF EXISTS replies;
"""
"""Created if missing, in place of the tables of earlier versions, so that their folders stay usable."""
_COLUMN_TYPES = (int, int, str, int, bytes, int, bytes, bytes, bytes, int)
_ROOT_COLUMN_TYPES = (int, type(None), *_COLUMN_TYPES[2:])
INDEX_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors of an unusable index. SQLite's messages about a damaged file are not always UTF-8, as Python expects."""

_decode_text = msgspec.msgpack.Decoder(TextRecord).decode
_MAX_VALUE_BYTES = 2**25
"""Most bytes of a value or row. As much as a remembered text may have; a damaged file might announce a gigabyte."""


class Database:
    """An SQLite file that several threads use one at a time. Any of them may close it.

    The lock is needed although SQLite has its own, because that does not cover Python's statements: closing the
    file during a statement of another thread crashes the process.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        self._lock = threading.Lock()

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, to this thread only. Once closed, its methods raise `sqlite3.ProgrammingError`."""
        with self._lock:
            yield self._connection

    def close(self) -> None:
        """Close the file once no thread uses it."""
        with self._lock:
            self._connection.close()


class SegmentRow(NamedTuple):
    """Metadata of a segment, and what its file must match."""

    meta: SegmentMeta
    key: bytes
    checksum: bytes


class DiskIndex:
    """An open index. Every method may raise `INDEX_ERRORS`, also after the index was closed."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path)
        self._last_use = 0
        try:
            self._prepare()
            self.initial_rows = self._rows()
            """Segments found when it was opened, the least recently used first, each after its children."""
        except INDEX_ERRORS:
            self.database.close()
            raise

    def writes(self) -> tuple[int, int, float]:
        """Return the bytes written so far, the bytes of the daily budget in use after the last write, and when that
        was (Unix time).
        """
        with self.database.use() as connection:
            row = connection.execute("SELECT total_bytes, budget_bytes, written_at FROM writes").fetchone()
        if row is None or not all(isinstance(each, int | float) and 0 <= each < _INTEGER_LIMIT for each in row):
            return 0, 0, 0.0
        return int(row[0]), int(row[1]), float(row[2])

    def set_writes(self, total_bytes: int, budget_bytes: int, written_at: float) -> None:
        """Set what `writes` returns."""
        with self.database.use() as connection:
            connection.execute("REPLACE INTO writes VALUES (0, ?, ?, ?)", (total_bytes, budget_bytes, written_at))

    def add(self, row: SegmentRow) -> None:
        """Insert a segment as the most recently used."""
        meta = row.meta
        self._last_use += 1
        values = (
            *(meta.number, meta.parent, meta.namespace, meta.start, meta.tokens, meta.n_bytes),
            *(meta.path_digest, row.key, row.checksum, self._last_use),
        )
        with self.database.use() as connection:
            connection.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def remove(self, numbers: Iterable[int]) -> None:
        """Delete segments."""
        self._change("DELETE FROM segments WHERE number = ?", ((number,) for number in numbers))

    def mark_used(self, numbers: Sequence[int]) -> None:
        """Mark segments as the most recently used, the last one as the latest."""
        uses = [(self._last_use + i, number) for i, number in enumerate(numbers, 1)]
        self._last_use += len(uses)
        self._change("UPDATE segments SET last_use = ? WHERE number = ?", uses)

    def reparent(self, numbers: Iterable[int], parent: int) -> None:
        """Change the parent of segments."""
        changes = ((parent, number) for number in numbers)
        self._change("UPDATE segments SET parent = ? WHERE number = ?", changes)

    def file_digest(self, path: str, version: str) -> bytes | None:
        """Return the digest stored for this version of a model file, if any."""
        query = "SELECT digest FROM file_digests WHERE (path, version) = (?, ?)"
        with self.database.use() as connection:
            found = connection.execute(query, (path, version)).fetchone()
        return found[0] if found and isinstance(found[0], bytes) else None

    def add_file_digest(self, path: str, version: str, digest: bytes) -> None:
        """Store the digest of a model file, replacing that of an earlier version."""
        with self.database.use() as connection:
            connection.execute("REPLACE INTO file_digests VALUES (?, ?, ?)", (path, version, digest))

    def _prepare(self) -> None:
        with self.database.use() as connection:
            execute = connection.execute
            execute("PRAGMA journal_mode = WAL")
            execute("PRAGMA synchronous = NORMAL")
            version: int = execute("PRAGMA user_version").fetchone()[0]
            is_new = not execute("SELECT 1 FROM sqlite_master").fetchone()
            if version == 0 and is_new:
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
            elif version != _SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"its version is {version}, not {_SCHEMA_VERSION}")
            connection.executescript(_WRITES_SCHEMA + _TEXTS_SCHEMA)
            for table, columns in _MAX_LENGTHS.items():
                # SQLite knows the length of a value without reading it.
                too_long = " OR ".join(f"length({name}) > {most}" for name, most in columns.items())
                if execute(f"SELECT 1 FROM {table} NOT INDEXED WHERE {too_long} LIMIT 1").fetchone():
                    raise sqlite3.DatabaseError(f"a row of {table} has a value that is too long")

    def _rows(self) -> list[SegmentRow]:
        """Return all segments by last use, each after its children.

        Only the use of a path's last segment is recorded, so parents inherit the last use of their children.
        """
        columns = "number, parent, namespace, start, tokens, n_bytes, path_digest, key, checksum, last_use"
        with self.database.use() as connection:
            found = connection.execute(f"SELECT {columns} FROM segments ORDER BY last_use").fetchall()
        rows = {row[0]: _checked(row) for row in found}
        self._last_use = found[-1][-1] if found else 0
        last_uses = {row[0]: row[-1] for row in found}
        for number, row in sorted(rows.items(), key=lambda item: -item[1].meta.start):
            parent = row.meta.parent
            if parent in last_uses:
                last_uses[parent] = max(last_uses[parent], last_uses[number])
        return sorted(rows.values(), key=lambda row: (last_uses[row.meta.number], -row.meta.start))

    def _change(self, statement: str, rows: Iterable[tuple[int, ...]]) -> None:
        with self.database.use() as connection, connection:  # commits or rolls back, but does not begin
            connection.execute("BEGIN")
            connection.executemany(statement, rows)


def _checked(columns: tuple[Any, ...]) -> SegmentRow:
    """Convert a row; raises `sqlite3.DatabaseError` for values that are never written. SQLite checks no types."""
    if tuple(map(type, columns)) not in (_COLUMN_TYPES, _ROOT_COLUMN_TYPES):
        raise sqlite3.DatabaseError("a row has values of other types")
    if not all(0 <= each < _INTEGER_LIMIT for each in columns if isinstance(each, int)):
        raise sqlite3.DatabaseError("a row has an integer out of range")
    return SegmentRow(SegmentMeta(*columns[:7]), *columns[7:9])


class TextTable:
    """Records of one key (`TextStore`), the latest written last.

    Failures are only logged. A deletion that failed is repeated before the next change.
    """

    def __init__(self, database: Database, key: bytes, failures: FailureLog) -> None:
        self._database = database
        self._key = key
        self._failures = failures
        self._n_written = 0
        self._deletes: dict[tuple[str, tuple[bytes, ...]], None] = {}
        """Statements and parameters of deletions that are still to be done."""

    def records(self) -> list[TextRecord]:
        """Return the intact records, the oldest first."""
        found: list[TextRecord] = []
        query = "SELECT kind, digest, parent, session, content, checksum FROM texts WHERE key = ? ORDER BY number"
        with self._use() as connection:
            _trim(connection)
            for *row, checksum in connection.execute(query, (self._key,)):
                if checksum == _checksum(row):
                    with suppress(msgspec.MsgspecError):
                        found.append(_decode_text(row[-1]))
        return found

    def write(self, record: TextRecord) -> None:
        """Write a record, replacing an earlier one of the same kind and key."""
        kind = str(record.__struct_config__.tag)
        row = [kind, record.key, record.parent, record.session, msgspec.msgpack.encode(record)]
        with self._use() as connection:
            self._delete(connection)
            connection.execute(
                "REPLACE INTO texts (key, kind, digest, parent, session, content, checksum) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (self._key, *row, _checksum(row)),
            )
            self._n_written += 1
            if self._n_written % _TRIM_INTERVAL == 0:
                _trim(connection)

    def drop_session(self, digest: bytes) -> None:
        """Delete a session, its branches, replies and text anchors."""
        self._deletes["DELETE FROM texts WHERE key = ? AND session = ?", (self._key, digest)] = None
        self.delete_again()

    def clear_texts(self) -> None:
        """Delete all records."""
        self._deletes = {("DELETE FROM texts WHERE key = ?", (self._key,)): None}
        self.delete_again()

    def delete_again(self) -> bool:
        """Retry deletions that failed; returns True if none is left."""
        if self._deletes:
            with self._use() as connection:
                self._delete(connection)
        return not self._deletes

    def _delete(self, connection: sqlite3.Connection) -> None:
        for statement, values in list(self._deletes):
            connection.execute(statement, values)
            del self._deletes[statement, values]

    @contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """Give the caller the connection, and log errors of an unusable index."""
        try:
            with self._database.use() as connection:
                yield connection
        except INDEX_ERRORS as error:
            self._failures.add("disk.text_tables_failed", error)


def _trim(connection: sqlite3.Connection) -> None:
    """Delete the oldest rows beyond the limit, of any key, and those that continue a row that is gone."""
    n_deleted = connection.execute(
        "DELETE FROM texts WHERE number IN (SELECT number FROM (SELECT number, sum(length(content) + ?) "
        "OVER (ORDER BY number DESC) AS n_bytes FROM texts) WHERE n_bytes > ?)",
        (text_records.OVERHEAD, text_records.MAX_BYTES),
    ).rowcount
    while n_deleted:
        n_deleted = connection.execute(
            "DELETE FROM texts WHERE parent != x'' AND NOT EXISTS (SELECT 1 FROM texts AS other "
            "WHERE (other.key, other.kind, other.digest) = (texts.key, texts.kind, texts.parent))"
        ).rowcount


def _checksum(row: list[Any]) -> bytes:
    """Return a digest of the values of a row and of their types."""
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode([_TEXTS_FORMAT, *row]))
