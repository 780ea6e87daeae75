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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import structlog

from llamaslot.app.config import Config
from llamaslot.app.config_reader import listed, read_template
from llamaslot.app.model_config import check_files
from llamaslot.app.model_files import resolve_model
from llamaslot.app.model_table import ModelEntry
from llamaslot.app.runtime.children import OnProgress, Runtime
from llamaslot.base.errors import stopped_error
from llamaslot.processes.messages import Loaded
from llamaslot.processes.threads import in_daemon_thread, start_default_executor

if TYPE_CHECKING:
    from llamaslot.api.context import Readiness
    from llamaslot.api.credentials import FileChanges
    from llamaslot.api.http_server import Application, Listener
    from llamaslot.service.models import Models
    from llamaslot.service.service import Service

    _Served: TypeAlias = tuple[Application, Models, Callable[[Sequence[str]], None]]
    """The application, its models, and what prints the start lines with the addresses."""

_log = structlog.get_logger(__name__)
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Parameters of glibc's `mallopt`."""
_MAPPED_BLOCK_BYTES = 64 * 2**10
_REMEMBER_TIMEOUT_S = 2.0
"""Time limit for ending the remaining requests and remembering their replies."""


async def serve(config: Config, entries: Sequence[ModelEntry] = ()) -> int:
    """Serve until a signal arrives or the only engine dies; return the process's exit status. Raises `ConfigError`.

    `entries` are the models of a server that may have several; without them `config` names the model.
    """
    start_default_executor()
    _bound_heap()
    async with contextlib.AsyncExitStack() as stack:
        stop = _Signals()
        listeners: list[Listener] = []
        served = await (
            _start_several(config, entries, stop, stack, listeners)
            if entries
            else _start_one(config, stop, stack, listeners)
        )
        if served is None:
            _log.info("server.stopped")
            return 0
        from llamaslot.api.context import READINESS  # noqa: PLC0415

        app, models, announce = served
        stack.push_async_callback(models.close, _REMEMBER_TIMEOUT_S)
        # Exclude modules and other permanent objects from garbage collection: a full collection took 90 ms, during
        # which all streams stalled.
        gc.freeze()
        app[READINESS].set(models)
        if models.have_idle_time:
            unloading = asyncio.create_task(models.unload_idle(), name="unload-idle-models")
            stack.callback(unloading.cancel)
        announce(_urls(listeners[0], "https" if config.ssl_cert_file else "http"))
        models.load_first()
        # If one of several engines cannot go on, the others can.
        ended = models.services[0].stopped if models.is_one else asyncio.get_running_loop().create_future()
        await _first(ended, stop.first)
        if ended.done():
            app[READINESS].fail(stopped_error("the engine failed"))
            return 1
        await _drain(models, ended, app[READINESS], stop.second, config)
    _log.info("server.stopped")
    return 0


async def _start_one(
    config: Config, stop: _Signals, stack: contextlib.AsyncExitStack, listeners: list[Listener]
) -> _Served | None:
    """Listen, and load the only model; None if a signal came first."""
    path = resolve_model(config.model)
    # Report a broken file before any process is started.
    check_files(config, path)
    config = replace(config, model=str(path))
    template = read_template(config)
    on_progress = stack.enter_context(_progress())
    runtime = Runtime(config, template, on_progress)
    stack.push_async_callback(_stop, runtime, listeners)
    await runtime.engine.start()
    # Import this while the engine starts, because these imports take as long as its own.
    from llamaslot.api.context import SETTINGS  # noqa: PLC0415
    from llamaslot.app.served_models import load_service, task_by_flags  # noqa: PLC0415
    from llamaslot.app.start_lines import announce  # noqa: PLC0415
    from llamaslot.service.models import Models, ServedModel  # noqa: PLC0415

    app = await _listen(config, stop, stack, listeners)
    if app is None:
        return None
    # Only now: on two CPUs its imports would slow the engine's, and it loads faster than the engine.
    await runtime.prompts.start()
    loading = asyncio.ensure_future(load_service(runtime, config, app[SETTINGS]))
    found = await _loaded(loading, runtime, stop, on_progress)
    if found is None:
        return None
    service, loaded = found
    model = ServedModel(
        service.names,
        idle_seconds=config.sleep_idle_seconds,
        tags=service.tags,
        task_by_flags=task_by_flags(config),
    )
    # The request timeout begins only once the model is loaded, and does not allow more than that.
    timeout = min(config.load_timeout, config.request_timeout or config.load_timeout)
    models = Models.of_one(model, service, max_waiting=max(config.max_queue, 1), timeout=timeout)
    return app, models, lambda urls: announce(loaded, urls, config)


async def _start_several(
    config: Config,
    entries: Sequence[ModelEntry],
    stop: _Signals,
    stack: contextlib.AsyncExitStack,
    listeners: list[Listener],
) -> _Served | None:
    """Listen, with models that are loaded when requests name them; None if a signal came first."""
    from llamaslot.app.served_models import create_models  # noqa: PLC0415
    from llamaslot.app.start_lines import announce_several  # noqa: PLC0415

    models = create_models(config, entries)
    stack.push_async_callback(_stop, models, listeners)
    app = await _listen(config, stop, stack, listeners)
    return (app, models, lambda urls: announce_several(entries, urls, config)) if app is not None else None


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


async def _loaded(
    loading: asyncio.Future[tuple[Service, Loaded] | None],
    runtime: Runtime,
    stop: _Signals,
    on_progress: OnProgress,
) -> tuple[Service, Loaded] | None:
    """Wait until the model is loaded; None if a signal came first.

    The first signal interrupts the reading of weights. llama.cpp's work after that cannot be interrupted, so a
    second signal ends the process.
    """
    await _first(loading, stop.first)
    if not loading.done():
        runtime.interrupt()
        await _first(loading, stop.second)
    if not loading.done():
        runtime.kill()
        _abort("second signal while starting", 130)
    found = loading.result()
    on_progress("", 1.0)
    return found


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


async def _stop(engines: Runtime | Models, listeners: list[Listener]) -> None:
    """Stop all engines and close the connections; exit hard if a thread hangs, because Python would wait for it."""
    reason = await engines.stop()
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
    models: Models,
    ended: asyncio.Future[str],
    readiness: Readiness,
    second_signal: asyncio.Future[None],
    config: Config,
) -> None:
    """Report unhealthy for `--drain-delay`, then refuse new requests and wait for those in flight.

    A second signal ends both, and `--shutdown-timeout` the latter.
    """
    readiness.drain()
    delay = config.drain_delay
    _log.info("server.draining", in_flight=models.n_in_flight, delay_s=delay, timeout_s=config.shutdown_timeout)
    await asyncio.wait((second_signal, ended), timeout=delay, return_when=asyncio.FIRST_COMPLETED)
    models.refuse()
    now = asyncio.get_running_loop().time
    deadline = now() + config.shutdown_timeout
    while models.n_in_flight and not second_signal.done() and now() < deadline:
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
