"""The models of a server, made from its configuration: one, or several that share memory.

    budget = --models-memory;  RAM of prefixes = --cache-ram, in equal parts for the models that keep processes;
    a model's weights and pool = the rest, without what processes of unloaded models take, / --models-max

These parts are fixed at the start.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import structlog

from llamaslot.api.context import ApiSettings
from llamaslot.app.config import Config
from llamaslot.app.config_reader import read_template
from llamaslot.app.http_config import api_settings, check_vocabulary, max_queue_per_client
from llamaslot.app.model_config import check_files, projector_file
from llamaslot.app.model_files import resolve_model
from llamaslot.app.model_table import ModelEntry, naming
from llamaslot.app.runtime.children import Runtime
from llamaslot.base.errors import ConfigError, stopped_error
from llamaslot.base.files import parts
from llamaslot.base.model import CPU, ModelInfo
from llamaslot.processes.messages import Loaded
from llamaslot.service.metrics import Metrics
from llamaslot.service.models import KEPT_BYTES, Models, ModelTask, ServedModel
from llamaslot.service.service import Service

_MEMORY_FRACTION = 0.85
"""Fraction of free memory that `--models-memory auto` uses."""
_RAM_FRACTION = 0.25
"""Fraction of `--models-memory` that `--cache-ram auto` uses, and -1 too."""
_WEIGHTS_FACTOR = 1.1
_COMPUTE_BYTES = 512 * 2**20
"""A model is expected to take so much more than its file, until it has been loaded once."""
_CLOSE_TIMEOUT_S = 2.0
"""Time limit for ending requests of a model whose processes end."""
_MAX_FOLDER_CHARS = 60
_MIB = 2**20


async def load_service(
    runtime: Runtime,
    config: Config,
    settings: ApiSettings,
    metrics: Metrics | None = None,
    names: Sequence[str] = (),
) -> tuple[Service, Loaded] | None:
    """Load the model in its processes, and connect them to a service; None if that was interrupted.

    Without `names` the model has those of the settings, or its file's. Raises `ConfigError`.
    """
    loaded = await runtime.load(settings)
    if loaded is None:
        return None
    check_vocabulary(config, loaded.info)
    names = names or settings.model_names(loaded.info)
    service = Service(
        loaded.info,
        runtime.prompts,
        metrics or Metrics(names[0], has_remote=bool(config.cache_remote)),
        names=names,
        tags=settings.model_tags(),
        policy=settings.request_policy(loaded.info, config.max_queue),
        max_queue=config.max_queue,
        max_queue_per_client=max_queue_per_client(config),
        request_timeout=config.request_timeout,
        warm_ahead=config.n_warm_ahead,
    )
    runtime.connect(service)
    return service, loaded


def create_models(config: Config, entries: Sequence[ModelEntry]) -> Models:
    """Return the models of a server that may have several; none is loaded. Raises `ConfigError`."""
    n_loaded = min(config.models_max or len(entries), len(entries))
    n_kept = min(len(entries), 2 * n_loaded)
    if sum(each.is_pinned or each.loads_at_start for each in entries) > n_loaded:
        message = f"more models are to be loaded at the start than --models-max {n_loaded} allows"
        raise ConfigError(message, param="--models-max")
    memory = _divided_memory(config, n_loaded, n_kept)
    disk_bytes = _disk_bytes(config)
    models = []
    default = None
    for entry in entries:
        with naming(entry.names[0]):
            path = resolve_model(entry.config.model)
        own = replace(
            entry.config,
            model=str(path),
            alias=",".join(entry.names),
            cache_ram=memory.ram // n_kept // _MIB,
            cache_disk=str(Path(config.cache_disk).expanduser() / _folder(entry)) if config.cache_disk else "",
            cache_disk_size=max(disk_bytes // len(entries) // _MIB, 1),
            cache_disk_write_per_day=-(-config.cache_disk_write_per_day // len(entries)),
        )
        model = _served(replace(entry, config=own), memory_bytes=memory.models // n_loaded)
        default = model if entry.is_default else default
        models.append(model)
    return Models(
        models,
        default=default,
        max_loaded=n_loaded,
        max_bytes=memory.all - memory.ram,
        max_kept=n_kept,
        max_waiting=max(config.max_queue, 1),
        autoload=config.models_autoload,
        timeout=config.load_timeout,
    )


class _Memory(NamedTuple):
    """Bytes of `--models-memory`, as the table above divides them."""

    all: int
    ram: int
    models: int
    """For weights and pools of the models that are loaded."""


def _divided_memory(config: Config, n_loaded: int, n_kept: int) -> _Memory:
    # These bring numpy, which a server of one model does not need here.
    from llamaslot.app.cache_budgets import MAX_AUTO_RAM_BYTES  # noqa: PLC0415
    from llamaslot.backend.host import host_memory  # noqa: PLC0415

    budget = config.models_memory
    n_bytes = budget * _MIB if budget != "auto" else int(host_memory()[0] * _MEMORY_FRACTION)
    if isinstance(config.cache_ram, int) and config.cache_ram >= 0:
        ram_bytes = config.cache_ram * _MIB
    else:
        ram_bytes = min(int(n_bytes * _RAM_FRACTION), MAX_AUTO_RAM_BYTES)
    for_models = n_bytes - ram_bytes - (n_kept - n_loaded) * KEPT_BYTES
    if for_models <= 0:
        message = (
            f"--models-memory: {n_bytes // _MIB:,} MiB leave nothing for models beside {ram_bytes // _MIB:,} of "
            f"--cache-ram and the processes of {n_kept} models"
        )
        raise ConfigError(message, param="--models-memory")
    if config.cache_disk and ram_bytes // n_kept < _MIB:
        message = f"--cache-disk needs RAM for prefixes: --cache-ram is for {n_kept} models"
        raise ConfigError(message, param="--cache-ram")
    return _Memory(n_bytes, ram_bytes, for_models)


def task_by_flags(config: Config) -> ModelTask:
    """Return what a model is to do, by its flags."""
    if config.reranking or (config.embeddings and config.pooling == "rank"):
        return "rerank"
    return "embedding" if config.embeds else "completion"


def device_bytes(config: Config, info: ModelInfo) -> int:
    """Return what weights, projector and pool take on a device with memory of its own; 0 without one."""
    if info.device == CPU:
        return 0
    n_bytes = info.size_bytes + (info.segment_size.of(info.n_ctx) if info.segment_size is not None else 0)
    mmproj = projector_file(config)
    if info.projector is not None and mmproj is not None and config.mmproj_offload:
        with contextlib.suppress(OSError):
            n_bytes += mmproj.stat().st_size
    return n_bytes


def _served(entry: ModelEntry, memory_bytes: int) -> ServedModel:
    config = entry.config
    settings = api_settings(config)
    # Its counters go on when it is loaded again.
    metrics = Metrics(entry.names[0], has_remote=bool(config.cache_remote))
    size = 0
    with contextlib.suppress(OSError):
        mmproj = projector_file(config)
        files = (*parts(Path(config.model)), *([mmproj] if mmproj is not None else []))
        size = sum(each.stat().st_size for each in files)
        memory_bytes = max(memory_bytes, int(size * _WEIGHTS_FACTOR) + _COMPUTE_BYTES)
    return ServedModel(
        entry.names,
        lambda: ModelProcesses(entry, settings, metrics, memory_bytes),
        n_bytes=memory_bytes,
        file_bytes=size,
        idle_seconds=config.sleep_idle_seconds,
        tags=settings.model_tags(),
        task_by_flags=task_by_flags(config),
        has_projector=bool(config.mmproj),
        is_pinned=entry.is_pinned,
        loads_at_start=entry.is_pinned or entry.loads_at_start,
    )


def _folder(entry: ModelEntry) -> str:
    """Return the name of a model's folder in that of `--cache-disk`: one process at a time uses a folder."""
    name = entry.names[0]
    shown = "".join(char if char.isascii() and char.isalnum() else "-" for char in name)[:_MAX_FOLDER_CHARS]
    return f"{shown}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _disk_bytes(config: Config) -> int:
    """Return the bytes of `--cache-disk-size` for all models together."""
    from llamaslot.app.cache_tiers import auto_disk_bytes  # noqa: PLC0415 - it brings numpy

    if config.cache_disk_size != "auto" or not config.cache_disk:
        return config.cache_disk_size * _MIB if config.cache_disk_size != "auto" else _MIB
    folder = Path(config.cache_disk).expanduser()
    existing = next((each for each in (folder, *folder.parents) if each.exists()), Path())
    return auto_disk_bytes(existing)


