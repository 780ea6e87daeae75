"""The composition root of `llamaslot serve`: wires engine, service and HTTP, and shuts them down in order.

    listen (503), load the model, serve; on a signal: report unhealthy, refuse and drain, stop the engine, close

In the unhealthy phase (`--drain-delay`), requests are still served while gateways learn to send them elsewhere. A
second signal ends this phase and the draining early; while the model loads, it ends the process (status 130). After
draining, the disk tier has 5 s to flush, then running threads have 5 s to end, and so have open connections and the
disk store. If a thread still hangs, the process exits without waiting for it (status 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgspec
import structlog

from llamaslot.app.cache_budgets import restart_flags
from llamaslot.app.config import Config
from llamaslot.app.config_reader import listed, read_template
from llamaslot.app.model_config import metadata_overrides
from llamaslot.app.models import resolve_model
from llamaslot.base.errors import ConfigError, LlamaslotError, stopped_error
from llamaslot.base.files import check_metadata
from llamaslot.processes.engine_supervisor import EngineSupervisor
from llamaslot.processes.messages import Loaded, SetModel
from llamaslot.processes.prompt_supervisor import PromptSupervisor
from llamaslot.processes.threads import in_daemon_thread, start_default_executor

if TYPE_CHECKING:
    from llamaslot.api.context import ApiSettings, Readiness
    from llamaslot.api.credentials import FileChanges
    from llamaslot.api.http_server import Application, Listener
    from llamaslot.service.service import Service

_log = structlog.get_logger(__name__)
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Parameters of glibc's `mallopt`."""
_MAPPED_BLOCK_BYTES = 64 * 2**10
_REMEMBER_TIMEOUT_S = 2.0
"""Time limit for ending the remaining requests and remembering their replies."""
_ENGINE_MAIN = "llamaslot.app.runtime.engine_main"
_PROMPT_MAIN = "llamaslot.app.runtime.prompt_main"
_END_TIMEOUT_S = 20.0
"""Time that an engine's process may take to end: 5 s each to flush the disk, to end threads, to close the disk."""
_PROMPT_TIMEOUT_S = 2.0
"""Time that the prompt worker may take to end."""

OnProgress: TypeAlias = Callable[[str, float], None]
"""Gets what is being done and the fraction done."""


async def serve(config: Config) -> int:
    """Serve until a signal arrives or the engine dies; return the process's exit status. Raises `ConfigError`."""
    model = resolve_model(config.model)
    # Report a broken file before any process is started.
    check_metadata(model, metadata_overrides(config))
    template = read_template(config)
    config = replace(config, model=str(model))
    start_default_executor()
    _bound_heap()
    async with contextlib.AsyncExitStack() as stack:
        on_progress = stack.enter_context(_progress())
        runtime = Runtime(config, template, on_progress)
        stop = _Signals()
        listeners: list[Listener] = []
        stack.push_async_callback(_stop, runtime, listeners)
        await runtime.engine.start()
        # Import these while the engine starts, because these imports take as long as its own.
        from llamaslot.api.context import READINESS, SETTINGS  # noqa: PLC0415
        from llamaslot.app.http_config import check_vocabulary, max_queue_per_client  # noqa: PLC0415
        from llamaslot.app.start_lines import announce  # noqa: PLC0415
        from llamaslot.service.metrics import Metrics  # noqa: PLC0415
        from llamaslot.service.service import Service  # noqa: PLC0415

        app = await _listen(config, stop, stack, listeners)
        loaded = None
        if app is not None:
            # Only now: on two CPUs its imports would slow the engine's, and it loads faster than the engine.
            await runtime.prompts.start()
            loaded = await _load(runtime, app[SETTINGS], stop, on_progress)
        if app is None or loaded is None:
            _log.info("server.stopped")
            return 0
        check_vocabulary(config, loaded.info)
        service = Service(
            loaded.info,
            runtime.prompts,
            Metrics(app[SETTINGS].model_names(loaded.info)[0], has_remote=bool(config.cache_remote)),
            max_queue=config.max_queue,
            max_queue_per_client=max_queue_per_client(config),
            request_timeout=config.request_timeout,
            warm_ahead=config.n_warm_ahead,
        )
        runtime.connect(service)
        stack.push_async_callback(service.close, _REMEMBER_TIMEOUT_S)
        # Exclude modules and other permanent objects from garbage collection: a full collection took 90 ms, during
        # which all streams stalled.
        gc.freeze()
        app[READINESS].set(service)
        if config.sleep_idle_seconds:
            sleeping = asyncio.create_task(service.unload_when_idle(config.sleep_idle_seconds))
            stack.callback(sleeping.cancel)
        announce(loaded, _urls(listeners[0], "https" if config.ssl_cert_file else "http"), config)
        await _first(service.stopped, stop.first)
        if service.stopped.done():
            app[READINESS].fail(stopped_error("the engine failed"))
            return 1
        await _drain(service, app[READINESS], stop.second, config)
    _log.info("server.stopped")
    return 0


