"""Settings of the llama backend, and the numbers of sequence ids that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamaslot.base.errors import ConfigError

CACHE_TYPES: dict[str, int] = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
"""Element types of the KV pool by llama-server's names. Values of `enum ggml_type`; llama_cpp lacks some."""

MAX_SEQS = 256
"""llama.cpp's LLAMA_MAX_SEQ."""


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Settings for loading a model; 0 means llama.cpp's or the model's own choice."""

    model: Path
    n_ctx: int = 0
    """Cells of the KV pool; 0 for as many as fit into memory (`sizing.py`)."""
    kv_mem_fraction: float = 0.85
    """Without `n_ctx`: the fraction of memory that may be in use, including weights and other programs."""
    n_slots: int = 4
    n_cache_seqs: int | None = None
    """Spare sequence ids, which keep idle prefixes; None for the default (`sequences`)."""
    n_cache_seqs_a_slot: int = 4
    """Spare ids per slot without `n_cache_seqs`. Fewer suffice if prefixes without an id are offloaded."""
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 0
    """Threads of a decode step; 0 for the physical cores that this process may use."""
    n_threads_batch: int = 0
    """Threads of prefill; 0 for as many as `n_threads`."""
    n_gpu_layers: int = -1
    """Layers on the GPU; -1 for all."""
    use_mmap: bool = True
    use_mlock: bool = False
    flash_attn: Literal["auto", "on", "off"] = "auto"
    unified: bool = True
    """Layout at start: one pool for all sequences, or a part for each."""
    may_partition: bool = False
    """Allow a unified pool to be partitioned at run time, if the model allows it."""
    swa_full: bool = False
    """Give layers with a sliding window as many cells as the others. Checkpoints are needed nevertheless."""
    checkpoints: bool = False
    """Take and restore checkpoints of partial states. Only in a unified pool."""
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    measure_costs: bool = False
    """Measure `ModelInfo.kv_cost`, `step_cost` and `state_cost`, which takes some seconds."""
    measurements: Path | None = None
    """Folder in which measurements are kept for the next start; None to measure at every start."""
    self_test_limit_s: float = 0.5
    """Most seconds that the self-test of reuse may take at load. If it would take longer, it stays pending."""
    reuse_self_test: Literal["auto", "on", "off"] = "auto"
    """`on` reuses prefixes without the self-test, or although it failed; `off` reuses nothing that needs one."""


def sequences(settings: LlamaSettings, *, reusable: bool, has_states: bool = False) -> tuple[int, int]:
    """Return the number of spare sequence ids, and of all ids of the context. Raises `ConfigError`.

    Slots have the first ids, then come the spare ones, then in a unified pool one more to move prefixes to, and the
    scratch sequence. With 255 slots there is only the latter, with 256 neither. If KV cannot be truncated, only
    slots have ids. Models with checkpoints get only the requested spare ids and scratch, because each id takes
    memory for a state.
    """
    n_slots, wanted = settings.n_slots, settings.n_cache_seqs
    if not 1 <= n_slots <= MAX_SEQS:
        raise ConfigError(f"--parallel must be between 1 and {MAX_SEQS}", param="--parallel")
    n_more = min(MAX_SEQS - n_slots, 2) if settings.unified else 0
    most = MAX_SEQS - n_slots - n_more
    if wanted is not None and not 0 <= wanted <= most:
        raise ConfigError(
            f"--cache-seqs must be between 0 and {most} with {n_slots} slots: "
            f"llama.cpp has {MAX_SEQS} sequence ids in all",
            param="--cache-seqs",
        )
    if has_states and settings.checkpoints and settings.unified and n_more:
        # No spare ids by default: checkpoints keep idle prefixes, and each id takes memory for a state.
        return wanted or 0, n_slots + (wanted or 0) + 1
    if not reusable:
        return 0, n_slots
    if wanted is None:
        wanted = min(settings.n_cache_seqs_a_slot * n_slots, most) if settings.unified else 0
    return wanted, n_slots + wanted + n_more
