"""The engine's process, started by `processes/engine_supervisor.py` with the number of its socket.

It ends with its parent, whose end closes the socket.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Imports leave little garbage, and looking for it is a seventh of their time. On again once all is loaded.
    gc.disable()

import asyncio
import contextlib
import os
import socket
import sys

import msgspec
import uvloop

from llamaslot.app.config import Config
from llamaslot.app.logs import bind_fields, configure_logging, get_logger
from llamaslot.app.runtime.engine_host import EngineHost
from llamaslot.base.errors import LlamaslotError
from llamaslot.base.events import Event, Stopped
from llamaslot.engine.engine import Engine
from llamaslot.processes.channel import Channel, channel_to_parent, socket_of
from llamaslot.processes.messages import OVERDUE_STATUS, Events, LoadEngine, Loading, Refused, Stop, ToEngine
from llamaslot.processes.threads import start_default_executor

_PROGRESS_STEP = 0.02
"""Fraction of the file between two reports."""

_log = get_logger(__name__)


class EngineMain:
    """Runs an engine for the parent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._channel: Channel[ToEngine] = channel_to_parent(ToEngine, self._receive)
        self._load: asyncio.Future[LoadEngine] = asyncio.get_running_loop().create_future()
        self._engine: Engine | None = None
        self._must_stop = False
        self._reported = -1.0

    async def run(self) -> None:
        """Serve the parent until it says stop, or the engine dies; then exit without waiting for threads."""
        await self._channel.connect(socket_of(self._fd))
        load = await self._load
        config = msgspec.convert(load.config, Config)
        configure_logging(config.log_format, config.lowest_log_level)
        if load.memory_bytes:
            bind_fields(model=config.alias.partition(",")[0])
        host = EngineHost(config, needs_folders=load.needs_folders, memory_bytes=load.memory_bytes)
        try:
            has_failed = await self._serve(host)
        except LlamaslotError as error:
            self._channel.send(Refused(error.info()))
            has_failed = True
        except Exception:
            _log.exception("engine.failed")
            has_failed = True
        if hung := await host.close():
            _log.error("engine.aborted", reason=hung)
        await self._channel.finish()
        sys.stdout.flush()
        os._exit(1 if has_failed or hung else 0)

    async def _serve(self, host: EngineHost) -> bool:
        """Load and run; true if the engine died. Raises `ConfigError`."""
        loop = asyncio.get_running_loop()

        def on_progress(text: str, fraction: float) -> bool:
            if abs(fraction - self._reported) >= _PROGRESS_STEP:
                self._reported = fraction
                loop.call_soon_threadsafe(self._channel.send, Loading(text, fraction))
            return not self._must_stop

        await host.lock()
        loaded = await host.load(on_progress)
        if loaded is None or self._must_stop:
            return False
        reasons: list[str] = []

        def on_events(events: list[Event]) -> None:
            reasons.extend(event.reason for event in events[-1:] if isinstance(event, Stopped))
            self._channel.send(Events(events))

        self._engine = host.start(on_events)
        gc.freeze()
        gc.enable()
        self._channel.send(loaded)
        host.watch.run(lambda: _exit_overdue(self._fd))
        await self._engine.run()
        return any(reasons)

    def _receive(self, message: ToEngine) -> None:
        match message:
            case LoadEngine():
                self._load.set_result(message)
            case Stop():
                self._must_stop = True
                if not self._load.done():
                    os._exit(0)
                if self._engine is not None:
                    self._engine.stop()
            case _:
                assert self._engine is not None, "commands come after Loaded"
                self._engine.send(message)


def _exit_overdue(fd: int) -> None:
    """End the process, on the thread of the watch: the event loop may hang too."""
    _log.error("step.overdue", flag="--step-timeout")
    # A thread that waits in a driver may keep the process, and with it the connection, from ending.
    with contextlib.suppress(OSError):
        socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RDWR)
    os._exit(OVERDUE_STATUS)


def main() -> None:
    """Run until the parent ends, or says stop."""

    async def run() -> None:
        start_default_executor()
        await EngineMain(int(sys.argv[1])).run()

    uvloop.run(run())


if __name__ == "__main__":
    main()
