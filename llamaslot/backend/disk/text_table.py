"""Table of the token memory's records in the index of the disk tier.

Each row has a checksum, because SQLite does not notice a changed byte, and belongs to a key, because other models
have other tokens. A damaged row is skipped, so that its text is tokenized again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import xxhash

from llamaslot.backend.disk.database import INDEX_ERRORS, Database
from llamaslot.backend.failure_log import FailureLog
from llamaslot.base import text_records
from llamaslot.base.text_records import TextRecord

_FORMAT = 1
"""A part of the checksum: rows of another format are skipped. To be raised with changes of the records."""
_TRIM_INTERVAL = 256
"""Number of rows written between two checks of the limit."""
SCHEMA = """
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
MAX_LENGTHS = {"texts": dict.fromkeys(("key", "kind", "digest", "parent", "session", "checksum"), 2**10)}
"""Most bytes of written values, by table and column. The content is limited for all rows together (`_trim`)."""
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(TextRecord).decode


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
                        found.append(_decode(row[-1]))
        return found

    def write(self, record: TextRecord) -> None:
        """Write a record, replacing an earlier one of the same kind and key."""
        kind = str(record.__struct_config__.tag)
        row = [kind, record.key, record.parent, record.session, _encode(record)]
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
        """Delete a session, its branches and its replies."""
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
    return xxhash.xxh3_128_digest(_encode([_FORMAT, *row]))
