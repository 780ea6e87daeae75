"""Tables of text anchors, sessions and remembered replies in the index of the disk tier.

Each row has a checksum, because SQLite does not notice a changed byte, and belongs to a key, because other models
have other tokens. A damaged row is skipped, so that its text is tokenized again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import xxhash

from llamaslot.backend.disk.database import INDEX_ERRORS, Database
from llamaslot.backend.failure_log import FailureLog
from llamaslot.base.text_records import MAX_REPLIES_BYTES, REPLY_OVERHEAD, RecordKind, TextRecord, owner_of
from llamaslot.prompts import sessions, text_anchors

_TRIM_INTERVAL = 256
"""Number of rows written between two checks of the limits."""
SCHEMA = "".join(
    f"""
    CREATE TABLE {table} (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL,
        digest BLOB NOT NULL,
        parent BLOB NOT NULL,
        content BLOB NOT NULL,
        checksum BLOB NOT NULL,
        UNIQUE (key, digest)
    );
    """
    for table in ("anchors", "sessions", "replies")
)
MAX_LENGTHS = {
    table: dict.fromkeys(("key", "digest", "parent", "checksum"), 2**10)
    for table in ("anchors", "sessions", "replies")
}
"""Most bytes of written values, by table and column. The content is limited for all rows together (`_trim`)."""
_TABLES: dict[RecordKind, str] = {"anchor": "anchors", "session": "sessions", "reply": "replies"}
_encode = msgspec.msgpack.encode


class TextTables:
    """Text anchors, sessions and remembered replies of one key (`TextStore`), the latest written last.

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
        """Return the intact records, the oldest of each kind first."""
        return [record for kind in _TABLES for record in self._records(kind)]

    def write(self, record: TextRecord) -> None:
        """Write a record, replacing an earlier one of the same kind and digest."""
        row = [record.digest, record.parent, record.content]
        with self._use() as connection:
            self._delete(connection)
            connection.execute(
                f"REPLACE INTO {_TABLES[record.kind]} (key, digest, parent, content, checksum) "
                "VALUES (?, ?, ?, ?, ?)",
                (self._key, *row, _checksum(row)),
            )
            self._n_written += 1
            if self._n_written % _TRIM_INTERVAL == 0:
                _trim(connection)

    def drop_session(self, digest: bytes) -> None:
        """Delete a session and its branches."""
        for table in ("sessions", "replies"):
            statement = f"DELETE FROM {table} WHERE key = ? AND (digest = ? OR parent = ?)"
            self._deletes[statement, (self._key, digest, digest)] = None
        self.delete_again()

    def clear_texts(self) -> None:
        """Delete all records."""
        tables = _TABLES.values()
        self._deletes = {(f"DELETE FROM {table} WHERE key = ?", (self._key,)): None for table in tables}
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

    def _records(self, kind: RecordKind) -> list[TextRecord]:
        found: list[TextRecord] = []
        query = f"SELECT digest, parent, content, checksum FROM {_TABLES[kind]} WHERE key = ? ORDER BY number"
        with self._use() as connection:
            _trim(connection)
            for *row, checksum in connection.execute(query, (self._key,)):
                if checksum == _checksum(row):
                    digest, parent, content = row
                    owner = owner_of(content) if kind == "reply" else ""
                    found.append(TextRecord(kind, digest, content, parent, owner))
        return found

    @contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """Give the caller the connection, and log errors of an unusable index."""
        try:
            with self._database.use() as connection:
                yield connection
        except INDEX_ERRORS as error:
            self._failures.add("disk.text_tables_failed", error)


def _trim(connection: sqlite3.Connection) -> None:
    """Delete the oldest rows, of any key, of tables that exceed their limit, and anchors whose parent is gone."""
    n_deleted = _trim_table(connection, "anchors", text_anchors.OVERHEAD, text_anchors.MAX_BYTES)
    _trim_table(connection, "sessions", sessions.OVERHEAD, sessions.MAX_RECORD_BYTES)
    _trim_table(connection, "replies", REPLY_OVERHEAD, MAX_REPLIES_BYTES)
    while n_deleted:
        n_deleted = connection.execute(
            "DELETE FROM anchors WHERE parent != x'' AND NOT EXISTS (SELECT 1 FROM anchors AS other "
            "WHERE (other.key, other.digest) = (anchors.key, anchors.parent))"
        ).rowcount


def _trim_table(connection: sqlite3.Connection, table: str, overhead: int, max_bytes: int) -> int:
    """Delete the oldest rows of a table beyond its limit, of any key, and return how many."""
    return connection.execute(
        f"DELETE FROM {table} WHERE number IN (SELECT number FROM (SELECT number, sum(length(content) + ?) "
        f"OVER (ORDER BY number DESC) AS n_bytes FROM {table}) WHERE n_bytes > ?)",
        (overhead, max_bytes),
    ).rowcount


def _checksum(row: list[Any]) -> bytes:
    """Return a digest of the values of a row and of their types."""
    return xxhash.xxh3_128_digest(_encode(row))