class ModelProcesses:
    """The processes of one of several models (`Processes` of `service/models.py`)."""

    def __init__(self, entry: ModelEntry, settings: ApiSettings, metrics: Metrics, memory_bytes: int) -> None:
        self._entry = entry
        self._settings = settings
        self._metrics = metrics
        self._memory_bytes = memory_bytes
        self._runtime: Runtime | None = None
        self._service: Service | None = None

    @property
    def has_ended(self) -> bool:
        """True if the engine has ended and is not started again."""
        return self._runtime is not None and self._runtime.engine.has_ended

    @property
    def n_bytes(self) -> int:
        """Resident memory of both processes, and `device_bytes`."""
        if self._runtime is None:
            return 0
        n_bytes = 0
        for pid in (self._runtime.engine.pid, self._runtime.prompts.pid):
            with contextlib.suppress(psutil.Error):
                n_bytes += psutil.Process(pid).memory_info().rss if pid else 0
        info = self._service.info if self._service is not None else None
        return n_bytes + (device_bytes(self._entry.config, info) if info is not None else 0)

    async def load(self) -> Service:
        """Start the processes and load the model. Raises `LlamaslotError`, and `OSError`."""
        config = self._entry.config
        check_files(config, Path(config.model))
        runtime = self._runtime = Runtime(
            config, read_template(config), lambda _text, _share: None, memory_bytes=self._memory_bytes
        )
        # What is logged of these processes and their requests says which model it is about.
        with structlog.contextvars.bound_contextvars(model=self._entry.names[0]):
            await runtime.engine.start()
            await runtime.prompts.start()
            found = await load_service(runtime, config, self._settings, self._metrics, self._entry.names)
        if found is None:
            raise stopped_error("")
        self._service, _ = found
        return self._service

    async def stop(self) -> str:
        """End the requests and the processes; return why that is not possible, or an empty text."""
        if self._service is not None:
            self._service.activity.close()
            await self._service.close(_CLOSE_TIMEOUT_S)
        return await self._runtime.stop() if self._runtime is not None else ""
