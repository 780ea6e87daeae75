"""Tables of text anchors and sessions in the index of the disk tier.

Each row has a checksum, since nothing else would show that it was changed. Each belongs to a key: the tokens of
other models are different.
"""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Any

import msgspec

from llamaslot.base.tokens import WIDTH, packed, unpacked
from llamaslot.prompts import sessions, text_anchors
from llamaslot.prompts.sessions import Session
from llamaslot.prompts.text_anchors import TextAnchor

_TRIM_INTERVAL = 256
"""Inserted rows between two checks of the limits."""
ANCHORS_SCHEMA = """
    CREATE TABLE anchors (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL,
        name BLOB NOT NULL,
        front BLOB NOT NULL,
        start INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        checksum BLOB NOT NULL,
        UNIQUE (key, name)
    );
"""
SESSIONS_SCHEMA = """
    CREATE TABLE sessions (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        key BLOB NOT NULL,
        digest BLOB NOT NULL,
        n_added INTEGER NOT NULL,
        n_prompt INTEGER NOT NULL,
        n_text INTEGER NOT NULL,
        is_text INTEGER NOT NULL,
        others BLOB NOT NULL,
        tokens BLOB NOT NULL,
        checksum BLOB NOT NULL,
        UNIQUE (key, digest)
    );
"""


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(tuple[tuple[int, bytes], ...]).decode


class Texts:
    """Two tables of an open index, used by one thread at a time. Methods raise `sqlite3.Error`."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._n_added = 0

    def anchors(self, key: bytes) -> list[TextAnchor]:
        """Return the intact anchors of a key in the order in which they were added."""
        self._trim()
        columns = "name, front, start, tokens, checksum"
        found = self._database.execute(f"SELECT {columns} FROM anchors WHERE key = ? ORDER BY number", (key,))
        return [TextAnchor(*row[:4]) for row in found if _is_intact(row, (bytes, bytes, int, bytes))]

    def add_anchor(self, key: bytes, anchor: TextAnchor) -> None:
        """Insert an anchor, or replace the one with its digest."""
        row = anchor.digest, anchor.parent, anchor.start, anchor.tokens
        self._database.execute(
            "INSERT INTO anchors (key, name, front, start, tokens, checksum) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (key, name) DO UPDATE SET (front, start, tokens, checksum) = "
            "(excluded.front, excluded.start, excluded.tokens, excluded.checksum)",
            (key, *row, _checksum(row)),
        )
        self._note_added()

    def sessions(self, key: bytes) -> list[tuple[bytes, Session]]:
        """Return the intact sessions of a key with their digests, the oldest first."""
        self._trim()
        columns = "digest, n_added, n_prompt, n_text, is_text, others, tokens, checksum"
        found = self._database.execute(f"SELECT {columns} FROM sessions WHERE key = ? ORDER BY number", (key,))
        whole = [row for row in found if _is_intact(row, (bytes, int, int, int, int, bytes, bytes))]
        return [
            (digest, Session(unpacked(tokens), n_added, n_prompt, n_text, bool(is_text), _decode(others)))
            for digest, n_added, n_prompt, n_text, is_text, others, tokens, _ in whole
        ]

    def put_session(self, key: bytes, digest: bytes, session: Session) -> None:
        """Insert a session as the latest one, in place of an earlier one with its digest."""
        counts = session.n_added, session.n_prompt, session.n_text, int(session.is_text)
        row = digest, *counts, _encode(session.branches), packed(session.tokens)
        self._database.execute(
            "INSERT OR REPLACE INTO sessions (key, digest, n_added, n_prompt, n_text, is_text, others, tokens, "
            "checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (key, *row, _checksum(row)),
        )
        self._note_added()

    def drop_session(self, key: bytes, digest: bytes) -> None:
        """Delete a session."""
        self._database.execute("DELETE FROM sessions WHERE (key, digest) = (?, ?)", (key, digest))

    def clear(self, key: bytes) -> None:
        """Delete all rows of a key."""
        self._database.execute("DELETE FROM anchors WHERE key = ?", (key,))
        self._database.execute("DELETE FROM sessions WHERE key = ?", (key,))

    def _note_added(self) -> None:
        self._n_added += 1
        if self._n_added % _TRIM_INTERVAL == 0:
            self._trim()

    def _trim(self) -> None:
        """Delete the oldest rows of all keys where a table has too many, and anchors whose parent is gone."""
        n_gone = self._trimmed("anchors", "length(tokens)", text_anchors.OVERHEAD, text_anchors.MAX_BYTES)
        self._trimmed("sessions", "length(tokens) + length(others)", sessions.OVERHEAD, sessions.MAX_BYTES)
        while n_gone:
            n_gone = self._database.execute(
                "DELETE FROM anchors WHERE front != x'' AND NOT EXISTS (SELECT 1 FROM anchors AS other "
                "WHERE (other.key, other.name) = (anchors.key, anchors.front))"
            ).rowcount

    def _trimmed(self, table: str, size: str, overhead: int, most_bytes: int) -> int:
        """Delete the oldest rows of a table beyond its limit, and return how many."""
        return self._database.execute(
            f"DELETE FROM {table} WHERE number IN (SELECT number FROM (SELECT number, sum({size} + ?) "
            f"OVER (ORDER BY number DESC) AS n_bytes FROM {table}) WHERE n_bytes > ?)",
            (overhead, most_bytes),
        ).rowcount


def _checksum(row: tuple[bytes | int, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for field in row:
        raw = field if isinstance(field, bytes) else b"%d" % field
        digest.update(b"%d " % len(raw) + raw)
    return digest.digest()


def _is_intact(row: tuple[Any, ...], types: tuple[type, ...]) -> bool:
    """True if a row, its checksum last, is as it was inserted."""
    *fields, checksum = row
    if not all(isinstance(field, kind) for field, kind in zip(fields, types, strict=True)):
        return False
    return bool(checksum == _checksum(tuple(fields))) and len(fields[-1]) % WIDTH == 0
