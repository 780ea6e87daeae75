"""TCP connections: limits of their number, of idle time and of slow readers; TLS handshakes; malformed HTTP.

A connection is idle while no request on it is being answered, and during its TLS handshake. If all connections are
taken, a new one replaces the one that has been idle longest, so that clients that open connections without using
them do not lock others out.

A busy connection, on which a request is being answered or its body awaited, is not replaced. So an owner (an API
key, else an address) may have four times as many of them as it leaves free: one alone gets four fifths, and there
is always room for the next one. Some are kept for `/health` and administrators.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

import structlog
from aiohttp import web
from aiohttp.http import RawRequestMessage

from llamaslot.api import http_errors
from llamaslot.api.context import shown_id
from llamaslot.base.callers import Amounts
from llamaslot.base.errors import InvalidRequestError, QueueFullError, UnavailableError

_OTHER_DESCRIPTORS = 128
"""Descriptors that are not for connections: the model's files, the disk tier, libraries."""
_LOG_INTERVAL_S = 60.0
OWNER_SHARE = 4
"""An owner may take this many times what it leaves free for others."""
_KEPT_FRACTION = 16
"""One in this many connections is kept for `/health` and administrators."""
_TCP_INFO_BYTES, _BYTES_ACKED = 128, slice(120, 128)
"""Beginning of Linux' `struct tcp_info`, up to and with `tcpi_bytes_acked`."""
_HANDSHAKE_TIMEOUT_S = 10.0
"""Time that a TLS handshake may take."""
_FREELY_RECEIVING = 64
"""Number of connections whose receive buffers are not limited."""
_RECEIVE_BYTES = 2**16
"""Receive buffer of each further connection, because the content of all buffers may be read at once."""
_MAX_REFUSED_HANDSHAKES = 32
"""Handshakes in progress beyond the limit of connections, so that their clients can be told that it is reached."""
_DISCARD_BYTES = 2**18
"""Bytes of an unread body that are received at a time, as many as the event loop does."""
_MIN_READ_BYTES = 2**16
"""Bytes that a slow reader must take within the write timeout; otherwise its connection is closed."""

_log = structlog.get_logger(__name__)


def available_connections(wanted: int) -> int:
    """Raise this process' limit of descriptors for that many connections; return how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_DESCRIPTORS
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited or soft >= needed:
        return wanted
    allowed = max(1, soft - _OTHER_DESCRIPTORS, soft // 2)
    _log.warning("connections.limited", wanted=wanted, allowed=allowed, descriptors=soft)
    return allowed


class Counted(Protocol):
    """A connection, before or after its TLS handshake."""

    is_open: bool
    """True while it counts against the limit."""
    owner: str | None
    """The owner that is charged for the request on it; None for none."""

    def abort(self) -> None:
        """Close the connection without sending what is buffered."""


class Connections:
    """The open connections, at most `limit`; `clock` gives seconds."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self.encoding_turn = asyncio.Lock()
        """Held while a part of a large reply is encoded, so that many large replies delay others no more than one.
        """
        self.n_open = 0
        self._idle: dict[Counted, None] = {}
        """The one that has been idle longest first."""
        self._n_busy = Amounts()
        """Busy connections by owner, except those of `/health` and administrators."""
        self._max_busy = limit - limit // _KEPT_FRACTION
        self._logged_at = float("-inf")

    def add(self, connection: Counted, handshake: Handshake | None = None) -> bool:
        """Add a connection, replacing its handshake; if there are too many, close the one idle longest.

        False if none is idle.
        """
        if handshake is not None:
            self.remove(handshake)
        if self.n_open >= self._limit:
            longest_idle = next(iter(self._idle), None)
            self._log_full()
            if longest_idle is None:
                return False
            self.remove(longest_idle)
            longest_idle.abort()
        connection.is_open = True
        self.n_open += 1
        self._idle[connection] = None
        return True

    def begin(self, connection: Counted) -> None:
        """Note that a request has arrived."""
        self._idle.pop(connection, None)

    def occupy(self, connection: Counted, owner: str) -> None:
        """Charge an owner for the request that has arrived, until its `end`; raises if it has too many connections.

        That is a `QueueFullError`, or an `UnavailableError` if it is because of others.
        """
        n_owner, is_full = self._n_busy[owner], self._n_busy.total >= self._max_busy
        if is_full or not self._n_busy.may_add(owner, 0, self._max_busy, OWNER_SHARE):
            self._log_full()
            flag = f"of {self._limit} (--max-connections)"
            if not n_owner:
                raise UnavailableError(f"almost all connections {flag} are in use; try later", retry_after=1)
            message = f"{n_owner} connections of this client {flag} are in use, and others need the rest; try later"
            raise QueueFullError(message, retry_after=1)
        connection.owner = owner
        self._n_busy.add(owner, 1)

    def end(self, connection: Counted) -> None:
        """Note that the request was answered."""
        if connection.owner is not None:
            self._n_busy.add(connection.owner, -1)
            connection.owner = None
        if connection.is_open:
            self._idle[connection] = None

    def remove(self, connection: Counted) -> None:
        """Remove a connection that is closed."""
        self.end(connection)
        if connection.is_open:
            connection.is_open = False
            self.n_open -= 1
            del self._idle[connection]

    def _log_full(self) -> None:
        if self._clock() - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = self._clock()
            _log.warning("connections.full", limit=self._limit, idle=len(self._idle), flag="--max-connections")


