"""Settings of the engine, and those of its cache that follow from the loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamaslot.base.backend import Backend
from llamaslot.base.model import ModelInfo
from llamaslot.kvcache.cache_settings import MIN_POOLS_IN_RAM, CacheSettings, CheckpointSettings
from llamaslot.kvcache.tiers.disk_io import SegmentDisk


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Policies of the engine; sizes and costs come from the backend."""

    gap_ms: float
    """About how long prefill may make the time between two tokens of a stream."""
    idle_cells: int | None = None
    """Cells that idle prefixes may keep; None for all that nothing else needs."""
    offload_after: int | None = None
    """Further prompt tokens after which an idle prefix is offloaded; None for only when its cells are needed.
    """
    offload_after_by: Callable[[ModelInfo], int | None] = lambda _info: None
    """Returns the same once the costs have been measured that were pending at start."""
    ram_bytes: int = 0
    """Host memory for what leaves the pool."""
    ram_is_fixed: bool = True
    """False if less of it is used while memory is short."""
    ram_bytes_per_key: int = 0
    disk_bytes_per_key: int = 0
    """Quotas of each API key in the RAM and disk tiers; 0 for none."""
    disk_bytes_per_day: int = 0
    """Bytes that may be written to disk a day; 0 for any number."""
    checkpoint_bytes: int = 0
    """Host memory for checkpoints of states that cannot be trimmed."""
    checkpoints_on_path: int = 32
    """Checkpoints of one conversation at most."""
    checkpoint_step: int = 1024
    """Distance of checkpoints in a long prompt, in tokens."""
    lacks_disk: bool = False
    """A disk is configured but cannot be used: what it has cannot be deleted."""
    debug_invariants: bool = False
    """Compare the cache with the backend whenever nothing runs; a difference ends the engine."""


def cache_settings(
    backend: Backend,
    settings: EngineSettings,
    disk: SegmentDisk | None,
    *,
    has_remote: bool = False,
    has_slot_files: bool = False,
) -> CacheSettings:
    """Settings of the cache for a backend, a disk, and perhaps a remote store and files of slots."""
    info, cost = backend.info, backend.info.kv_cost
    return CacheSettings(
        n_slots=info.n_slots,
        n_cells=info.n_ctx,
        n_seqs=backend.n_seqs,
        unified=info.unified,
        part_cells=part_cells(info, settings.ram_bytes, settings.ram_bytes_per_key, has_slot_files=has_slot_files),
        context_ms=info.context_ms,
        can_trim=info.can_trim,
        checkpoints=checkpoint_settings(info, backend.n_seqs, settings),
        idle_cells=settings.idle_cells,
        offload_after=settings.offload_after,
        ram_bytes=settings.ram_bytes,
        ram_is_fixed=settings.ram_is_fixed,
        disk_bytes=disk.capacity if disk is not None else 0,
        has_remote=has_remote,
        disk_bytes_per_day=settings.disk_bytes_per_day,
        disk_written=disk.written if disk is not None else None,
        ram_bytes_per_key=settings.ram_bytes_per_key,
        disk_bytes_per_key=settings.disk_bytes_per_key,
        segment_size=info.segment_size,
        prefill_us=cost.prefill_us if cost is not None else 0.0,
        save_us=cost.first_save_us if cost is not None else 0.0,
        load_us=cost.load_us if cost is not None else 0.0,
        foreign_us=cost.foreign_us if cost is not None else 0.0,
        gap_ms=settings.gap_ms,
    )


def part_cells(info: ModelInfo, ram_bytes: int, ram_bytes_per_key: int, *, has_slot_files: bool) -> int:
    """Return the cells of a slot while the pool is partitioned; 0 where its layout is fixed.

    It is where slots can be saved, since each change empties them, without RAM for two pools, and if a key may not
    keep a whole pool in RAM.
    """
    if not info.part_cells or has_slot_files or info.segment_size is None:
        return 0
    pool = info.segment_size.of(info.n_ctx)
    suffices = ram_bytes >= MIN_POOLS_IN_RAM * pool and not 0 < ram_bytes_per_key < pool
    return info.part_cells if suffices else 0


def checkpoint_settings(info: ModelInfo, n_seqs: int, settings: EngineSettings) -> CheckpointSettings:
    """Return the settings of checkpoints for a model in a context of `n_seqs` sequences.

    They allow no checkpoints if it needs none or can have none.
    """
    size, cost = info.checkpoint_size, info.state_cost
    if not info.keeps_checkpoints or size is None:
        return CheckpointSettings()
    n_window = info.state.n_window_cells
    return CheckpointSettings(
        kind=info.state.kind,
        n_swa=info.state.n_swa,
        n_window_cells=n_window if 0 < n_window < info.state.n_swa * n_seqs + info.n_ubatch else None,
        size=size,
        ram_bytes=settings.checkpoint_bytes,
        max_on_path=settings.checkpoints_on_path,
        step_tokens=settings.checkpoint_step,
        take_ms=cost.take_ms if cost is not None else 0.0,
        restore_ms=cost.restore_ms if cost is not None else 0.0,
    )
