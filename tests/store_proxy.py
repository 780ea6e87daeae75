"""Proxy between a llamaslot server and a store of the remote tier, which injects faults for tests.

It delays, stalls, cuts, refuses or changes single Redis commands or their replies. It parses both, so a fault hits
exactly the command that a test names, or the middle of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import hiredis

Action = Literal["delay", "stall", "cut", "refuse", "flip", "answer"]
WRITES = frozenset(
    {b"HSET", b"SET", b"ZADD", b"INCRBY", b"LPUSH", b"SETRANGE", b"EVAL"},
)
"""Commands that a store without free memory refuses."""
OOM = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
_CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault to inject into all commands of these names, or into the replies to them if `in_reply`."""

    action: Action
    commands: frozenset[bytes]
    in_reply: bool = False
    seconds: float = 0.0
    """Length of a delay."""
    answer: bytes = b""
    """Sent instead of the store's reply."""
    is_endless: bool = False
    """Send the answer again and again."""

    def __post_init__(self) -> None:
        """Check the fields."""
        assert self.action != "delay" or self.seconds
        assert self.action != "refuse" or not self.in_reply


class _CutError(Exception):
    """Raised to close the connection that is being served."""


class StoreProxy:
    """Listens on a free port of 127.0.0.1, and forwards each connection to the store on port `target`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.fault: Fault | None = None
        self.seen: Counter[bytes] = Counter()
        """Number of commands of each name so far."""
        self.n_faults = 0
        """Number of commands and replies that were hit by the fault."""
        self._end = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """End the fault, and close all connections: some may be stalled."""
        self.fault = None
        self._close_connections()

    def down(self) -> None:
        """Stop listening and close all connections, as if the store was killed."""
        # Closing alone does not end a thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_connections()

    def up(self) -> None:
        """Listen again on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all threads."""
        self._end.set()
        self.down()

    def _close_connections(self) -> None:
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        listener = self._listener
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, _CutError):
            self._open.add(client)
            try:
                with socket.create_connection(("127.0.0.1", self._target)) as store:
                    self._open.add(store)
                    try:
                        self._relay(client, store)
                    finally:
                        self._open.discard(store)
            finally:
                self._open.discard(client)

    def _relay(self, client: socket.socket, store: socket.socket) -> None:
        commands = hiredis.Reader()
        while data := client.recv(_CHUNK):
            # A large command is to be hit in its middle.
            fault = self.fault
            if fault is not None and any(b"\r\n%b\r\n" % name in data[:256] for name in fault.commands):
                self._before(fault)
            commands.feed(data)
            while (command := commands.gets()) is not False:
                name = command[0].upper()
                self.seen[name] += 1
                fault = self.fault if self.fault is not None and name in self.fault.commands else None
                if fault is not None and fault.action in ("refuse", "answer"):
                    self.n_faults += 1
                    client.sendall(OOM if fault.action == "refuse" else fault.answer)
                    while fault.is_endless and self.fault is fault and not self._end.is_set():
                        client.sendall(fault.answer)
                    continue
                store.sendall(hiredis.pack_command(tuple(command)))
                self._reply(client, store, fault)

    def _before(self, fault: Fault) -> None:
        if fault.in_reply or fault.action in ("refuse", "flip", "answer"):
            return
        self.n_faults += 1
        if fault.action == "cut":
            raise _CutError
        self._pause(fault)

    def _reply(self, client: socket.socket, store: socket.socket, fault: Fault | None) -> None:
        if fault is None or not fault.in_reply:
            for data in _reply_from(store):
                client.sendall(data)
            return
        raw = bytearray(b"".join(_reply_from(store)))
        self.n_faults += 1
        middle = len(raw) // 2
        if fault.action == "delay":
            self._pause(fault)
        elif fault.action == "flip":
            raw[middle] ^= 8
        else:
            client.sendall(raw[:middle])
            if fault.action == "cut":
                # With a reset, which a killed process or machine may leave behind.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raise _CutError
            self._pause(fault)
        client.sendall(raw)

    def _pause(self, fault: Fault) -> None:
        if fault.action == "delay":
            time.sleep(fault.seconds)
            return
        deadline = time.monotonic() + 60
        while self.fault is fault and not self._end.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise _CutError


def _reply_from(store: socket.socket) -> Iterator[bytes]:
    """Yield the bytes of one reply as they come, up to its end."""
    replies = hiredis.Reader()
    while replies.gets() is False:
        data = store.recv(_CHUNK)
        if not data:
            raise _CutError
        replies.feed(data)
        yield data
