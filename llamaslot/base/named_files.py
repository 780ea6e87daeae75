"""Files that flags name: keys, certificates, templates. Only regular files are read: a pipe may never end."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from llamaslot.base.errors import ConfigError

MAX_BYTES = 16 * 2**20


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read it, without waiting for the writer of a pipe; raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    error = IsADirectoryError if stat.S_ISDIR(mode) else OSError
    raise error(None, "Is a directory" if stat.S_ISDIR(mode) else "it is not a regular file", str(path))


def read_named(path: Path, flag: str) -> bytes:
    """Return the content of a file that a flag names; raises `ConfigError`."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason} ({flag})", param=flag) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"cannot read {path}: it has more than {MAX_BYTES // 2**20} MiB ({flag})", param=flag)
    return data


def read_named_text(path: Path, flag: str) -> str:
    """Return the text of a file that a flag names; raises `ConfigError`."""
    try:
        return read_named(path, flag).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text ({flag})", param=flag) from None
