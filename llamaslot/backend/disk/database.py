"""Connection to the SQLite file of the disk tier, shared by several threads."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INDEX_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors of an unusable index. SQLite's messages about a damaged file are not always UTF-8, as Python expects."""

_MAX_VALUE_BYTES = 2**25
"""Most bytes of a value or row, as much as a remembered text may have; a damaged file might announce a gigabyte."""


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
        """Give this thread the connection. Once closed, its methods raise `sqlite3.ProgrammingError`."""
        with self._lock:
            yield self._connection

    def close(self) -> None:
        """Close the file once no thread uses it."""
        with self._lock:
            self._connection.close()
