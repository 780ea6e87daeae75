"""HTTP client for commands that talk to a running server.

Every failure is a `ConfigError` of one line.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from llamaslot.base.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8080"
_CONNECT_TIMEOUT_S = 10.0
_PIPE_COLUMNS = 200
"""Width of the output if it is not a terminal; longer lines are cut."""
_R = TypeVar("_R", bound=msgspec.Struct)


def add_access(parser: argparse.ArgumentParser) -> None:
    """Declare the server's URL, `--api-key` and `--cacert`."""
    parser.add_argument(
        "url", nargs="?", default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", default=os.environ.get("LLAMA_API_KEY", ""), help="API key (default: $LLAMA_API_KEY)"
    )
    parser.add_argument(
        "--cacert",
        default="",
        metavar="FILE",
        help="the https server's certificate or its CA's (default: the system's CAs)",
    )


def plain_console() -> Console:
    """Return stdout for text of users and servers, which is printed as it is."""
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(highlight=False, markup=False, emoji=False, width=width)


def counted(n: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


class RefusedError(ConfigError):
    """The server answered with an error; `status` is 0 for an error in the middle of a stream."""

    def __init__(self, message: str, *, status: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status


class Client:
    """Client of one server; `url` may contain a path that is prepended to the server's paths.

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
            raise ConfigError(f"{url!r} is not a URL such as {DEFAULT_URL}", param="URL")
        self._tls = _tls(cacert) if address.scheme == "https" else None
        self._host, self._port, self._path = host, port, address.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request and return the JSON object of the reply."""
        with closing(self.connect()) as connection:
            response = self.send(connection, method, path, body)
            try:
                return self.decode(response.read())
            except (OSError, HTTPException) as error:
                raise self.broken(error) from None

    def fetch(self, method: str, path: str, reply_type: type[_R], body: Any = None) -> _R:
        """Send a request to an endpoint that only llamaslot has, and return its reply."""
        with self.explaining(path):
            return msgspec.convert(self.ask(method, path, body), reply_type)

    @contextmanager
    def explaining(self, path: str) -> Iterator[None]:
        """Say in the error which endpoint a server lacks, or that it answers as another version does."""
        try:
            yield
        except RefusedError as error:
            if error.status in (404, 405):
                name = path.partition("?")[0]
                raise ConfigError(f"{self.url} has no {name}: it is another server or an older llamaslot") from None
            raise
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.url} runs an incompatible version of llamaslot ({error})") from None

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
                "or its CA's as --cacert",
                param="--cacert",
            ) from None
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise ConfigError(f"TLS with {self.url} failed ({reason}); is it http://?") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"no server answers at {self.url} ({reason}); start one with `llamaslot serve`"
            ) from None
        # A long prompt may take minutes before its first token.
        connection.sock.settimeout(None)
        return connection

    def send(self, connection: HTTPConnection, method: str, path: str, body: Any = None) -> HTTPResponse:
        """Send a request and return the reply once it begins; raise the error that the server answers with."""
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

    def events(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        """Yield the JSON values of a stream of server-sent events, up to `[DONE]`."""
        try:
            while line := response.readline():
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = self.decode(data)
                if "error" in event:
                    raise self.refusal(0, data)
                yield event
        except (OSError, HTTPException) as error:
            raise self.broken(error) from None
        raise self.broken(EOFError("the answer is incomplete"))

    def decode(self, data: bytes) -> dict[str, Any]:
        """Parse a JSON object."""
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"the server at {self.url} is not llamaslot")
        return value

    def refusal(self, status: int, body: bytes) -> RefusedError:
        """Return the exception for an error that the server sent, with its message if it has one."""
        message = ""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            message = " ".join(str(json.loads(body)["error"]["message"]).split())
        if status == 401:
            message = f"{self.url} rejects the API key: {message or 'give a valid one'} (--api-key)"
            return RefusedError(message, status=status, param="--api-key")
        if status:
            message = f"{self.url} answered {status}" + (f": {message}" if message else "")
        return RefusedError(message or "the server failed during the answer", status=status)

    def broken(self, error: Exception) -> ConfigError:
        """Return the exception for a connection that failed after it was established."""
        return ConfigError(f"the connection to {self.url} was lost ({error or type(error).__name__})")


def _tls(cacert: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cacert or None)
    except ssl.SSLError:
        raise ConfigError(f"no PEM certificate in {cacert} (--cacert)", param="--cacert") from None
    except OSError as error:
        raise ConfigError(f"cannot read {cacert}: {error.strerror} (--cacert)", param="--cacert") from None
