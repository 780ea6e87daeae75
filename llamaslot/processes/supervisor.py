"""Supervisor: keeps a child process running."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from llamaslot.processes.child import Child, Exit

_RETRY_S = 30.0
"""Time until the next attempt if a process cannot be started, such as with too many open files."""

_log = structlog.get_logger(__name__)


class Supervisor:
    """Runs `module` in a child process, and starts it again when it has ended.

    `on_started` is called when a process takes messages, `on_message` for each of its own. `on_ended` returns the
    seconds until the next start, or None for no further one.
    """

    def __init__(
        self,
        module: str,
        message_type: Any,
        *,
        on_started: Callable[[], None],
        on_message: Callable[[Any], None],
        on_ended: Callable[[Exit], float | None],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._message_type = message_type
        self._on_started = on_started
        self._on_message = on_message
        self._on_ended = on_ended
        self._env = env
        self._child: Child | None = None
        self._restarting: asyncio.Task[None] | None = None
        self.is_stopping = False

    @property
    def pid(self) -> int:
        """The id of the process, 0 without one."""
        return self._child.pid if self._child is not None else 0

    @property
    def is_stopped(self) -> bool:
        """True while the process is stopped, by a signal or a debugger."""
        return self._child is not None and self._child.is_stopped

    async def start(self) -> None:
        """Start the process; raises `OSError`."""
        self._child = await Child.start(
            self._module, self._message_type, self._on_message, self._ended, env=self._env
        )
        self._on_started()

    def send(self, message: Any) -> None:
        """Send a message; it is lost if there is no process."""
        if self._child is not None:
            self._child.send(message)

    def kill(self) -> None:
        """End the process at once; another one is started unless `is_stopping`."""
        if self._child is not None:
            self._child.kill()

    async def stop(self, message: Any, seconds: float) -> Exit | None:
        """Send a message that ends the process, and kill it after `seconds`; return its end, None without one."""
        self.is_stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
        child = self._child
        if child is None:
            return None
        child.send(message)
        if not await child.ended(seconds):
            child.kill()
            await child.ended(1)
        # A process that hangs in the kernel has not ended even then.
        return child.exit or Exit(-signal.SIGKILL, was_killed=True, is_held=True)

    def _ended(self, end: Exit) -> None:
        self._child = None
        pause: float | None = _RETRY_S
        try:
            pause = self._on_ended(end)
        except Exception:
            _log.exception("process.end_not_handled", module=self._module)
        if pause is not None and not self.is_stopping:
            self._restarting = asyncio.create_task(self._restart(pause))

    async def _restart(self, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            if self.is_stopping:
                return
            try:
                await self.start()
            except OSError as error:
                _log.error("process.not_started", module=self._module, reason=str(error), retry_in_s=_RETRY_S)
                pause = _RETRY_S
            else:
                return
