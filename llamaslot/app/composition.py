"""The composition root of `llamaslot serve`: wires backend, engine, service and HTTP, and ends them in order.

    lock the disk folder, listen (503), load the model, open the disk for it, run;
    on a signal refuse and drain; stop the engine, free the model, close

A second signal cuts the draining short; while the model loads it ends the process (status 130). After the draining
the disk is flushed for at most 5 s; then threads that still run get 5 s, and so do open connections and the disk
store. If a thread hangs even then, the process ends without it (status 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import platformdirs
import structlog

from llamaslot.api import http_server as http
from llamaslot.api.context import READINESS, ApiSettings
from llamaslot.api.middleware import host_name, is_loopback
from llamaslot.app.cache_budgets import Budgets, choose_budgets
from llamaslot.app.cache_disk import lock_disk, open_disk, slot_files, slot_save_path
from llamaslot.app.config import Config
from llamaslot.app.models import resolve_model
from llamaslot.app.start_lines import announce
from llamaslot.backend.disk import DiskStore
from llamaslot.backend.llama import LlamaBackend, LlamaSettings, LoadingStopped
from llamaslot.backend.llama.host_memory import host_memory
from llamaslot.base.backend import Backend
from llamaslot.base.errors import ConfigError, stopped_error
from llamaslot.base.model import ModelInfo
from llamaslot.base.text_records import TextRecord
from llamaslot.engine.engine import Engine
from llamaslot.engine.engine_settings import EngineSettings
from llamaslot.engine.model_worker import model_thread
from llamaslot.prompts.prompt_worker import PromptThread
from llamaslot.prompts.tokenizer import Tokenizer
from llamaslot.service.dispatcher import Dispatcher
from llamaslot.service.metrics import Metrics
from llamaslot.service.service import Service
from llamaslot.text.builtin_templates import resolve
from llamaslot.text.template import ChatTemplate
from llamaslot.text.volatile import pattern

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_FALLBACK_TEMPLATE = "chatml"
_DISK_TIMEOUT_S = 5.0
"""Time that closing the disk store may take."""
_REMEMBER_TIMEOUT_S = 2.0
"""Time to end the remaining requests and to remember their replies."""
_PROMPT_TIMEOUT_S = 2.0
"""Time after that for the threads of the prompt worker."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Options that are fields of `Sampling` too."""


async def serve(config: Config, *, backend: Backend | None = None) -> int:
    """Serve until a signal arrives or the engine dies; the process' exit status.

    `backend` takes the place of the model that the configuration names. Raises `ConfigError`.
    """
    settings = api_settings(config)
    path = resolve_model(config.model)
    template, flag = read_template(config)
    volatile = pattern(config.drop_volatile)
    app = http.create_app(settings)
    hosts = _listed(config.host)
    thread = model_thread()
    async with contextlib.AsyncExitStack() as stack:
        disk = lock_disk(config)
        slot_folder = slot_save_path(config)
        # Installed after locking: until then a signal ends the process, so a hung disk cannot keep it alive.
        stop = _Signals()
        if disk is not None:
            stack.push_async_callback(_close_disk, disk)
        listener = await http.serve(app, hosts, config.port)
        stack.push_async_callback(_close_listener, listener)
        if backend is None:
            backend = await _load(llama_settings(config, path), thread, stop)
        if backend is None:
            return 0
        stack.callback(backend.close)
        budgets = choose_budgets(config, backend.info, host_memory()[0])
        disk_line = await _open(disk, config, backend.info, budgets, stop) if disk is not None else ""
        if stop.first.done():
            _log.info("server.stopped")
            return 0
        if not config.jinja and not template:
            template, flag = resolve(backend.info.builtin_template), "--no-jinja"
        service = Service(
            backend.info,
            chat_template(backend.info, template, flag, volatile, escape_special=config.escape_special),
            Metrics(),
            max_queue=config.max_queue,
        )
        slot_store = slot_files(slot_folder, backend.info, disk)
        if slot_folder is not None and slot_store is None:
            _log.warning("slot_files.disabled", reason="this needs one pool for all slots and flash attention")
        prompts = prompt_thread(config, backend, disk.texts.records() if disk is not None and disk_line else ())
        dispatcher = Dispatcher(backend.info, prompts, service.receive)
        engine = Engine(
            backend,
            dispatcher.receive,
            engine_settings(config, budgets),
            disk=disk if disk_line else None,
            snapshots=slot_store,
            thread=thread,
        )
        service.connect(dispatcher.send)
        dispatcher.connect(engine.send)
        running = asyncio.create_task(engine.run(), name="engine")
        stack.push_async_callback(_ended, engine, dispatcher, prompts, running, listener)
        app[READINESS].set(service)
        announce(backend.info, budgets, disk_line, _urls(listener), config)
        await _first(service.stopped, stop.first)
        if service.stopped.done():
            app[READINESS].fail(stopped_error("the engine failed"))
            return 1
        service.refuse(stopped_error(""))
        _log.info("server.draining", in_flight=service.n_in_flight, timeout_s=config.shutdown_timeout)
        await _drained(service, stop.second, config.shutdown_timeout)
    _log.info("server.stopped")
    return 0


