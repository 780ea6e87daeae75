"""Settings of the engine, and of its cache, which also depend on the loaded model."""

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
    """About the longest time between two tokens of a stream while prompts are computed (`--prefill-gap-ms`)."""
    idle_cells: int | None = None
    """Most cells that idle prefixes may keep; None for no limit."""
    offload_after: int | None = None
    """Prompt tokens computed since its last use after which an idle prefix is offloaded; None for never."""
    offload_after_by: Callable[[ModelInfo], int | None] = lambda _info: None
    """Returns `offload_after` once costs that could not be measured at start have been measured."""
    ram_bytes: int = 0
    """Budget of the RAM tier."""
    ram_is_fixed: bool = True
    """False if the RAM tier uses less while memory is short."""
    ram_bytes_per_key: int = 0
    disk_bytes_per_key: int = 0
    """Quotas of each API key in the RAM and disk tiers; 0 for none."""
    disk_bytes_per_day: int = 0
    """Bytes that may be written to disk a day; 0 for no limit."""
    checkpoint_bytes: int = 0
    """Budget of RAM for checkpoints."""
    checkpoints_on_path: int = 32
    """Most checkpoints of one conversation."""
    checkpoint_step: int = 1024
    """Tokens between checkpoints in a long prompt."""
    lacks_disk: bool = False
    """True if a disk is configured but cannot be used, so that its content cannot be deleted."""
    debug_invariants: bool = False
    """Compare the cache with the backend whenever nothing runs. A difference ends the engine."""


def cache_settings(
    backend: Backend,
    settings: EngineSettings,
    disk: SegmentDisk | None,
    *,
    has_remote: bool = False,
    has_slot_files: bool = False,
) -> CacheSettings:
    """Return the settings of the cache for a backend, a disk, and optionally a remote store and slot files."""
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
    """Return the cells of a slot while the pool is partitioned; 0 if the layout is fixed.

    The layout is fixed if slots can be saved to files, since each change empties them; if RAM cannot hold
    `MIN_POOLS_IN_RAM` pools; and if an API key may not keep a whole pool in RAM.
    """
    if not info.part_cells or has_slot_files or info.segment_size is None:
        return 0
    pool = info.segment_size.of(info.n_ctx)
    suffices = ram_bytes >= MIN_POOLS_IN_RAM * pool and not 0 < ram_bytes_per_key < pool
    return info.part_cells if suffices else 0


def checkpoint_settings(info: ModelInfo, n_seqs: int, settings: EngineSettings) -> CheckpointSettings:
    """Return the settings of checkpoints for a model in a context of `n_seqs` sequences.

    They allow no checkpoints if the model needs none, or cannot have any.
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
