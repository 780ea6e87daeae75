"""The engine in a process of its own, started again with the same model when it ends.

    state      event                                          next state
    LOADING    Loaded                                         RUNNING
    LOADING    the process ends, the first one                STOPPED
    LOADING    the process ends, a later one                  LOADING, after a pause
    RUNNING    the engine reports that it died                ENDING
    RUNNING    the process ends                               LOADING, after a pause
    ENDING     the process ends                               LOADING, after a pause
    any        the process ends after `stop` or `kill`,       STOPPED
               because the model was changed, or while
               none is wanted

The pause grows with each process that neither serves a request nor runs for ten seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

import structlog

from llamaslot.base.errors import ConfigError
from llamaslot.base.events import Event, Finished, ModelInfoChanged, Stopped
from llamaslot.base.model import ModelInfo
from llamaslot.processes.messages import (
    OVERDUE_STATUS,
    Events,
    FromEngine,
    Loaded,
    LoadEngine,
    Loading,
    Refused,
    Stop,
)
from llamaslot.processes.supervisor import Exit, Supervisor

_FIRST_PAUSE_S = 0.5
_MAX_DOUBLINGS = 6
"""The pause is at most 32 s."""
_HEALTHY_AFTER_S = 10.0
_ENDING_S = 12.0
"""Time that a process may take to end once its engine has died."""

_log = structlog.get_logger(__name__)


class _State(Enum):
    LOADING = "loading"
    RUNNING = "running"
    ENDING = "ending"
    STOPPED = "stopped"


class EngineSupervisor(Supervisor):
    """Keeps an engine running in `module`. All methods are called on the event loop.

    `config` and `memory_bytes` are sent to each new process. `on_progress` gets what is loaded and the fraction
    done.
    """

    def __init__(
        self, module: str, config: Any, on_progress: Callable[[str, float], None], *, memory_bytes: int = 0
    ) -> None:
        super().__init__(module, FromEngine)
        self.config = config
        self._memory_bytes = memory_bytes
        self._on_progress = on_progress
        self._early: list[Event] = []
        """Events before `listen`, such as the end of a self-test while the vocabulary is loaded."""
        self._on_events: Callable[[list[Event]], None] = self._early.extend
        self._on_lost: Callable[[bool], None] = lambda _: None
        self._on_restarted: Callable[[], None] = lambda: None
        self._is_wanted: Callable[[], bool] = lambda: True
        self._state = _State.LOADING
        self._info: ModelInfo | None = None
        """Of the first engine."""
        self._started: asyncio.Future[Loaded | None] = asyncio.get_running_loop().create_future()
        # Retrieve the exception: if the server fails earlier, nobody awaits it.
        self._started.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._error: ConfigError | None = None
        """The reason why the process refused to load the model."""
        self._n_failures = 0
        """Processes in a row that did not become healthy."""
        self._timer: asyncio.TimerHandle | None = None
        """Until a running process counts as healthy, or an ending one is killed."""

    @property
    def has_ended(self) -> bool:
        """True if there is no engine, and none will be started."""
        return self._state is _State.STOPPED

    async def loaded(self) -> Loaded | None:
        """Wait until the model is loaded for the first time; None if it was stopped.

        Raises `ConfigError` if that is refused or fails.
        """
        return await self._started

    def listen(
        self,
        on_events: Callable[[list[Event]], None],
        on_lost: Callable[[bool], None],
        on_restarted: Callable[[], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Pass events to `on_events`.

        `on_lost` is called when the running engine has ended, with True if it crashed; `on_restarted` when it runs
        again, which it does if `is_wanted` returns True then.
        """
        self._on_events, self._on_lost, self._on_restarted = on_events, on_lost, on_restarted
        self._is_wanted = is_wanted
        if self._early:
            on_events(self._early)
        if self._state is not _State.RUNNING:
            on_lost(False)

    def interrupt(self) -> None:
        """Have it stop as soon as possible, such as while it loads the model."""
        self.is_stopping = True
        self.send(Stop())

    async def stop(self, seconds: float) -> str:
        """End the engine, by force after `seconds`; return the reason for exit status 1.

        Empty if it ended in order, was not running, or was killed from outside.
        """
        was_running = self._state is _State.RUNNING
        end = await self._end_child(seconds)
        if end is None or not was_running or end.status == 0:
            return ""
        if end.was_killed:
            return (
                f"the engine did not end within {seconds:g} s and was killed; a disk that does not respond is the "
                "usual cause"
            )
        if end.is_crash:
            return f"the engine did not end in order: {end.text}"
        _log.warning("engine.ended", reason=end.text, crashed=False)
        return ""

    def _on_started(self) -> None:
        self.send(LoadEngine(self.config, needs_folders=self._info is None, memory_bytes=self._memory_bytes))

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Events(events):
                self._pass_on(events)
            case Loading(text, fraction):
                if self._info is None:
                    self._on_progress(text, fraction)
            case Loaded(info):
                self._on_loaded(info, message)
            case Refused(error):
                self._error = ConfigError(error.message, param=error.param)

    def _pass_on(self, events: list[Event]) -> None:
        if any(isinstance(event, Finished) for event in events):
            self._n_failures = 0
        # An engine that died is started again: only the end that was asked for is one.
        has_died = isinstance(events[-1], Stopped) and not self.is_stopping
        if has_died:
            events.pop()
        if events:
            self._on_events(events)
        if has_died and self._state is _State.RUNNING:
            self._state = _State.ENDING
            # It must not count as healthy any more.
            if self._timer is not None:
                self._timer.cancel()
            # It frees the model and closes the disk, either of which may hang.
            self._timer = asyncio.get_running_loop().call_later(_ENDING_S, self._kill_child)
            self._on_lost(True)

    def _on_loaded(self, info: ModelInfo, loaded: Loaded) -> None:
        self._state = _State.RUNNING
        self._timer = asyncio.get_running_loop().call_later(_HEALTHY_AFTER_S, self._on_healthy)
        if self._info is None:
            self._info = info
            self._started.set_result(loaded)
        elif reason := _why_incompatible(self._info, info):
            # It did not run, so its end is no failure to stop.
            self._state = _State.STOPPED
            self.kill()
            _log.error("engine.not_restarted", reason=reason)
            self._on_events([Stopped(reason)])
        else:
            _log.info("engine.restarted", pid=self.pid)
            # The last engine may have ended before its self-test, or this one has to run it again.
            self._on_events([ModelInfoChanged(info)])
            self._on_restarted()

    def _on_healthy(self) -> None:
        self._n_failures = 0

    def _on_ended(self, end: Exit) -> float | None:
        """Report the end; return the seconds until the next start."""
        was_running = self._state is _State.RUNNING
        if self._timer is not None:
            self._timer.cancel()
        error, self._error = self._error, None
        reason = "a step took too long" if end.status == OVERDUE_STATUS else end.text
        if self.is_stopping or self._info is None:
            self._state = _State.STOPPED
            if not self._started.done() and self.is_stopping:
                self._started.set_result(None)
            elif not self._started.done():
                failed = ConfigError(f"the engine ended while it loaded the model: {reason}")
                self._started.set_exception(error or failed)
            return None
        is_wanted = self._is_wanted()
        self._state = _State.LOADING if is_wanted else _State.STOPPED
        pause = _FIRST_PAUSE_S * 2 ** min(self._n_failures - 1, _MAX_DOUBLINGS) if self._n_failures else 0.0
        self._n_failures += 1
        shown = error.message if error is not None else reason
        _log.error("engine.ended", reason=shown, crashed=end.is_crash, restart_in_s=pause)
        if was_running or not is_wanted:
            # Also to one that died before, and was reported then: what waits for another engine waits for none.
            self._on_lost(end.is_crash)
        return pause if is_wanted else None


def _why_incompatible(before: ModelInfo, after: ModelInfo) -> str:
    """Return why an engine cannot continue for the one before; empty if it can."""
    if before.kv_files != after.kv_files:
        return "the model's file or the library was changed while it was served: start the server again"
    if before.adapters != after.adapters:
        return "a file of --lora was changed while it was served: start the server again"
    # One that could not be used at the start stays unused.
    if before.projector is not None and before.projector != after.projector:
        return "the projector cannot be used any more, or its file was changed: start the server again"
    sizes = (before.n_ctx_slot, before.n_slots, before.n_vocab)
    if sizes != (after.n_ctx_slot, after.n_slots, after.n_vocab):
        return "the KV pool got another size: start the server again"
    return ""
