"""Supervisor of a fleet: starts workers and gateway, restarts those that crash, drains and restarts on request.

starting -> ready -> draining -> stopped        a worker; `start` begins again
    ^         |
    +---------+  ended by itself: started again after a pause that grows
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from children import Children, bound
from gateways import FleetError, Gateway, get

POLL_S = 0.1
START_TIMEOUT_S = 600.0
"""Time for a worker to load its model."""
END_TIMEOUT_S = 90.0
"""Time for a worker to end beyond its --drain-delay: 30 s for running requests, then the disk is flushed."""
GATEWAY_TIMEOUT_S = 30.0
MAX_PAUSE_S = 30.0
LOG_TAIL_CHARS = 500
GOOD_RUN_S = 60.0
"""A process that ran so long is started again at once when it ends."""


@dataclass
class Child:
    """A process that is started again when it ends, unless it was told to."""

    name: str
    command: Callable[[], list[str]]
    url: str
    log: Path
    children: Children
    restarts: bool = True
    state: str = "stopped"
    starts: int = 0
    process: Process | None = field(default=None, repr=False)
    wanted: bool = False
    was_ready: bool = False
    keeper: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        """Its process id; 0 if it does not run."""
        return self.process.pid if self.process is not None and self.process.returncode is None else 0

    def begin(self) -> None:
        """Start it and keep it running; if it ends before it is ready, `until_ready` raises."""
        self.wanted, self.was_ready = True, False
        self.keeper = asyncio.create_task(self._keep())

    async def until_ready(self, seconds: float) -> None:
        """Wait until `/health` is a 200. Raises `FleetError`."""
        for _ in range(int(seconds / POLL_S)):
            if self.state == "ready":
                return
            if self.keeper is not None and self.keeper.done():
                # The reason why, unless it ended after a moment in which it was ready.
                self.keeper.result()
                break
            await asyncio.sleep(POLL_S)
        raise FleetError(f"{self.name} was not ready within {seconds:.0f} s; see {self.log}")

    async def end(self, *, signals: int = 1, seconds: float = END_TIMEOUT_S) -> None:
        """Terminate it and wait; kill it if it does not end. A second signal cuts a worker's draining short."""
        self.wanted = False
        process = self.process
        if process is not None and process.returncode is None:
            self.state = "draining"
            for _ in range(signals):
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await asyncio.sleep(POLL_S)
            try:
                await asyncio.wait_for(process.wait(), seconds)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self.keeper is not None:
            self.keeper.cancel()
            await asyncio.wait([self.keeper])
            self.keeper = None
        self.state = "stopped"

    async def _keep(self) -> None:
        """Run the process, and start it again when it ends; the pauses grow if it ends early."""
        loop, pause = asyncio.get_running_loop(), 0.0
        while self.wanted:
            self.state, began = "starting", loop.time()
            self.starts += 1
            try:
                process = await self._started()
            except (FleetError, OSError) as error:
                if not self.was_ready:
                    self.wanted, self.state = False, "stopped"
                    raise FleetError(f"{self.name} cannot be started: {error}") from error
                self.state = "ended"
                pause = min(max(1.0, 2 * pause), MAX_PAUSE_S)
                say(f"{self.name} cannot be started: {error}; tried again in {pause:.0f} s")
                await asyncio.sleep(pause)
                continue
            watching = asyncio.create_task(self._watch())
            try:
                status = await process.wait()
            finally:
                watching.cancel()
            if not self.wanted:
                return
            if not self.was_ready:
                self.wanted, self.state = False, "stopped"
                tail = self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
                raise FleetError(f"{self.name} ended with status {status} before it was ready:\n{tail}")
            self.state = "ended"
            if not self.restarts:
                say(f"{self.name} ended with status {status} (log: {self.log})")
                self.wanted = False
                return
            is_early = loop.time() - began < GOOD_RUN_S
            pause = min(max(1.0, 2 * pause), MAX_PAUSE_S) if is_early else 0.0
            say(f"{self.name} ended with status {status}; it is started again in {pause:.0f} s (log: {self.log})")
            await asyncio.sleep(pause)

    async def _started(self) -> Process:
        """Start its process. Raises `FleetError` and `OSError`."""
        with self.log.open("ab") as log:
            # In a session of its own: Ctrl-C on the terminal is for the supervisor, which ends all in order.
            self.process = await create_subprocess_exec(
                *bound(self.command()), stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.children.add(self.name, self.process.pid)
        return self.process

    async def _watch(self) -> None:
        """Set the state by `/health`, again and again."""
        while True:
            is_well = await asyncio.to_thread(get_health, self.url)
            if self.state in ("starting", "unhealthy") and is_well:
                self.state, self.was_ready = "ready", True
            elif self.state == "ready" and not is_well:
                self.state = "unhealthy"
            await asyncio.sleep(POLL_S if self.state == "starting" else 10 * POLL_S)


class Fleet:
    """Workers and their gateway. `fleet.py` sends commands to it through a socket."""

    def __init__(self, workers: list[Child], gateway: Child, routes: Gateway, socket: Path) -> None:
        self.workers = workers
        self.gateway = gateway
        self._routes = routes
        self._socket = socket
        self._changing = asyncio.Lock()
        self.stopping = asyncio.Event()
        self.was_ready = False

    async def run(self) -> None:
        """Serve until a signal or `down`."""
        loop = asyncio.get_running_loop()
        # SIGHUP: the terminal was closed. The children have sessions of their own, and would stay.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stopping.set)
        control = await asyncio.start_unix_server(self._control, str(self._socket))
        self._socket.chmod(0o600)
        stopping = asyncio.create_task(self.stopping.wait())
        serving = asyncio.create_task(self._start())
        try:
            await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await stopping
        finally:
            serving.cancel()
            say("ending")
            control.close()
            # Nothing arrives any more once the gateway has ended, so no worker needs its drain delay.
            await self.gateway.end(seconds=10.0)
            await asyncio.gather(*(worker.end(signals=2) for worker in self.workers))
            self.gateway.children.clear()
            # `down` waits for this.
            self._socket.unlink(missing_ok=True)

    async def _start(self) -> None:
        """Start the workers, then the gateway, which looks for workers at its start and seldom later."""
        say(f"starting {len(self.workers)} workers; logs are in {self.gateway.log.parent}")
        for worker in self.workers:
            worker.begin()
        await asyncio.gather(*(worker.until_ready(START_TIMEOUT_S) for worker in self.workers))
        self.gateway.begin()
        await self.gateway.until_ready(GATEWAY_TIMEOUT_S)
        for number in range(len(self.workers)):
            await self._until_routed(number)
        self.was_ready = True
        say(f"ready: {self.gateway.url} -> {', '.join(worker.url for worker in self.workers)}")

    async def _until_routed(self, worker: int) -> None:
        """Wait until the gateway takes a worker for healthy. Raises `FleetError`."""
        for _ in range(int(GATEWAY_TIMEOUT_S / POLL_S)):
            if await asyncio.to_thread(self._routes.routes_to, worker):
                return
            await asyncio.sleep(POLL_S)
        raise FleetError(f"the gateway does not take {self.workers[worker].name} for healthy")

    async def drain(self, number: int) -> AsyncIterator[str]:
        """End a worker once its requests have ended; new ones go to the others."""
        worker = self._worker(number)
        if not worker.wanted:
            raise FleetError(f"{worker.name} does not run")
        async with self._changing:
            if not any(each.state == "ready" for each in self.workers if each is not worker):
                raise FleetError(f"no other worker is ready: draining {worker.name} would refuse requests")
            yield f"{worker.name} drains"
            await worker.end(seconds=END_TIMEOUT_S + self._routes.drain_delay_s)
            yield f"{worker.name} has ended"

    async def start(self, number: int) -> AsyncIterator[str]:
        """Start a worker that was drained, and send it requests again once it is ready."""
        worker = self._worker(number)
        async with self._changing:
            if worker.wanted:
                raise FleetError(f"{worker.name} already runs")
            worker.begin()
            await worker.until_ready(START_TIMEOUT_S)
            await self._until_routed(number - 1)
            yield f"{worker.name} is ready"

    async def rolling_restart(self) -> AsyncIterator[str]:
        """Restart the workers one after the other."""
        for number in range(1, len(self.workers) + 1):
            if self._worker(number).wanted:
                async for line in self.drain(number):
                    yield line
            async for line in self.start(number):
                yield line

    def status(self) -> dict[str, Any]:
        """Return state, address and process id of gateway and workers."""
        workers = [
            {"name": each.name, "state": each.state, "url": each.url, "pid": each.pid, "starts": each.starts}
            for each in self.workers
        ]
        gateway = self.gateway
        front = {"state": gateway.state, "url": gateway.url, "pid": gateway.pid}
        return {"ready": self.was_ready, "gateway": front, "workers": workers}

    def _worker(self, number: int) -> Child:
        if not 1 <= number <= len(self.workers):
            raise FleetError(f"there is no worker {number}: they are numbered from 1 to {len(self.workers)}")
        return self.workers[number - 1]

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one command: a line of JSON for each thing that is done, the last one with `ok` or `error`."""

        async def send(**line: Any) -> None:
            writer.write(json.dumps(line).encode() + b"\n")
            await writer.drain()

        # A client that goes away does not stop what it has asked for.
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            line = await reader.readline()
            if not line:
                # `up` only looks whether a supervisor answers.
                return
            asked = json.loads(line)
            try:
                match asked["do"]:
                    case "status":
                        await send(**self.status())
                    case "down":
                        self.stopping.set()
                    case "drain":
                        await self._report(self.drain(asked["worker"]), send)
                    case "start":
                        await self._report(self.start(asked["worker"]), send)
                    case "rolling-restart":
                        await self._report(self.rolling_restart(), send)
                await send(ok=True)
            except FleetError as error:
                await send(error=str(error))

    async def _report(self, lines: AsyncIterator[str], send: Callable[..., Any]) -> None:
        async for line in lines:
            say(line)
            with contextlib.suppress(ConnectionError):
                await send(line=line)


def get_health(url: str) -> bool:
    """Return True if `/health` is a 200; a gateway's may have another body than a worker's."""
    return get(f"{url}/health", is_json=False) is not None


def say(text: str) -> None:
    """Print a line of the supervisor, which goes on if nothing reads it, such as a terminal that was closed."""
    with contextlib.suppress(OSError):
        print(f"fleet: {text}", file=sys.stderr, flush=True)
