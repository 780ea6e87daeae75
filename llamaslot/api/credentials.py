"""API keys and the TLS certificate: files that are read again while the server runs.

Keys of `--api-key` are administrators'. A line of `--api-key-file` is a key, and after a space its role: `admin`
(the default) or `user`. Keys are compared in constant time.

A thread checks the files, so that a file system that hangs blocks nothing else: the server keeps what it has read
before.
"""

from __future__ import annotations

import hmac
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import structlog
from aiohttp import web

from llamaslot.base.errors import ConfigError
from llamaslot.base.files import read_named, read_named_text

_INTERVAL_S = 1.0
_UNRESPONSIVE_S = 30.0
"""Time after which a file system that does not answer is reported."""

_CERT_FLAG, _KEY_FLAG = "--ssl-cert-file", "--ssl-key-file"
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""TLS 1.2 ciphers with forward secrecy and authenticated encryption. All TLS 1.3 ciphers have both."""

_log = structlog.get_logger(__name__)


class FileChanges:
    """Calls `reload` when files, or their permissions, have changed since this object was made."""

    def __init__(self, files: Sequence[Path], reload: Callable[[], None]) -> None:
        self._files = files
        self._reload = reload
        self._versions = self._read()
        self._looked_at = time.monotonic()
        self._is_unresponsive = False
        self._wake = threading.Event()
        self._is_stopped = False

    def check(self) -> None:
        """Check the files now."""
        before, self._versions = self._versions, self._read()
        if self._versions != before:
            self._reload()

    def start(self) -> None:
        """Check the files once a second until `stop`."""
        if self._files:
            self._is_stopped = False
            threading.Thread(target=self._run, name="file-changes", daemon=True).start()

    def check_soon(self) -> None:
        """Have the thread check the files at once."""
        self._wake.set()

    def stop(self) -> None:
        """Stop checking; a thread that waits for a file system is left running until the process ends."""
        self._is_stopped = True
        self._wake.set()

    def report_unresponsive(self) -> None:
        """Log once that the file system does not respond."""
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
        """Return the access that a key grants; None for an unknown key."""
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


def certificate(cert: str, key: str) -> Certificate | None:
    """Return the certificate for HTTPS; None if neither of the two flags is given. Raises `ConfigError`."""
    if not cert and not key:
        return None
    if not cert or not key:
        given, missing = (_CERT_FLAG, _KEY_FLAG) if cert else (_KEY_FLAG, _CERT_FLAG)
        raise ConfigError(f"{given} needs {missing}", param=missing)
    return Certificate(Path(cert).expanduser(), Path(key).expanduser())


class Certificate:
    """A certificate and its key, read from two files. The owner must start `changes`, which watches the files.

    Raises `ConfigError` for unusable files.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert = cert
        self._key = key
        self.changes = FileChanges((cert, key), self._reload)
        self.context = self._newest = _context(cert, key)
        """The context of the listener; `_choose` gives each new connection the newest certificate."""
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        self.changes.report_unresponsive()
        if self._newest is not self.context:
            connection.context = self._newest

    def _reload(self) -> None:
        try:
            # Create a new context: one into which only the certificate or only the key was loaded is unusable.
            self._newest = _context(self._cert, self._key)
        except (ConfigError, OSError) as error:
            _log.error("tls.reload_failed", error=str(error))
        else:
            _log.info("tls.reloaded", certificate=str(self._cert))


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    # Read the files here first, because OpenSSL would block on a pipe.
    read_named(cert, _CERT_FLAG)
    read_named(key, _KEY_FLAG)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # In a separate context, because locations loaded into the server's context would make it request client
        # certificates.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cert)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"no PEM certificate in {cert} ({_CERT_FLAG})", param=_CERT_FLAG) from None

    def password() -> NoReturn:
        raise ConfigError(
            f"the private key in {key} is encrypted: give one without a passphrase ({_KEY_FLAG})", param=_KEY_FLAG
        )

    try:
        context.load_cert_chain(cert, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = (
                f"the private key in {key} ({_KEY_FLAG}) does not match the certificate in {cert} ({_CERT_FLAG})"
            )
        elif error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
            message = f"the certificate in {cert} is too weak ({error.reason}): create a new one ({_CERT_FLAG})"
            raise ConfigError(message, param=_CERT_FLAG) from None
        else:
            message = f"no PEM private key in {key} ({_KEY_FLAG})"
        raise ConfigError(message, param=_KEY_FLAG) from None
    return context
