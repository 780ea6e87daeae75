"""Files that are read again while the server runs: API keys, the certificate.

A thread of their own looks at them. A file system that hangs keeps that thread waiting and nothing else: the server
goes on with what it has read before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

_INTERVAL_S = 1.0
_UNRESPONSIVE_S = 30.0
"""Time after which a file system that does not answer is reported."""

_log = structlog.get_logger(__name__)


class FileChanges:
    """Calls `reload` when files were changed or replaced, or their rights were, since this was made."""

    def __init__(self, files: Sequence[Path], reload: Callable[[], None]) -> None:
        self._files = files
        self._reload = reload
        self._versions = self._read()
        self._looked_at = time.monotonic()
        self._is_unresponsive = False
        self._wake = threading.Event()
        self._is_stopped = False

    def check(self) -> None:
        """Look at the files now."""
        before, self._versions = self._versions, self._read()
        if self._versions != before:
            self._reload()

    def start(self) -> None:
        """Look at the files once a second, until `stop`."""
        if self._files:
            self._is_stopped = False
            threading.Thread(target=self._run, name="file-changes", daemon=True).start()

    def check_soon(self) -> None:
        """Have the thread look at the files at once."""
        self._wake.set()

    def stop(self) -> None:
        """Look at them no more; a thread that a file system keeps is left to the end of the process."""
        self._is_stopped = True
        self._wake.set()

    def report_unresponsive(self) -> None:
        """Log, once, that the files cannot be looked at."""
        is_unresponsive = bool(self._files) and time.monotonic() - self._looked_at > _UNRESPONSIVE_S
        if is_unresponsive and not self._is_unresponsive:
            _log.error("files.unresponsive", files=list(map(str, self._files)), seconds=_UNRESPONSIVE_S)
        self._is_unresponsive = is_unresponsive

    def _run(self) -> None:
        while not self._is_stopped:
            self.check()
            self._looked_at = time.monotonic()
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()

    def _read(self) -> list[tuple[int, int, int] | None]:
        return [_version(each) for each in self._files]


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
