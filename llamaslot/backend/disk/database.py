"""Connection to the SQLite file of the disk tier, shared by the threads that use it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INDEX_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors of an unusable index. SQLite's messages about a damaged file are not always UTF-8, as Python expects."""

_MAX_VALUE_BYTES = 2**25
"""Bytes of a value or a row: remembered replies have up to 16 MiB, and a damaged file may announce a gigabyte."""


class Database:
    """An SQLite file that several threads use, one at a time; any of them may close it.

    SQLite's own lock does not cover Python's statements: without this one, `close` during a statement of another
    thread crashes the process.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        self._lock = threading.Lock()

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone; its methods raise `sqlite3.ProgrammingError` once it is closed."""
        with self._lock:
            yield self._connection

    def close(self) -> None:
        """Close the file once no thread uses it."""
        with self._lock:
            self._connection.close()
