"""Child processes: a `Child` runs a module and is connected by a channel; a `Supervisor` keeps one running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from llamaslot.base.threads import has_ended, is_suspended
from llamaslot.processes.channel import Channel
from llamaslot.processes.messages import Stop

_RETRY_S = 30.0
"""Time until the next attempt if a process cannot be started, such as with too many open files."""


_DEFAULT_ENV = {"MALLOC_ARENA_MAX": "2", "GOMP_SPINCOUNT": "30000", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables of children, unless this process sets them; other C and OpenMP libraries ignore them.

glibc keeps freed memory in an arena for each thread.

Threads of libgomp spin 300,000 times for their next work before they sleep; if other processes need the CPUs too,
spinning takes them from the threads that have work. With 3,000 they also sleep between two steps: a woken thread
may get the same CPU as the one that woke it, and for a while steps take twice as long (8 streams of SmolLM2, three
runs: 53, 33 and 26 ms; with 30,000 always 26). The variable is read when libgomp is loaded, so it must be set
before the child starts.

Of numpy's linear algebra nothing is used, but the threads for it take 0.1 s of CPU time at each start.
"""
_TEARDOWN_S = 5.0
"""Time between the end of the socket and that of the process, such as for freeing memory of a GPU."""
_HELD_S = 2.0
"""Grace period for remaining threads once the main thread has ended."""
_LOOK_S = 0.5
"""Interval at which the state of a process is checked."""
_OPERATOR_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGKILL is also what the system sends when memory runs out: neither says anything about a request."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Exit:
    """The way in which a child ended."""

    status: int
    """Its exit status, or the negative number of the signal that ended it."""
    was_killed: bool = False
    """True if this process killed it."""
    is_held: bool = False
    """True if a thread that waits in the kernel keeps it from ending: it still has its memory, files and locks."""

    @property
    def is_crash(self) -> bool:
        """True if it failed by itself or this process killed it; false for status 0 and an operator's signal."""
        return self.status != 0 and (self.was_killed or -self.status not in _OPERATOR_SIGNALS)

    @property
    def text(self) -> str:
        """Description for logs and errors."""
        if self.is_held:
            return "killed, but one of its threads waits in the kernel, as for a disk that does not respond"
        if self.status >= 0:
            return f"exit status {self.status}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.status).name
        return f"signal {-self.status}"


