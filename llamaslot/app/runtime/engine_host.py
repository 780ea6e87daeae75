"""Engine host: a model with its disk and its engine, in the process that runs this; and the settings for it.

lock the disk folder, load the model, open the disk for it, run; flush the disk, free the model
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import platformdirs
import structlog

from llamaslot.app.cache_budgets import choose_budgets, with_budgets
from llamaslot.app.cache_tiers import (
    lock_disk,
    open_disk,
    open_remote,
    remote_settings,
    slot_files,
    slot_save_path,
)
from llamaslot.app.config import Config
from llamaslot.app.config_reader import listed
from llamaslot.app.model_config import (
    adapters,
    engine_cpus,
    metadata_overrides,
    projector_file,
    tensor_overrides,
    tensor_split,
)
from llamaslot.backend.disk import DiskStore
from llamaslot.backend.host import MemoryReader, host_memory
from llamaslot.backend.llama import LlamaBackend, LoadingStopped
from llamaslot.backend.llama.loading import LlamaSettings, Rope
from llamaslot.backend.remote import StoreSettings
from llamaslot.base.backend import Backend
from llamaslot.base.errors import ConfigError
from llamaslot.base.events import Event
from llamaslot.engine.engine import Engine
from llamaslot.engine.model_worker import StepWatch, model_thread
from llamaslot.kvcache.cache_settings import Budgets
from llamaslot.processes.messages import DiskUse, Loaded
from llamaslot.processes.threads import in_daemon_thread

if TYPE_CHECKING:
    from llamaslot.backend.remote.redis_store import RedisStore

_DISK_TIMEOUT_S = 5.0
"""Time that closing the disk store may take."""
_FOLDER_TIMEOUT_S, _FOLDER_TIMEOUT_AGAIN_S = 10.0, 3.0
"""Time that a disk gets to answer when the server starts, and when the engine is started again: requests wait then,
and the disk that hangs may be why the last engine ended.
"""
_MAX_SHOWN_CPUS = 8
OnProgress = Callable[[str, float], bool]
"""Gets what is being done and the fraction done, on another thread; false to stop."""

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


def llama_settings(config: Config, model: Path, memory_bytes: int = 0) -> LlamaSettings:
    """Return the settings of the llama backend; `memory_bytes` as in `LoadEngine`."""
    return LlamaSettings(
        model=model,
        n_ctx=config.ctx_size,
        max_bytes=memory_bytes,
        kv_mem_fraction=config.kv_mem_fraction,
        n_slots=config.parallel,
        n_cache_seqs=config.cache_seqs if config.cache_seqs >= 0 else None,
        n_cache_seqs_a_slot=2 if config.cache_ram else 4,
        n_batch=config.batch_size,
        n_ubatch=min(config.ubatch_size, config.batch_size),
        n_threads=max(config.threads, 0),
        n_threads_batch=max(config.threads_batch, 0),
        n_gpu_layers=config.gpu_layers if isinstance(config.gpu_layers, int) else -1,
        devices=_devices(config),
        split_mode=config.split_mode,
        tensor_split=tensor_split(config),
        main_gpu=config.main_gpu,
        kv_offload=config.kv_offload,
        op_offload=config.op_offload,
        tensor_overrides=tensor_overrides(config),
        load_mode=config.weights_load_mode,
        lazy_mode=config.lazy_mode,
        check_tensors=config.check_tensors,
        repack=config.repack,
        no_host=config.no_host,
        numa=config.numa,
        overrides=tuple(metadata_overrides(config).items()),
        adapters=adapters(config),
        mmproj=projector_file(config),
        mmproj_is_optional=config.has_found_mmproj,
        mmproj_offload=config.mmproj_offload,
        image_min_tokens=config.image_min_tokens,
        image_max_tokens=config.image_max_tokens,
        rope=_rope(config),
        swa_full=config.swa_full,
        checkpoints=config.ctx_checkpoints > 0,
        max_draft=config.max_draft,
        context_shift=config.context_shift,
        reuse_self_test=config.reuse_self_test,
        flash_attn=config.flash_attn,
        backend_sampling=config.backend_sampling,
        unified=config.kv_unified is not False,
        may_partition=config.kv_unified is None and not config.embeds,
        may_unload=config.sleep_idle_seconds > 0 or memory_bytes > 0,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        embeds=config.embeds,
        pooling="rank" if config.reranking else None if config.pooling == "auto" else config.pooling,
        measure_costs=True,
        # Otherwise idle prefixes are offloaded for it, which needs RAM and would empty slots that are to be saved.
        measure_at_load=config.cache_ram == 0 or bool(config.slot_save_path),
        measurements=platformdirs.user_cache_path("llamaslot") / "measurements",
    )


def _devices(config: Config) -> tuple[str, ...] | None:
    """Return the names of the GPUs to use; None for all."""
    names = tuple(listed(config.device))
    if names in ((), ("all",)):
        return None
    return () if names == ("none",) else names


def _keep_to_cpus(config: Config) -> None:
    """Have this thread, and those that it starts, use only the CPUs that flags name. Raises `ConfigError`."""
    cpus = engine_cpus(config)
    if not cpus:
        return
    flag = "--cpu-mask" if config.cpu_mask else "--cpu-range"
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            f"{flag}: this system does not let a program choose its CPUs; remove the flag", param=flag
        )
    allowed = os.sched_getaffinity(0)
    if not cpus & allowed:
        shown = ", ".join(map(str, sorted(allowed)[:_MAX_SHOWN_CPUS]))
        raise ConfigError(f"{flag} names no CPU that this process may use, such as {shown}", param=flag)
    os.sched_setaffinity(0, cpus & allowed)


def _rope(config: Config) -> Rope:
    scale = 1 / config.rope_scale if config.rope_scale is not None else config.rope_freq_scale or 0.0
    return Rope(
        scaling=config.rope_scaling,
        freq_base=config.rope_freq_base,
        freq_scale=scale,
        yarn_orig_ctx=config.yarn_orig_ctx,
        yarn_ext_factor=config.yarn_ext_factor,
        yarn_attn_factor=config.yarn_attn_factor,
        yarn_beta_slow=config.yarn_beta_slow,
        yarn_beta_fast=config.yarn_beta_fast,
    )


class EngineHost:
    """Call `lock`, `load`, `start` and `close` in this order, the last one in any case.

    Without `needs_folders`, a folder that cannot be used is logged, and the engine runs without it.
    `memory_bytes` is as in `LoadEngine`.
    """

    def __init__(self, config: Config, *, needs_folders: bool = True, memory_bytes: int = 0) -> None:
        self._config = config
        self._memory_bytes = memory_bytes
        self._needs_folders = needs_folders
        self._thread = model_thread()
        self._disk: DiskStore | None = None
        self._slot_folder: Path | None = None
        self._backend: Backend | None = None
        self._remote_settings: StoreSettings | None = None
        self._remote: RedisStore | None = None
        self._budgets: Budgets
        self._disk_tier: DiskStore | None = None
        """The same disk, once it is open for prefixes of this model."""
        self._lacks_disk = bool(config.cache_disk)
        """True while the configured disk cannot be used."""
        self._engine: Engine | None = None
        self.watch = StepWatch(config.step_timeout)

    @property
    def backend(self) -> Backend:
        """The loaded backend."""
        assert self._backend is not None
        return self._backend

    async def lock(self) -> None:
        """Lock the folders against other servers; raises `ConfigError`."""
        seconds = _FOLDER_TIMEOUT_S if self._needs_folders else _FOLDER_TIMEOUT_AGAIN_S
        with self._optional_folders():
            self._disk = await _responding("--cache-disk", seconds, lambda: lock_disk(self._config))
        with self._optional_folders():
            self._slot_folder = await _responding("--slot-save-path", seconds, lambda: slot_save_path(self._config))
        with self._optional_folders():
            self._remote_settings = remote_settings(self._config)

    async def load(self, on_progress: OnProgress) -> Loaded | None:
        """Load the model, and open the disk; None if `on_progress` stopped that. Raises `ConfigError`."""
        config = self._config
        try:
            self._backend = await self._loaded_backend(on_progress)
        except LoadingStopped:
            return None
        info = self._backend.info
        self._budgets = budgets = choose_budgets(config, info, host_memory()[0])

        def on_read(fraction: float) -> bool:
            return on_progress("reading the model for its checksum", fraction)

        disk, remote = self._disk, self._remote_settings
        if disk is not None:
            with self._optional_folders():
                is_open = await asyncio.to_thread(open_disk, disk, config, info, budgets, on_read)
                self._disk_tier = disk if is_open else None
                self._lacks_disk = False
        tier = self._disk_tier
        if remote is not None and budgets.ram_bytes:
            key = tier.key if tier is not None else None
            self._remote = await asyncio.to_thread(open_remote, remote, info, key, on_read)
        self.watch.expect(info.kv_cost.prefill_us if info.kv_cost is not None else 0.0)
        return Loaded(
            with_budgets(config, info, budgets),
            budgets,
            records=tuple(tier.texts.records()) if tier is not None else (),
            disk=(
                DiskUse(str(tier.folder), tier.capacity, tier.n_bytes, tier.n_other_bytes)
                if tier is not None
                else None
            ),
            remote_address=remote.address if remote is not None and self._remote is not None else "",
        )

    async def _loaded_backend(self, on_progress: OnProgress) -> Backend:
        """Load the model; raises `LoadingStopped` if `on_progress` stopped that."""
        settings = llama_settings(self._config, Path(self._config.model), self._memory_bytes)
        _log.info("model.loading", path=str(settings.model))
        text = f"loading {settings.model.name}"

        def load() -> Backend:
            # On the thread that computes: the other threads that compute are started by it.
            _keep_to_cpus(self._config)
            return LlamaBackend(settings, lambda fraction: on_progress(text, fraction))

        return await asyncio.get_running_loop().run_in_executor(self._thread, load)

    @contextlib.contextmanager
    def _optional_folders(self) -> Iterator[None]:
        """Log, rather than raise, that a folder cannot be used, unless the engine starts for the first time."""
        try:
            yield
        except ConfigError as error:
            if self._needs_folders:
                raise
            _log.error(
                "folder.unusable", flag=error.param, reason=error.message, until="the engine is started again"
            )

    def start(self, on_events: Callable[[list[Event]], None]) -> Engine:
        """Return an engine, which takes commands; the caller has it run."""
        backend = self.backend
        snapshots = slot_files(self._slot_folder, backend.info, self._disk)
        if self._slot_folder is not None and snapshots is None:
            _log.warning("slot_files.disabled", reason=backend.info.unsaved_reason)
        if self._config.context_shift and backend.info.unshifted_reason:
            _log.warning("context_shift.disabled", reason=backend.info.unshifted_reason)
        is_mapped = self._config.maps_weights
        self._engine = Engine(
            backend,
            on_events,
            self._budgets,
            gap_ms=self._config.prefill_gap_ms,
            thread=self._thread,
            watch=self.watch,
            debug_invariants=self._config.debug_invariants,
            lacks_disk=self._lacks_disk,
            disk=self._disk_tier,
            remote=self._remote,
            snapshots=snapshots,
            # Locked weights are not among the memory that counts as free.
            read_memory=(MemoryReader() if is_mapped else MemoryReader(mapped=lambda: 0)).read,
        )
        return self._engine

    async def close(self) -> str:
        """Free the model and close the disk; return why that is not possible, or an empty text.

        The process must then end at once: memory that a hung thread uses cannot be freed, and Python would wait for
        the thread.
        """
        if self._engine is not None and self._engine.has_hung_thread:
            return "a thread does not end, such as one that waits for a disk that does not respond"
        if self._backend is not None:
            self._backend.close()
        if self._disk is None:
            return ""
        closing = asyncio.ensure_future(asyncio.to_thread(self._disk.close))
        await asyncio.wait([closing], timeout=_DISK_TIMEOUT_S)
        if not closing.done():
            return "the disk of --cache-disk does not respond"
        with contextlib.suppress(OSError):
            closing.result()
        return ""


async def _responding(flag: str, seconds: float, use: Callable[[], _T]) -> _T:
    """Return the result of using a folder; raises `ConfigError`, also if its disk does not respond."""
    try:
        async with asyncio.timeout(seconds):
            return await in_daemon_thread(use)
    except TimeoutError:
        message = f"{flag}: its disk does not respond within {seconds:g} s"
        raise ConfigError(message, param=flag) from None
