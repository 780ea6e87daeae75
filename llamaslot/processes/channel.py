"""Channel: msgpack messages over a connected socket, each after its length in four bytes (little-endian)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec
import structlog

_HEADER = 4
_READ_SIZE = 1 << 18
_PR_SET_PDEATHSIG = 1
T = TypeVar("T")
_log = structlog.get_logger(__name__)


class Channel(asyncio.Protocol, Generic[T]):
    """Sends messages of any type and passes those that arrive, of `message_type`, to `on_message`.

    `on_lost` is called once, with the reason, when the connection has ended: the other side has closed it, has sent
    something else, or `on_message` has raised an exception.
    """

    def __init__(
        self, message_type: Any, on_message: Callable[[T], None], on_lost: Callable[[str], None] = lambda _: None
    ) -> None:
        self._decode = msgspec.msgpack.Decoder(message_type).decode
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._on_message = on_message
        self._on_lost = on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self, connected: socket.socket) -> None:
        """Use a connected socket, which is closed with the channel. Messages may arrive before this returns."""
        self._socket = connected.dup()
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connected)

    def send(self, message: Any) -> None:
        """Send a message; it is lost if the channel is closed."""
        if self._transport is None or self._transport.is_closing():
            return
        data = bytearray(_HEADER)
        # Encoded behind its header: joining them would copy the message, which may be a body of 64 MiB.
        self._encode_into(message, data, _HEADER)
        data[:_HEADER] = (len(data) - _HEADER).to_bytes(_HEADER, "little")
        self._transport.write(data)

    async def finish(self) -> None:
        """Close the socket once everything is sent; `on_lost` is not called."""
        self._on_lost = lambda _: None
        self._on_message = lambda _: None
        if self._transport is not None:
            self._transport.close()
            await self._closed

    def abort(self) -> None:
        """Close the socket at once; no message is passed on any more, and `on_lost` is not called."""
        self._on_lost = lambda _: None
        self._on_message = lambda _: None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport (`asyncio.Protocol`)."""
        # uvloop's transports are not subclasses of `asyncio.Transport`.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and pass on the messages that they complete (`asyncio.Protocol`)."""
        self._received += data
        start, end = 0, len(self._received)
        with memoryview(self._received) as view:
            while end - start >= _HEADER:
                size = int.from_bytes(view[start : start + _HEADER], "little")
                if end - start - _HEADER < size:
                    break
                start += _HEADER
                try:
                    message = self._decode(view[start : start + size])
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    self._fail(f"a message cannot be read: {error}")
                    return
                start += size
                try:
                    self._on_message(message)
                except Exception as error:
                    # Continuing would leave requests without a terminal event; a lost connection ends all of them.
                    _log.exception("channel.message_failed", type=type(message).__name__)
                    self._fail(f"a message could not be handled: {error}")
                    return
        del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end (`asyncio.Protocol`)."""
        assert self._socket is not None
        with self._socket:
            if exc is not None:
                self._read_rest(self._socket)
        self._closed.set_result(None)
        self._report(str(exc) if exc is not None else "the other side has closed the connection")

    def _read_rest(self, connected: socket.socket) -> None:
        """Take what the other side sent before it ended: the transport drops it when a write fails."""
        with contextlib.suppress(OSError):
            connected.setblocking(False)
            while data := connected.recv(_READ_SIZE):
                self.data_received(data)

    def _fail(self, reason: str) -> None:
        assert self._transport is not None
        self._transport.abort()
        self._report(reason)

    def _report(self, reason: str) -> None:
        on_lost, self._on_lost = self._on_lost, lambda _: None
        self._on_message = lambda _: None
        on_lost(reason)


def channel_to_parent(message_type: Any, on_message: Callable[[T], None]) -> Channel[T]:
    """Set up a child process; return its channel to the parent, at whose end the child ends at once.

    Signals that a service manager or a terminal sends to all processes are left to the parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # Also where a thread keeps the event loop from noticing the parent's end.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The stack of a crash in llama.cpp goes to standard error.
    faulthandler.enable()
    return Channel(message_type, on_message, lambda _: os._exit(1))


def socket_of(fd: int) -> socket.socket:
    """Return the socket to the parent; programs that are started here, such as a debugger, do not get it."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
