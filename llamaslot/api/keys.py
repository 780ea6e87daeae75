"""API keys and what they open.

Keys of `--api-key` are administrators'. A line of `--api-key-file` is a key, and after a space its role: `admin`
(the default) or `user`. The file is read again once it changes, on a thread. Keys are compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path

import structlog
from aiohttp import web

from llamaslot.api.file_changes import FileChanges
from llamaslot.base.errors import ConfigError
from llamaslot.base.named_files import read_named_text

_log = structlog.get_logger(__name__)


class Access(IntEnum):
    """Access level that a route requires and that a key grants."""

    PUBLIC = 0
    """No key."""
    USER = 1
    """Everything that shows or changes nothing of other users."""
    ADMIN = 2


GRANTED = web.RequestKey("GRANTED", Access)
"""The access of a request's key; an administrator's on a server without keys."""


class ApiKeys:
    """The keys of flags and of a file; without both, no key is needed. `changes` is to be started.

    Raises `ConfigError` for a file that cannot be read or has no key.
    """

    def __init__(self, given: Sequence[str], file: str) -> None:
        self._given = dict.fromkeys(given, Access.ADMIN)
        self._file = Path(file) if file else None
        self.changes = FileChanges((self._file,) if self._file is not None else (), self._reload)
        self._from_file = _read(self._file) if self._file is not None else {}

    def __bool__(self) -> bool:
        """True if a key is needed."""
        return bool(self._given or self._from_file)

    def access_of(self, key: str) -> Access | None:
        """Return what a key opens, None for an unknown one."""
        self.changes.report_unresponsive()
        raw = key.encode("utf-8", "surrogateescape")
        found = None
        for known, access in (*self._from_file.items(), *self._given.items()):
            if hmac.compare_digest(raw, known.encode()):
                found = access
        return found

    def _reload(self) -> None:
        assert self._file is not None
        try:
            self._from_file = _read(self._file)
        except ConfigError as error:
            _log.error("api_keys.reload_failed", error=error.message, kept=len(self._from_file))
        else:
            _log.info("api_keys.reloaded", keys=len(self._from_file))


def _read(path: Path) -> Mapping[str, Access]:
    flag = "--api-key-file"
    text = read_named_text(path, flag)
    keys: dict[str, Access] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        role = words[1] if len(words) == 2 else "admin"
        if len(words) > 2 or role not in ("admin", "user"):
            raise ConfigError(f"{path}, line {number}: a key may be followed by admin or user", param=flag)
        keys[words[0]] = Access[role.upper()]
    if not keys:
        raise ConfigError(f"there is no key in {path} (--api-key-file)", param=flag)
    return keys