class Connection(web.RequestHandler):
    """One connection of aiohttp's server.

    It is closed if the transport's buffer stays above its limit for `write_timeout` seconds and the client reads
    almost nothing. With TLS, `handshake` is its completed handshake.
    """

    def __init__(
        self,
        connections: Connections,
        manager: web.Server,
        *,
        write_timeout: float,
        handshake: Handshake | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop(), **settings)
        self.is_open = False
        self.owner: str | None = None
        self._connections = connections
        self.encoding_turn = connections.encoding_turn
        self._handshake = handshake
        self._write_timeout = write_timeout
        self._timer: asyncio.TimerHandle | None = None
        """Set while the client is behind."""
        self._n_left = 0
        """Bytes that were buffered when the timer was started, and those that were added since."""
        self._n_acknowledged: int | None = 0
        """`_acknowledged` when the timer was started."""
        self._request: web.Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or answer 503 and close it."""
        handshake, self._handshake = self._handshake, None
        if self._connections.add(self, handshake):
            accepted = transport.get_extra_info("socket")
            if self._connections.n_open > _FREELY_RECEIVING and accepted is not None:
                # The client may be gone already.
                with contextlib.suppress(OSError):
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            super().connection_made(transport)
            return
        error = UnavailableError("all connections of the server (--max-connections) are in use; try later")
        body = http_errors.body(error)
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Retry-After: 1\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        refused = cast(asyncio.Transport, transport)
        refused.write(head.encode() + body)
        refused.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection's place."""
        self._connections.remove(self)
        self._stop_timer()
        super().connection_lost(exc)
        # A timer of aiohttp's keeps this object, and errors in what was received keep the bytes.
        self._messages.clear()

    def pause_writing(self) -> None:
        """Start the time limit of a client that reads too slowly."""
        super().pause_writing()
        self._start_timer()

    def resume_writing(self) -> None:
        """Stop the time limit: the client has caught up."""
        self._stop_timer()
        super().resume_writing()

    def count_written(self, n_bytes: int) -> None:
        """Count bytes that were written to the transport directly."""
        self._n_left += n_bytes

    def disconnect(self, flag: str) -> None:
        """Close the connection of a client that does not read its reply; `flag` has the limit."""
        if self.transport is None:
            return
        request_id = shown_id(self._request) if self._request is not None else ""
        n_bytes = self.transport.get_write_buffer_size()
        _log.warning("connection.slow_reader", http_request_id=request_id, unread_bytes=n_bytes, flag=flag)
        self.abort()

    def _start_timer(self) -> None:
        if self.transport is not None:
            self._n_left = self.transport.get_write_buffer_size()
            self._n_acknowledged = _acknowledged(self.transport)
            self._timer = asyncio.get_running_loop().call_later(self._write_timeout, self._check_reading)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_reading(self) -> None:
        if self.transport is None:
            return
        n_acknowledged = _acknowledged(self.transport)
        if n_acknowledged is not None and self._n_acknowledged is not None:
            n_read = n_acknowledged - self._n_acknowledged
        else:
            n_read = self._n_left - self.transport.get_write_buffer_size()
        if n_read < _MIN_READ_BYTES:
            self.disconnect("--write-timeout")
        else:
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Take in data; a connection that was refused ignores it, and so does one after malformed HTTP.

        aiohttp would make an error of each further piece of a large body.
        """
        if self.transport is not None and not self._errors:
            super().data_received(data)
            for error in self._errors:
                # Its frames hold the piece, and refer to the error: nothing but a collection would free them.
                error.__traceback__ = None

    @property
    def _errors(self) -> list[BaseException]:
        """Errors of malformed messages that were received but not handled yet."""
        return [each.exc for each, _ in self._messages if not isinstance(each, RawRequestMessage)]

    def abort(self) -> None:
        """Close the connection without sending what is buffered."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def begin(self, request: web.Request) -> None:
        """Note that a request has arrived."""
        self._request = request
        self._connections.begin(self)

    def occupy(self, owner: str) -> None:
        """Charge an owner for the request; raises if it has too many busy connections."""
        self._connections.occupy(self, owner)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, *args: Any
    ) -> tuple[web.StreamResponse, bool]:
        """Send a reply to its end."""
        if isinstance(resp, web.HTTPException):
            # aiohttp refuses an unknown `Expect` before it calls any middleware.
            resp = http_errors.response(http_errors.translated(request, resp), request)
        try:
            finished = await super().finish_response(request, resp, *args)
            # aiohttp discards the rest of an unread body. With the limit of bodies that are read, receiving stopped
            # after each piece: 10 MB took 7.7 ms of CPU, not 5.6 (medians of five).
            request.content.set_read_chunk_size(_DISCARD_BYTES)
            return finished
        finally:
            self._request = None
            self._connections.end(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the reply to malformed HTTP, and to a request whose handler failed outside of the middleware."""
        if isinstance(exc, ConnectionError):
            # The client is gone: aiohttp ends the connection.
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("an error after the reply had begun")
        if status < 500:
            reason = (message or "").strip().partition("\n")[0].rstrip(":")
            _log.debug("request.malformed", reason=reason)
            malformed = InvalidRequestError(f"the request is not valid HTTP: {reason}")
            reply = http_errors.response(malformed, request)
        else:
            error = exc if isinstance(exc, Exception) else RuntimeError(message)
            reply = http_errors.response(http_errors.described(error), request)
        reply.force_close()
        return reply


class Handshakes:
    """The TLS handshakes in progress; `make_connection` makes the connection for the end of one."""

    def __init__(
        self, connections: Connections, tls: ssl.SSLContext, make_connection: Callable[[Handshake], Connection]
    ) -> None:
        self._connections = connections
        self._tls = tls
        self._make_connection = make_connection
        self._open: set[Handshake] = set()
        self._n_refused = 0
        """Handshakes beyond `--max-connections`: their clients get a 503 once they have ended."""

    def begin(self, handshake: Handshake) -> bool:
        """Count a new handshake as a connection; False if it must be aborted."""
        handshake.is_refused = not self._connections.add(handshake)
        if handshake.is_refused and self._n_refused >= _MAX_REFUSED_HANDSHAKES:
            return False
        self._n_refused += handshake.is_refused
        self._open.add(handshake)
        return True

    async def run(self, handshake: Handshake, accepted: socket.socket) -> None:
        """Do a handshake, and pass the socket on to a connection."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_connection(handshake),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S,
            )
        except OSError as error:
            _log.debug("tls.handshake_failed", reason=str(error) or type(error).__name__)
        finally:
            self._connections.remove(handshake)
            self._n_refused -= handshake.is_refused
            self._open.discard(handshake)

    def close(self) -> None:
        """Abort all handshakes."""
        for each in list(self._open):
            each.abort()


