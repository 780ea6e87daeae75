"""HTTPS: the server's private key and certificate, which are reloaded when their files change."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

import structlog

from llamaslot.api.file_changes import FileChanges
from llamaslot.app.config import Config
from llamaslot.base.errors import ConfigError
from llamaslot.base.named_files import read_named

_CERT_FLAG, _KEY_FLAG = "--ssl-cert-file", "--ssl-key-file"
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""TLS 1.2 ciphers with forward secrecy and authenticated encryption. All TLS 1.3 ciphers have both."""

_log = structlog.get_logger(__name__)


def certificate(config: Config) -> Certificate | None:
    """Return the certificate for HTTPS; None if the two flags are not given. Raises `ConfigError`."""
    cert, key = config.ssl_cert_file, config.ssl_key_file
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
