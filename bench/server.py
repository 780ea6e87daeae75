"""Starts a server as a user would, in its own process, and ends that process by its handle."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from bench.client import BenchmarkError, Client, connected

START_SECONDS = 300.0
END_SECONDS = 15.0
POLL_SECONDS = 0.1


class NotReadyError(Exception):
    """The server did not become healthy."""


def llamaslot(model: Path, *flags: str) -> list[str]:
    """The command that serves `model` with this project's server."""
    return [sys.executable, "-m", "llamaslot.cli.main", "serve", "-m", str(model), *flags]


@asynccontextmanager
async def serving(command: Sequence[str], *, log: Path) -> AsyncIterator[Client]:
    """Run a server's `command` on a free port, give a client once it is healthy; its output goes to `log`."""
    port = _free_port()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, "--host", "127.0.0.1", "--port", str(port), stdout=output, stderr=output
        )
        try:
            async with connected(f"http://127.0.0.1:{port}") as client:
                await _healthy(client, process)
                yield client
        except (NotReadyError, aiohttp.ClientError) as error:
            raise BenchmarkError(f"{error}; the end of {log}:\n{_tail(log)}") from error
        finally:
            await _end(process)


async def _healthy(client: Client, process: asyncio.subprocess.Process) -> None:
    for _ in range(int(START_SECONDS / POLL_SECONDS)):
        if await client.healthy():
            return
        if process.returncode is not None:
            raise NotReadyError(f"the server ended with status {process.returncode} before it was ready")
        await asyncio.sleep(POLL_SECONDS)
    raise NotReadyError(f"the server was not ready after {START_SECONDS:.0f} seconds")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