class Handshake(asyncio.Protocol):
    """An accepted connection, from which a TLS connection is made."""

    def __init__(self, handshakes: Handshakes) -> None:
        self.is_open = self.is_refused = False
        self.owner: str | None = None
        self._handshakes = handshakes
        self._accepted: socket.socket
        self._running: asyncio.Task[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, on the same socket but another transport: the event loop's own handshakes of servers
        can neither be counted nor aborted.
        """
        plain = cast(asyncio.Transport, transport)
        try:
            self._accepted = socket.socket(fileno=os.dup(plain.get_extra_info("socket").fileno()))
        except OSError as error:
            _log.debug("tls.handshake_failed", reason=str(error))
        else:
            if self._handshakes.begin(self):
                self._running = asyncio.create_task(self._handshakes.run(self, self._accepted))
            else:
                self._accepted.close()
        plain.abort()

    def abort(self) -> None:
        """Shut the socket down: the handshake fails, and its transport closes the socket."""
        with contextlib.suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)


def _acknowledged(transport: asyncio.Transport) -> int | None:
    """Return the bytes that the other side has acknowledged; None where the system (other than Linux) does not say.

    They grow steadily with what the client reads, unlike the transport's buffer: the kernel empties that in lumps,
    and TLS keeps another one behind it.
    """
    connected = transport.get_extra_info("socket")
    if sys.platform != "linux" or connected is None:
        return None
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[_BYTES_ACKED], sys.byteorder) if len(info) == _TCP_INFO_BYTES else None
