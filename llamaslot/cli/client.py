"""HTTP client for commands that talk to a running server, without dependencies.

Every failure is a `ConfigError` of one line.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from llamaslot.base.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8080"
_CONNECT_TIMEOUT_S = 10.0


def add_access(parser: argparse.ArgumentParser) -> None:
    """Declare `--api-key` and `--cacert`."""
    parser.add_argument("--api-key", default=os.environ.get("LLAMA_API_KEY", ""), help="(default: $LLAMA_API_KEY)")
    parser.add_argument(
        "--cacert",
        default="",
        metavar="FILE",
        help="certificate that an https server must have, or have been signed with (default: the system's)",
    )


class RefusedError(ConfigError):
    """The server answered with an error; `status` is 0 for one in the middle of a stream."""

    def __init__(self, message: str, *, status: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status


class Client:
    """Connection settings of a server; `url` may have a path before the server's own.

    `cacert` is a file of certificates to trust instead of the system's.
    """

    def __init__(self, url: str, api_key: str, cacert: str = "") -> None:
        self.url = url = url if "://" in url else f"http://{url}"
        address = urlsplit(url)
        try:
            host, port = address.hostname, address.port
        except ValueError:
            host, port = None, None
        if address.scheme not in {"http", "https"} or not host:
            raise ConfigError(f"{url!r} is not an address such as {DEFAULT_URL}", param="URL")
        self._tls = _tls(cacert) if address.scheme == "https" else None
        self._host, self._port, self._path = host, port, address.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """Return the JSON object that answers a request without a body."""
        with closing(self.connect()) as connection:
            response = self.send(connection, method, path)
            try:
                return self.decode(response.read())
            except (OSError, HTTPException) as error:
                raise self.broken(error) from None

    def connect(self) -> HTTPConnection:
        """Return a connection without a read timeout."""
        if self._tls is not None:
            connection: HTTPConnection = HTTPSConnection(
                self._host, self._port, timeout=_CONNECT_TIMEOUT_S, context=self._tls
            )
        else:
            connection = HTTPConnection(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"the certificate of {self.url} is not trusted ({error.verify_message}); if it is yours, give it "
                "as --cacert, or the one that signed it",
                param="--cacert",
            ) from None
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise ConfigError(f"{self.url} does not speak TLS as expected ({reason}); is it http://?") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"no server answers at {self.url} ({reason}); start one with `llamaslot serve`"
            ) from None
        # A long prompt may take minutes before its first token.
        connection.sock.settimeout(None)
        return connection

    def send(self, connection: HTTPConnection, method: str, path: str, body: Any = None) -> HTTPResponse:
        """Send a request and return the reply once it begins; raises its error otherwise."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"} if data else self._headers
        try:
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self.refusal(response.status, response.read())
        except (OSError, HTTPException) as error:
            raise self.broken(error) from None
        return response

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the JSON object in `data`."""
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"what answers at {self.url} is not a llamaslot server")
        return value

    def refusal(self, status: int, body: bytes) -> RefusedError:
        """Return the error that the server sent, with its message if it has one."""
        message = ""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            message = " ".join(str(json.loads(body)["error"]["message"]).split())
        if status == 401:
            message = f"{self.url} wants another API key: {message or 'give one'} (--api-key)"
            return RefusedError(message, status=status, param="--api-key")
        if status:
            message = f"{self.url} answered {status}" + (f": {message}" if message else "")
        return RefusedError(message or "the server failed in the middle of the answer", status=status)

    def broken(self, error: Exception) -> ConfigError:
        """Return the error for a connection that failed after it was made."""
        return ConfigError(f"the connection to {self.url} broke off ({error or type(error).__name__})")


def _tls(cacert: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cacert or None)
    except ssl.SSLError:
        raise ConfigError(f"there is no PEM certificate in {cacert} (--cacert)", param="--cacert") from None
    except OSError as error:
        raise ConfigError(f"cannot read {cacert}: {error.strerror} (--cacert)", param="--cacert") from None
