"""Forked servers for benchmarks: starting Python takes longer than most benchmarks on a tiny model."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import Process
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from bench import server
from bench.server import llamaslot
from tests.forked import ForkedProcess

POLL_S = 0.02


class ForkedServer:
    """The part of asyncio's `Process` that `bench.server` uses, for a forked `llamaslot`."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.terminate = process.terminate
        self.kill = process.kill

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for its end."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(POLL_S)
        return status


@contextmanager
def forked_servers(fault: str = "") -> Iterator[None]:
    """Have benchmarks fork their llamaslot servers, each of one process; `fault` is source that each runs first."""
    start = server.create_subprocess_exec
    own = llamaslot()

    async def create(*command: str, stdout: IO[bytes], stderr: IO[bytes]) -> Process | ForkedServer:
        if [*command[: len(own)]] != own:
            return await start(*command, stdout=stdout, stderr=stderr)
        log = Path(stdout.name)
        argv = ["serve", "--in-process", *command[len(own) :]]
        return ForkedServer(ForkedProcess(argv, os.environ, log, log, fault=fault))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "create_subprocess_exec", create)
        yield
