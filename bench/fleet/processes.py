"""The fleet of `examples/fleet`, started and controlled by `fleet.py` as its user does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.client import BenchmarkError, connected
from bench.report import ROOT

PROGRAM = ROOT / "examples" / "fleet" / "fleet.py"
START_SECONDS = 300.0
END_SECONDS = 120.0
POLL_SECONDS = 0.2


class FleetProcess:
    """A running `fleet.py up`; made by `running`."""

    def __init__(self, folder: Path, process: Process) -> None:
        self._folder = folder
        self._process = process
        self.url = ""

    async def until_ready(self) -> None:
        """Wait until the gateway sends requests to all workers. Raises `BenchmarkError`."""
        for _ in range(int(START_SECONDS / POLL_SECONDS)):
            if self._process.returncode is not None:
                tail = (self._folder / "fleet.log").read_text(errors="replace")[-1000:]
                raise BenchmarkError(f"the fleet ended with status {self._process.returncode}:\n{tail}")
            # It may be ending, and say why in its log.
            with contextlib.suppress(BenchmarkError):
                if (status := await self.status())["ready"]:
                    self.url = status["gateway"]["url"]
                    return
            await asyncio.sleep(POLL_SECONDS)
        raise BenchmarkError(f"the fleet was not ready after {START_SECONDS:.0f} s")

    async def status(self) -> dict[str, Any]:
        """Return the state, address and process id of gateway and workers."""
        status: dict[str, Any] = json.loads(await self.command("status", "--json"))
        return status

    async def command(self, *words: str) -> str:
        """Run a command of `fleet.py`; returns its output. Raises `BenchmarkError`."""
        program = [sys.executable, str(PROGRAM), "--dir", str(self._folder), *words]
        process = await create_subprocess_exec(*program, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise BenchmarkError(f"fleet.py {' '.join(words)}: {output.decode(errors='replace')}")
        return output.decode()

    async def workers(self) -> list[str]:
        """The addresses of the workers that run."""
        return [each["url"] for each in (await self.status())["workers"] if each["pid"]]

    async def kill(self, address: str) -> None:
        """Kill a worker's process with SIGKILL."""
        for each in (await self.status())["workers"]:
            if each["url"] == f"http://{address}" and each["pid"]:
                os.kill(each["pid"], signal.SIGKILL)
                return
        raise BenchmarkError(f"no worker runs at {address}")

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    async def ended(self) -> None:
        """Wait until it has ended by itself. Raises `TimeoutError`."""
        await asyncio.wait_for(self._process.wait(), END_SECONDS)

    async def end(self) -> None:
        """End it in order; kill it if that takes too long."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise BenchmarkError(f"the fleet did not end within {END_SECONDS:.0f} s") from None


@asynccontextmanager
async def running(folder: Path, flags: Sequence[str], worker_flags: Sequence[str]) -> AsyncIterator[FleetProcess]:
    """Run a fleet in `folder`, with `flags` of `fleet.py up` and flags of its workers.

    Each fleet makes a key of its own for a remote store, so that it finds nothing there of an earlier fleet.
    """
    environment = {name: value for name, value in os.environ.items() if name != "LLAMASLOT_CACHE_REMOTE_KEY"}
    command = [sys.executable, str(PROGRAM), "--dir", str(folder), "up", "--port", "0", *flags]
    with (folder / "fleet.log").open("wb") as log:
        process = await create_subprocess_exec(
            *command, "--", *worker_flags, env=environment, stdin=DEVNULL, stdout=log, stderr=log
        )
    fleet = FleetProcess(folder, process)
    try:
        await fleet.until_ready()
        yield fleet
    finally:
        await fleet.end()


async def counted(urls: Sequence[str], name: str) -> int:
    """Return the sum of a counter of `/metrics` over servers."""
    total = 0.0
    for url in urls:
        async with connected(url) as client:
            total += await client.counter(name)
    return round(total)
