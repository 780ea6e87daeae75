"""A server of Redis's protocol for tests: one in this process, or the program that LLAMASLOT_TEST_STORE names."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fakeredis
from redis.asyncio import Redis

PROGRAM = os.environ.get("LLAMASLOT_TEST_STORE", "")
"""Such as redis-server or valkey-server."""


class StoreServer:
    """The server; each client has connections of its own."""

    def __init__(self, *flags: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if not PROGRAM:
            self._fake = fakeredis.FakeServer()
            return
        program = shutil.which(PROGRAM)
        assert program is not None, f"LLAMASLOT_TEST_STORE: {PROGRAM} is not installed"
        with socket.create_server(("127.0.0.1", 0)) as free:
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


@contextmanager
def store_server(*flags: str) -> Iterator[StoreServer]:
    """A server that ends with the block."""
    server = StoreServer(*flags)
    try:
        yield server
    finally:
        server.close()
