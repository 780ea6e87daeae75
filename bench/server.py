"""Start a server as a user would, in a process of its own, and end that process."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import aiohttp

from bench.client import BenchmarkError, Client, connected

START_SECONDS = 300.0
END_SECONDS = 15.0
POLL_SECONDS = 0.02


class NotReadyError(Exception):
    """The server did not become healthy."""


class Server:
    """A server process on a free port, with a client; made by `serving`."""

    client: Client
    ready_s: float
    """Seconds from the last start until it was healthy, in steps of `POLL_SECONDS`."""

    def __init__(self, command: Sequence[str], log: Path, *, needs_costs: bool = True) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._log = log
        self._needs_costs = needs_costs
        log.write_bytes(b"")
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self) -> None:
        """Run the command, append its output to the log, and wait until it is healthy and knows needed costs."""
        with self._log.open("ab") as output:
            n_before = output.tell()
            started = perf_counter()
            self._process = await create_subprocess_exec(*self._command, stdout=output, stderr=output)
        for _ in range(int(START_SECONDS / POLL_SECONDS)):
            if await self.client.healthy():
                self.ready_s = perf_counter() - started
                if self._needs_costs:
                    await self.measured(n_before)
                return
            if self._process.returncode is not None:
                raise NotReadyError(f"the server ended with status {self._process.returncode} before it was ready")
            await asyncio.sleep(POLL_SECONDS)
        raise NotReadyError(f"the server was not ready after {START_SECONDS:.0f} seconds")

    async def measured(self, n_before: int) -> None:
        """Wait until llamaslot has measured the costs of a model that it loaded after `n_before` bytes of the log.

        They may be known from an earlier start.
        """
        for _ in range(int(START_SECONDS)):
            told = self._log.read_bytes()[n_before:]
            if b"costs.pending" not in told or b"costs.measured" in told:
                return
            assert self._process is not None, "started"
            if self._process.returncode is not None:
                raise NotReadyError(f"the server ended with status {self._process.returncode} while it measured")
            # Seldom, because looking takes CPU time from what is measured.
            await asyncio.sleep(1.0)
        raise NotReadyError(f"other programs kept costs from being measured for {START_SECONDS:.0f} seconds")

    async def crash(self) -> None:
        """Kill it with SIGKILL."""
        assert self._process is not None, "started"
        self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        """Terminate it, and kill it if that takes more than `END_SECONDS`."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            await self.crash()


def llamaslot(
    model: Path | str | None = None, *flags: str, checkout: Path | None = None, measurements: Path | None = None
) -> list[str]:
    """The command that serves `model` with this project's server, imported from `checkout` if one is given.

    What such a server measures is kept in the folder `measurements`.
    """
    command = [sys.executable, "-m", "llamaslot.cli.main", "serve"]
    if checkout is not None:
        # -P keeps the working directory out of the path: it may hold another version of the package.
        home = () if measurements is None else (f"XDG_CACHE_HOME={measurements}",)
        command = ["env", f"PYTHONPATH={checkout}", *home, sys.executable, "-P", *command[1:]]
    return [*command, *(() if model is None else ("-m", str(model))), *flags]


@asynccontextmanager
async def serving(command: Sequence[str], *, log: Path, needs_costs: bool = True) -> AsyncIterator[Server]:
    """Run a server's `command` on a free port and yield it once it is healthy; its output goes to `log`.

    Without `needs_costs`, llamaslot need not know its costs yet: for what is counted, not timed.
    """
    server = Server(command, log, needs_costs=needs_costs)
    try:
        async with connected(server.url) as server.client:
            await server.start()
            yield server
    except (NotReadyError, aiohttp.ClientError) as error:
        raise BenchmarkError(f"{error}; the end of {log}:\n{_tail(log)}") from error
    finally:
        await server.end()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