class Child:
    """A running child; its output goes where this process' output goes."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel[Any]) -> None:
        self._process = process
        self._channel = channel
        self._was_killed = False
        self.is_suspended = False
        """True while a signal or a debugger suspends it: nothing is lost, and it goes on once that lets it."""
        self.exit: Exit | None = None
        """Set once it has ended."""
        self._watching: asyncio.Future[None]

    @classmethod
    async def start(
        cls,
        module: str,
        message_type: Any,
        on_message: Callable[[Any], None],
        on_exit: Callable[[Exit], None],
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `python -m module FD`; `on_exit` is called once, after the last message.

        `env` has environment variables in addition to those of this process. Raises `OSError`.
        """
        # `OMP_WAIT_POLICY` chooses how long threads spin.
        left_out = {"GOMP_SPINCOUNT"} if "OMP_WAIT_POLICY" in os.environ else set()
        defaults = {name: value for name, value in _DEFAULT_ENV.items() if name not in left_out}
        ours, theirs = socket.socketpair()
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        channel: Channel[Any] = Channel(message_type, on_message, lost.set_result)
        try:
            # In a session of its own: Ctrl-C in the terminal is for this process, which ends the child in order.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", module, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**defaults, **os.environ, **(env or {})},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = cls(process, channel)
        try:
            await channel.connect(ours)
        except BaseException:
            # Cancelled: nobody else knows the process.
            child.kill()
            await process.wait()
            raise
        child._watching = asyncio.ensure_future(child._watch(lost, on_exit))
        return child

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message; it is lost if the child has ended."""
        self._channel.send(message)

    def kill(self) -> None:
        """End it at once."""
        self._was_killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self, seconds: float) -> bool:
        """Wait until it has ended, at most `seconds`; false if it has not."""
        await asyncio.wait([self._watching], timeout=seconds)
        return self._watching.done()

    async def _watch(self, lost: asyncio.Future[str], on_exit: Callable[[Exit], None]) -> None:
        ending = asyncio.ensure_future(self._process.wait())
        dying = asyncio.ensure_future(self._until_dead())
        ends: list[asyncio.Future[Any]] = [lost, ending, dying]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # Any of them may come first: a process that is torn down closes its socket early, and children of its own
        # may keep the socket open. A process that is about to be reaped must not be killed: `kill` would reap it,
        # and its status would be lost.
        await asyncio.wait(ends[:2], timeout=_LOOK_S if dying.done() else _TEARDOWN_S)
        if not ending.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait([ending], timeout=_HELD_S if dying.done() else _TEARDOWN_S)
        dying.cancel()
        # Ignore messages of threads that a killed process may still have.
        self._channel.abort()
        status = ending.result() if ending.done() else -signal.SIGKILL
        self.exit = Exit(status, was_killed=self._was_killed, is_held=not ending.done())
        on_exit(self.exit)

    async def _until_dead(self) -> None:
        """Wait until the main thread has ended, and note whether the process is suspended.

        A thread in an uninterruptible wait keeps a killed process from being reaped and its socket open, so neither
        `wait` nor the channel tells.
        """
        while not has_ended(self.pid):
            await asyncio.sleep(_LOOK_S)
            suspended = is_suspended(self.pid)
            if suspended and not self.is_suspended:
                _log.warning("process.stopped", pid=self.pid, until="SIGCONT, or the end of the debugger")
            elif self.is_suspended and not suspended:
                _log.info("process.continued", pid=self.pid)
            self.is_suspended = suspended


class Supervisor:
    """Runs `module` in a child process, and starts it again when it has ended. Subclasses say what is sent to it.

    `env` has environment variables in addition to those of this process.
    """

    def __init__(self, module: str, message_type: Any, env: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._message_type = message_type
        self._env = env
        self._child: Child | None = None
        self._restarting: asyncio.Task[None] | None = None
        self.is_stopping = False

    def _on_started(self) -> None:
        """Send a new process its first messages."""
        raise NotImplementedError

    def _receive(self, message: Any) -> None:
        """Take a message of the process."""
        raise NotImplementedError

    def _on_ended(self, end: Exit) -> float | None:
        """Take the end of the process; return the seconds until the next start, None for no further one."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """The id of the process, 0 without one."""
        return self._child.pid if self._child is not None else 0

    @property
    def is_suspended(self) -> bool:
        """True while a signal or a debugger suspends the process."""
        return self._child is not None and self._child.is_suspended

    async def start(self) -> None:
        """Start the process, which begins to load; raises `OSError`."""
        self._child = await Child.start(self._module, self._message_type, self._receive, self._ended, env=self._env)
        if self.is_stopping:
            self.send(Stop())
        else:
            self._on_started()

    def send(self, message: Any) -> None:
        """Send a message; it is lost if there is no process."""
        if self._child is not None:
            self._child.send(message)

    def kill(self) -> None:
        """End the process at once, and start no other one."""
        self.is_stopping = True
        self._kill_child()

    def _kill_child(self) -> None:
        """End the process at once; another one is started unless `is_stopping`."""
        if self._child is not None:
            self._child.kill()

    async def _end_child(self, seconds: float) -> Exit | None:
        """Have the process end, and kill it after `seconds`; return its end, None without one."""
        self.is_stopping = True
        if self._restarting is not None:
            # It may be about to start a process, which must not be left behind.
            self._restarting.cancel()
            await asyncio.wait([self._restarting], timeout=seconds)
        child = self._child
        if child is None:
            return None
        child.send(Stop())
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
