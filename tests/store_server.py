"""A server of Redis's protocol for tests: one in this process, or the program that LLAMASLOT_TEST_STORE names."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fakeredis
import pytest
import redis
from fakeredis import TcpFakeServer
from fakeredis._clients._tcp_server import Writer
from redis.asyncio import Redis


def _write_all(writer: Writer, data: bytes) -> None:
    """Send a whole reply; the class's own method fails where one of megabytes has to wait for its client."""
    client, rest = writer.request_handler.connection, memoryview(data)
    while rest:
        try:
            rest = rest[client.send(rest) :]
        except BlockingIOError:
            select.select([], [client], [], 10.0)


Writer.write = _write_all
PROGRAM = os.environ.get("LLAMASLOT_TEST_STORE", "")
"""Such as redis-server or valkey-server."""


class StoreServer:
    """The server; each client has connections of its own."""

    def __init__(self, *flags: str, port: int = 0) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._tcp: TcpFakeServer | None = None
        if not PROGRAM:
            self._fake = fakeredis.FakeServer()
            return
        program = shutil.which(PROGRAM)
        if program is None:
            pytest.skip(f"LLAMASLOT_TEST_STORE: {PROGRAM} is not installed")
        with socket.create_server(("127.0.0.1", port)) as free:
            self._port = free.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()
        command = [
            program,
            "--port",
            str(self._port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            self._folder.name,
        ]
        self._process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"{PROGRAM} does not listen")

    def client(self) -> Any:
        """A new client."""
        if self._process is None:
            return fakeredis.FakeAsyncRedis(server=self._fake)
        return Redis(host="127.0.0.1", port=self._port, protocol=2, socket_connect_timeout=1.0)

    @property
    def port(self) -> int:
        """The port for other processes."""
        if self._process is not None:
            return self._port
        if self._tcp is None:
            self._tcp = TcpFakeServer(("127.0.0.1", 0))
            self._tcp.daemon_threads = True
            self._tcp.fake_server = self._fake
            threading.Thread(target=self._tcp.serve_forever, args=(0.05,), daemon=True).start()
        port: int = self._tcp.server_address[1]
        return port

    def connect(self, password: str | None = None) -> Any:
        """A client for code without an event loop."""
        if self._process is None:
            return fakeredis.FakeRedis(server=self._fake)
        return redis.Redis(host="127.0.0.1", port=self._port, protocol=2, password=password)

    def kill(self) -> None:
        """End the server; clients then fail."""
        if self._process is None:
            self._fake.connected = False
        else:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Release everything."""
        if self._process is not None:
            self.kill()
            self._folder.cleanup()
        if self._tcp is not None:
            self._tcp.shutdown()
            # Of a connection that is open still, the thread ends with its client.
            self._tcp.socket.close()


@contextmanager
def store_server(*flags: str, port: int = 0) -> Iterator[StoreServer]:
    """A server on a port, 0 for a free one, that ends with the block."""
    server = StoreServer(*flags, port=port)
    try:
        yield server
    finally:
        server.close()