def api_settings(config: Config) -> ApiSettings:
    """Return the settings of the HTTP layer. Raises `ConfigError`."""
    keys = _listed(config.api_key)
    if not keys and config.api_key:
        raise ConfigError("--api-key is given, but there is no key in it", param="--api-key")
    has_keys = bool(keys or config.api_key_file)
    _check_host_needs_key(config, has_keys=has_keys)
    if config.cache_salt_from_api_key and not has_keys:
        flag = "--cache-salt-from-api-key"
        raise ConfigError(f"{flag} needs API keys: give --api-key or --api-key-file", param=flag)
    return ApiSettings(
        api_keys=tuple(keys),
        api_key_file=config.api_key_file,
        max_body_bytes=config.max_body_mb * 2**20,
        max_total_body_bytes=config.max_total_body_mb * 2**20,
        body_timeout=config.body_timeout,
        max_logit_bias_entries=config.max_logit_bias_entries,
        max_connections=config.max_connections,
        keep_alive_timeout=config.keep_alive_timeout,
        alias=config.alias,
        cors_origins=tuple(_listed(config.cors_origins)),
        allowed_hosts=_allowed_hosts(config),
        sse_ping_interval=config.sse_ping_interval,
        metrics=config.metrics,
        slots=config.slots,
        cache_debug_text=config.cache_debug_text,
        cache_salt_from_api_key=config.cache_salt_from_api_key,
        n_predict=config.n_predict,
        cache_prompt=config.cache_prompt,
        sampling={name: value for name in _SAMPLING if (value := getattr(config, name)) is not None},
    )


def _listed(text: str) -> list[str]:
    return [each for each in map(str.strip, text.split(",")) if each]


def _check_host_needs_key(config: Config, *, has_keys: bool) -> None:
    """Raise `ConfigError` if other machines could use the server without a key."""
    outside = [host for host in _listed(config.host) if not is_loopback(host)]
    if outside and not has_keys and not config.insecure:
        message = (
            f"--host {outside[0]} lets other machines use this server: give --api-key, or --insecure if they may"
        )
        raise ConfigError(message, param="--host")


def _allowed_hosts(config: Config) -> tuple[str, ...]:
    """Return the names that the Host header may have, none for any."""
    outside = [host for host in _listed(config.host) if not is_loopback(host)]
    names = _listed(config.allowed_hosts)
    if outside and not names:
        return ()
    return ("localhost", *map(host_name, [*names, *outside]))


def llama_settings(config: Config, model: Path) -> LlamaSettings:
    """Return the settings of the llama backend."""
    return LlamaSettings(
        model=model,
        n_ctx=config.ctx_size,
        kv_mem_fraction=config.kv_mem_fraction,
        n_slots=config.parallel,
        n_cache_seqs=config.cache_seqs if config.cache_seqs >= 0 else None,
        n_cache_seqs_a_slot=2 if config.cache_ram else 4,
        n_batch=config.batch_size,
        n_ubatch=config.ubatch_size,
        n_threads=max(config.threads, 0),
        n_threads_batch=max(config.threads_batch, 0),
        n_gpu_layers=config.gpu_layers if isinstance(config.gpu_layers, int) else -1,
        use_mmap=config.mmap,
        use_mlock=config.mlock,
        swa_full=config.swa_full,
        flash_attn=config.flash_attn,
        unified=config.kv_unified,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        measure_costs=True,
        measurements=platformdirs.user_cache_path("llamaslot") / "measurements",
    )


def engine_settings(config: Config, budgets: Budgets) -> EngineSettings:
    """Return the policies of the engine."""
    return EngineSettings(
        gap_ms=config.prefill_gap_ms,
        idle_cells=budgets.idle_cells,
        offload_after=budgets.offload_after,
        ram_bytes=budgets.ram_bytes,
        disk_bytes_per_day=config.cache_disk_write_per_day * 2**20,
        debug_invariants=config.debug_invariants,
    )


def prompt_thread(config: Config, backend: Backend, records: Sequence[TextRecord]) -> PromptThread:
    """Return a prompt worker on threads of this process; `records` are those of an earlier process."""
    info = backend.info
    tokenizer = Tokenizer(
        backend.vocab,
        info.n_ctx_slot,
        # EOS after every prompt would also follow the text before a cut point.
        use_anchors=config.text_anchors and info.reuse and not info.adds_eos,
        min_match=config.session_min_match,
        template=info.chat_template,
    )
    tokenizer.restore(records)
    prompts = PromptThread(tokenizer)
    prompts.start()
    return prompts


def read_template(config: Config) -> tuple[str, str]:
    """The Jinja source that the configuration names, and the flag that named it; both empty where none did."""
    if config.chat_template_file:
        return _read(config.chat_template_file, "--chat-template-file"), "--chat-template-file"
    return (resolve(config.chat_template), "--chat-template") if config.chat_template else ("", "")


