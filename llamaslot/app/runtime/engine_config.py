"""From the configuration to the settings of the backend and the engine."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from llamaslot.app.cache.cache_budgets import Budgets, offload_after
from llamaslot.app.config import Config
from llamaslot.backend.llama.llama_settings import LlamaSettings
from llamaslot.engine.engine_settings import EngineSettings


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
        n_ubatch=min(config.ubatch_size, config.batch_size),
        n_threads=max(config.threads, 0),
        n_threads_batch=max(config.threads_batch, 0),
        n_gpu_layers=config.gpu_layers if isinstance(config.gpu_layers, int) else -1,
        use_mmap=config.mmap,
        use_mlock=config.mlock,
        swa_full=config.swa_full,
        checkpoints=config.ctx_checkpoints > 0,
        reuse_self_test=config.reuse_self_test,
        flash_attn=config.flash_attn,
        unified=config.kv_unified is not False,
        may_partition=config.kv_unified is None,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        measure_costs=True,
        measurements=platformdirs.user_cache_path("llamaslot") / "measurements",
    )


def engine_settings(config: Config, budgets: Budgets, *, lacks_disk: bool = False) -> EngineSettings:
    """Return the policies of the engine."""
    return EngineSettings(
        gap_ms=config.prefill_gap_ms,
        idle_cells=budgets.idle_cells,
        offload_after=budgets.offload_after,
        offload_after_by=lambda info: offload_after(config, info, budgets.ram_bytes),
        ram_bytes=budgets.ram_bytes,
        ram_is_fixed=budgets.ram_is_fixed,
        disk_bytes_per_day=config.cache_disk_write_per_day * 2**20,
        ram_bytes_per_key=config.cache_ram_per_key * 2**20,
        disk_bytes_per_key=config.cache_disk_per_key * 2**20,
        checkpoint_bytes=budgets.checkpoints.ram_bytes if budgets.checkpoints is not None else 0,
        checkpoints_on_path=config.ctx_checkpoints,
        checkpoint_step=config.checkpoint_min_step,
        lacks_disk=lacks_disk,
        debug_invariants=config.debug_invariants,
    )