def _bound_heap() -> None:
    """Make the C library return the memory of large bodies and replies to the system.

    glibc first allocates large blocks with mmap, but whenever such a block is freed it raises the threshold, up to
    32 MiB, and later blocks come from the heap. After 20 large replies this process had 175 MiB instead of 141, of
    which little was in use. Other C libraries do not have `mallopt`.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is not None:
        choose(_M_MMAP_THRESHOLD, _MAPPED_BLOCK_BYTES)
        choose(_M_ARENA_MAX, 2)


async def _listen(
    config: Config, stop: _Signals, stack: contextlib.AsyncExitStack, listeners: list[Listener]
) -> Application | None:
    """Create the application and start its listener; None if a signal came before its files were read."""
    from llamaslot.api.credentials import certificate  # noqa: PLC0415
    from llamaslot.api.http_server import create_app, serve  # noqa: PLC0415
    from llamaslot.api.middleware import KEYS  # noqa: PLC0415
    from llamaslot.app.http_config import api_settings  # noqa: PLC0415

    opening = in_daemon_thread(
        lambda: (create_app(api_settings(config)), certificate(config.ssl_cert_file, config.ssl_key_file))
    )
    await _first(opening, stop.first)
    if not opening.done():
        opening.cancel()
        return None
    app, tls = opening.result()
    stop.changes.append(app[KEYS].changes)
    if tls is not None:
        stop.changes.append(tls.changes)
        tls.changes.start()
        stack.callback(tls.changes.stop)
    context = tls.context if tls is not None else None
    listeners.append(await serve(app, listed(config.host), config.port, tls=context))
    return app


def _urls(listener: Listener, scheme: str) -> list[str]:
    names = ((f"[{host}]" if ":" in host else host, port) for host, port in listener.addresses)
    return [f"{scheme}://{name}:{port}" for name, port in names]


async def _load(runtime: Runtime, settings: ApiSettings, stop: _Signals, on_progress: OnProgress) -> Loaded | None:
    """Load the model; None if a signal came first.

    The first signal interrupts the reading of weights. llama.cpp's work after that cannot be interrupted, so a
    second signal ends the process.
    """
    loading = asyncio.ensure_future(runtime.load(settings))
    await _first(loading, stop.first)
    if not loading.done():
        runtime.interrupt()
        await _first(loading, stop.second)
    if not loading.done():
        runtime.kill()
        _abort("second signal while starting", 130)
    loaded = loading.result()
    on_progress("", 1.0)
    return loaded


@contextlib.contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show a progress bar for loading, if standard output is a terminal."""
    if not sys.stdout.isatty():
        yield lambda _text, _fraction: None
        return
    # Not imported at the top: without a terminal it would only slow down the start.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # noqa: PLC0415

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    bars = Progress(*columns, console=Console(), transient=True)
    task = bars.add_task("", total=1.0)

    def on_progress(text: str, fraction: float) -> None:
        if text and not bars.live.is_started:
            bars.start()
        bars.update(task, description=text, completed=fraction)
        if fraction >= 1:
            bars.stop()

    with contextlib.ExitStack() as stack:
        stack.callback(bars.stop)
        yield on_progress


async def _stop(runtime: Runtime, listeners: list[Listener]) -> None:
    """Stop the engine and close the connections; exit hard if a thread hangs, because Python would wait for it."""
    reason = await runtime.stop()
    for listener in listeners:
        await listener.close()
    if reason:
        _abort(reason, 1)