def chat_template(
    info: ModelInfo,
    source: str,
    flag: str,
    volatile: re.Pattern[str] | None = None,
    *,
    escape_special: bool = True,
) -> ChatTemplate:
    """The template to render conversations by: the configured one, the model's own, or ChatML."""
    origin = flag or "the model's own template (--chat-template takes another)"
    source = source or info.chat_template
    if not source:
        _log.warning("template.missing", fallback=_FALLBACK_TEMPLATE)
        source = resolve(_FALLBACK_TEMPLATE)
    try:
        return ChatTemplate(
            source,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
            adds_bos=info.adds_bos,
            adds_eos=info.adds_eos,
            control_tokens=info.control_tokens,
            mark_control_tokens=escape_special,
            volatile=volatile,
        )
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.message}", param="--chat-template") from None


def _urls(listener: http.Listener) -> list[str]:
    return [
        f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host, port in listener.addresses
    ]


async def _load(settings: LlamaSettings, thread: Executor, stop: _Signals) -> LlamaBackend | None:
    """Load the model on its thread; None if a signal came first.

    The first signal ends the reading of weights. What llama.cpp does after that cannot be interrupted, so a second
    one ends the process.
    """
    _log.info("model.loading", path=str(settings.model))
    with _progress(f"loading {settings.model.name}", stop) as on_progress:
        loading = asyncio.get_running_loop().run_in_executor(thread, LlamaBackend, settings, on_progress)
        try:
            return await _unless_aborted(loading, stop)
        except LoadingStopped:
            _log.info("server.stopped")
            return None


async def _open(disk: DiskStore, config: Config, info: ModelInfo, budgets: Budgets, stop: _Signals) -> str:
    """Open the disk store on a thread of its own until a signal ends it; see `open_disk`."""
    with _progress("reading the model for its checksum", stop) as on_progress:
        opening = asyncio.to_thread(open_disk, disk, config, info, budgets, on_progress)
        return await _unless_aborted(asyncio.ensure_future(opening), stop)


@contextlib.contextmanager
def _progress(text: str, stop: _Signals) -> Iterator[Callable[[float], bool]]:
    """A callback for the fraction done, shown as a bar on a terminal; it returns False once a signal has come."""
    if not sys.stdout.isatty():
        yield lambda _: not stop.first.done()
        return
    # Not imported at the top: without a terminal it would only make the start take longer.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # noqa: PLC0415

    with Progress(
        TextColumn(text), BarColumn(), TaskProgressColumn(), console=Console(), transient=True
    ) as progress:
        task = progress.add_task(text, total=1.0)

        def on_progress(share: float) -> bool:
            progress.update(task, completed=share)
            return not stop.first.done()

        yield on_progress


async def _unless_aborted(future: asyncio.Future[_T], stop: _Signals) -> _T:
    """Return the result of a future, or exit at a second signal."""
    await _first(future, stop.second)
    if not future.done():
        _abort("second signal while starting", 130)
    return future.result()


async def _ended(
    engine: Engine,
    dispatcher: Dispatcher,
    prompts: PromptThread,
    running: asyncio.Task[None],
    listener: http.Listener,
) -> None:
    """Stop the engine; exit if a thread hangs, since what it uses cannot be freed then."""
    await dispatcher.close(_REMEMBER_TIMEOUT_S)
    engine.stop()
    await running
    _, pending = await asyncio.wait(map(asyncio.wrap_future, prompts.close()), timeout=_PROMPT_TIMEOUT_S)
    if engine.has_hung_thread or pending:
        await listener.close()
        _abort("a thread does not end, such as one that waits for a disk that does not respond", 1)


async def _close_listener(listener: http.Listener) -> None:
    """Close the connections; exit if a body is still being parsed, such as one with an endless template."""
    if not await listener.close():
        _abort("a request body is still being parsed", 1)


async def _close_disk(disk: DiskStore) -> None:
    """Close the disk store; exit if the disk does not respond."""
    closing = asyncio.ensure_future(asyncio.to_thread(disk.close))
    await asyncio.wait([closing], timeout=_DISK_TIMEOUT_S)
    if not closing.done():
        _abort("the disk of --cache-disk does not respond", 1)
    closing.result()


def _abort(reason: str, status: int) -> NoReturn:
    """Exit without waiting for threads, as Python otherwise would."""
    _log.error("server.aborted", reason=reason)
    sys.stdout.flush()
    os._exit(status)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _drained(service: Service, second_signal: asyncio.Future[None], seconds: float) -> None:
    """Wait until no request is in flight, at most `seconds` and not after a second signal."""
    deadline = asyncio.get_running_loop().time() + seconds
    while service.n_in_flight and not second_signal.done() and asyncio.get_running_loop().time() < deadline:
        await asyncio.wait([second_signal], timeout=0.05)


class _Signals:
    """Futures for the first and the second SIGINT or SIGTERM."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        pending = next((f for f in (self.first, self.second) if not f.done()), None)
        if pending is not None:
            pending.set_result(None)


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param=flag) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text", param=flag) from None
