"""The kinds of models that are compared, and what the state of each takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import llama_cpp

from bench.client import BenchmarkError
from llamaslot.backend.llama import library

UBATCH = 512
"""Tokens of a micro-batch, the default of both servers."""


@dataclass(frozen=True)
class Kind:
    """A kind of model by the state that it keeps; shapes are names of `bench.synthetic`."""

    name: str
    keeps: str
    """State that its layers keep of computed tokens."""
    models: str
    """Some that are of this kind."""
    shape: str
    tiny: str
    """A shape whose runs take a second, for a quick look and for tests."""


KINDS = (
    Kind("dense", "full attention", "Llama, Qwen3, Mistral", "60m", "tiny"),
    Kind("window 5:1", "sliding window in 5 of 6 layers", "Gemma 3 and 4", "60m-swa", "tiny-swa"),
    Kind("window 1:1", "sliding window in every second layer, sinks, experts", "gpt-oss", "60m-oss", "tiny-oss"),
    Kind("short conv", "short convolutions and attention", "LFM2", "60m-lfm2", "tiny-lfm2"),
    Kind("mamba2 hybrid", "Mamba 2 and attention", "Granite 4 H, Falcon-H1", "60m-granite", "tiny-granite"),
    Kind("delta net", "gated delta nets and attention, experts", "Qwen3-Next", "60m-next", "tiny-next"),
    Kind("delta net, dense", "gated delta nets and attention", "Qwen3.5", "60m-qwen35", "tiny-qwen35"),
    Kind("mamba2", "recurrent states only", "Mamba 2", "60m-mamba2", "tiny-mamba2"),
    Kind("rwkv7", "recurrent states only", "RWKV 7", "60m-rwkv7", "tiny-rwkv7"),
    Kind("mla", "latent attention, experts", "DeepSeek V2 and V3, Kimi K2", "60m-mla", "tiny-mla"),
)


@dataclass(frozen=True)
class StateSizes:
    """Bytes of the state of a sequence."""

    checkpoint_bytes: int
    """Bytes of the largest checkpoint; 0 where all KV can be trimmed."""
    kv_bytes: float
    """Bytes of a token in the layers that keep KV of every token."""


def state_sizes(model: Path, n_threads: int) -> StateSizes:
    """Measure what llama.cpp saves of a sequence of this model, with and without what can be trimmed."""
    library.initialise()
    loaded = llama_cpp.llama_model_load_from_file(os.fsencode(model), llama_cpp.llama_model_default_params())
    if not loaded:
        raise BenchmarkError(f"{model}: llama.cpp cannot load it")
    try:
        window = llama_cpp.llama_model_n_swa(loaded)
        n_tokens = window + UBATCH
        whole, partial = _saved_bytes(loaded, n_tokens, n_threads)
        if not (window or llama_cpp.llama_model_is_recurrent(loaded) or llama_cpp.llama_model_is_hybrid(loaded)):
            partial = 0
        return StateSizes(partial, (whole - partial) / n_tokens)
    finally:
        llama_cpp.llama_model_free(loaded)


def _saved_bytes(model: object, n_tokens: int, n_threads: int) -> tuple[int, int]:
    """Return the bytes of a sequence of `n_tokens`, more than a window has, and of what cannot be trimmed of it."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_tokens + UBATCH
    params.n_batch = params.n_ubatch = UBATCH
    params.n_threads = params.n_threads_batch = n_threads
    params.swa_full = False
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise BenchmarkError("llama.cpp cannot create a context")
    try:
        for start in range(0, n_tokens, UBATCH):
            n = min(UBATCH, n_tokens - start)
            ids = (llama_cpp.llama_token * n)(*[(start + i) % 256 for i in range(n)])
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, n)) != 0:
                raise BenchmarkError("llama.cpp cannot compute a sequence")
        whole, partial = (
            int(llama_cpp.llama_state_seq_get_size_ext(context, 0, flags))
            for flags in (0, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        )
        return whole, partial
    finally:
        llama_cpp.llama_free(context)
