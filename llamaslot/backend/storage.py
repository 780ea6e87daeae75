"""Private files and folders, and a log of failures of disk and remote store.

Only their user can read them, and no other file is overwritten through a link: folders are chosen by the user, so
their content is not trusted. A name may be a symlink or hard link to another file, or a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from io import BufferedReader
from pathlib import Path

import structlog

_INTERVAL_S = 30.0
"""Least time between two lines of the same event."""

_log = structlog.get_logger(__name__)


def private_folder(folder: Path) -> None:
    """Create a folder and its missing parents for this user only. Logs a warning if others may write to it.

    Raises `OSError`.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    about = folder.stat()
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & stat.S_IWOTH:
        _log.warning("folder.writable_by_others", folder=str(folder), mode=f"{stat.S_IMODE(about.st_mode):o}")


def open_private(path: Path) -> int:
    """Open a file that only this user may read, for reading and writing, or create it; returns the descriptor.

    Raises `OSError` for anything but a regular file with this name only.
    """
    # O_NONBLOCK, because opening a pipe would otherwise wait for a reader.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if about.st_nlink > 1:
            raise OSError(errno.EMLINK, "has another name too (hard link)", str(path))
        if about.st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_atomically(path: Path, parts: Sequence[memoryview], *, temporary: Path) -> None:
    """Write a file so that, if process or machine end meanwhile, it has either all of these bytes or the old ones.

    The bytes are written to a `temporary` file in the same folder first. Raises `OSError`.
    """
    try:
        # A file of that name was left by a killed process, or is a hard link, symlink or pipe that must not be
        # used.
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, without following a symlink, which might lead out of the folder.

    Raises `OSError`; `FileNotFoundError` for anything but a regular file.
    """
    try:
        # O_NONBLOCK, because opening a pipe would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise FileNotFoundError(errno.ENOENT, "is a symlink", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


class FailureLog:
    """Logs failures. `clock` returns seconds. Threads may share it: at worst a line is logged twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._n_unlogged: dict[str, int] = {}

    def add(self, event: str, error: BaseException, **values: object) -> None:
        """Log a failure; only count it for the next line if this event was logged less than 30 s ago."""
        now = self._clock()
        if event in self._logged_at and now - self._logged_at[event] < _INTERVAL_S:
            self._n_unlogged[event] = self._n_unlogged.get(event, 0) + 1
            return
        self._logged_at[event] = now
        if n_unlogged := self._n_unlogged.pop(event, 0):
            values["not_logged_before"] = n_unlogged
        _log.warning(event, **values, error=str(error) or type(error).__name__)