def _abort(reason: str, status: int) -> NoReturn:
    """Exit without waiting for threads."""
    _log.error("server.aborted", reason=reason)
    sys.stdout.flush()
    os._exit(status)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _drain(
    service: Service, readiness: Readiness, second_signal: asyncio.Future[None], config: Config
) -> None:
    """Report unhealthy for `--drain-delay`, then refuse new requests and wait for those in flight.

    A second signal ends both, and `--shutdown-timeout` the latter.
    """
    readiness.drain()
    delay = config.drain_delay
    _log.info(
        "server.draining", in_flight=service.capacity.n_in_flight, delay_s=delay, timeout_s=config.shutdown_timeout
    )
    await asyncio.wait((second_signal, service.stopped), timeout=delay, return_when=asyncio.FIRST_COMPLETED)
    service.capacity.refusal = stopped_error("")
    now = asyncio.get_running_loop().time
    deadline = now() + config.shutdown_timeout
    while service.capacity.n_in_flight and not second_signal.done() and now() < deadline:
        await asyncio.wait([second_signal], timeout=0.05)


class _Signals:
    """Futures for the first and the second SIGINT or SIGTERM.

    With a terminal, SIGHUP (the terminal was closed) counts like them. Without one it reloads keys and
    certificates. Under `nohup` it stays ignored.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._arrived)
        self.changes: list[FileChanges] = []
        """Watched files to reload on SIGHUP."""
        # Ask now: a closed terminal is no longer recognizable as one.
        self._has_terminal = sys.stdin is not None and sys.stdin.isatty()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        if self._has_terminal:
            self._arrived()
            return
        _log.info("server.reloading")
        for each in self.changes:
            each.check_soon()

    def _arrived(self) -> None:
        pending = next((f for f in (self.first, self.second) if not f.done()), None)
        if pending is not None:
            pending.set_result(None)


class Runtime:
    """Start `engine` and `prompts`, then call `load`, `connect` and `stop` in this order, the last one in any case.

    `template` is what `read_template` returns.
    """

    def __init__(self, config: Config, template: tuple[str, str], on_progress: OnProgress) -> None:
        self._template = template
        self._max_queue = config.max_queue
        self._config = msgspec.to_builtins(config)
        self.prompts = PromptSupervisor(_PROMPT_MAIN, self._config, timeout=config.prompt_timeout)
        self._is_interrupted = False
        self.engine = EngineSupervisor(_ENGINE_MAIN, self._config, on_progress)

    async def load(self, settings: ApiSettings) -> Loaded | None:
        """Wait until model and vocabulary are loaded; None if that was interrupted. Raises `ConfigError`."""
        loaded = await self.engine.loaded()
        if loaded is None:
            return None
        # The sizes of the pool and of checkpoints must not depend on what memory is free when it is started again.
        self.engine.config = {**self._config, **restart_flags(loaded.info)}
        try:
            of_requests = settings.request_policy(loaded.info, self._max_queue)
            await self.prompts.set_model(SetModel(loaded.info, *self._template, of_requests, loaded.records))
        except LlamaslotError as error:
            if self._is_interrupted:
                return None
            raise ConfigError(error.message, param=error.param) from None
        return loaded

    def connect(self, service: Service) -> None:
        """Run the engine for a service, and count restarts."""

        def on_restarted() -> None:
            service.metrics.record_restart("engine")
            service.engine_restarted()

        service.connect(self.engine.send, self._why_stopped)
        self.engine.listen(service.receive, service.engine_lost, on_restarted)
        self.prompts.on_restarted = lambda: service.metrics.record_restart("prompt_worker")

    def interrupt(self) -> None:
        """Have `load` stop as soon as possible."""
        self._is_interrupted = True
        self.engine.interrupt()
        self.prompts.kill()

    def kill(self) -> None:
        """End the child processes at once."""
        self.engine.kill()
        self.prompts.kill()

    async def stop(self) -> str:
        """End all in order; return why that is not possible, or an empty text."""
        reason = await self.engine.stop(_END_TIMEOUT_S)
        await self.prompts.stop(_PROMPT_TIMEOUT_S)
        return reason

    def _why_stopped(self) -> str:
        """Return why no request is carried out though no process has ended; empty if they are."""
        for process, name in ((self.engine, "engine"), (self.prompts, "prompt worker")):
            if process.is_suspended:
                return f"the {name} is stopped, by a signal or a debugger"
        return ""
