"""What the llama backend can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
"""Element types of the KV pool by llama-server's names: `enum ggml_type`, not all of it in llama_cpp."""

MAX_SEQS = 256
"""llama.cpp's LLAMA_MAX_SEQ."""


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """How to load a model; 0 means llama.cpp's or the model's own choice."""

    model: Path
    n_ctx: int = 0
    """Cells of the KV pool; 0 for the model's training context."""
    n_slots: int = 4
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 0
    """Threads of a decode step; 0 for the machine's physical cores."""
    n_threads_batch: int = 0
    """Threads of prefill; 0 for as many as `n_threads`."""
    n_gpu_layers: int = -1
    """Layers on the GPU; -1 for all."""
    flash_attn: Literal["auto", "on", "off"] = "auto"
    unified: bool = True
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
