"""Changes of files that are read again while the server runs: API keys, the certificate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

_INTERVAL_S = 1.0


class FileChanges:
    """Watches files as of its creation, at most once a second. `clock` gives seconds."""

    def __init__(self, files: Sequence[Path], clock: Callable[[], float]) -> None:
        self._files = files
        self._clock = clock
        self._checked_at = clock()
        self._versions = self._read()

    def is_new(self) -> bool:
        """Return True, once for each change, if a file was changed or replaced, or its rights were."""
        if self._clock() - self._checked_at < _INTERVAL_S:
            return False
        self._checked_at = self._clock()
        before, self._versions = self._versions, self._read()
        return self._versions != before

    def _read(self) -> list[tuple[int, int, int] | None]:
        return [_version(each) for each in self._files]


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
