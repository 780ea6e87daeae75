"""Bytes of KV that a model keeps per cell, and outside the cells.

If all layers are alike, each has a row of K and a row of V in every cell, and the size follows from the model's
metadata. But layers with a sliding window keep fewer cells, recurrent layers keep one state per sequence, and some
models compress K and V. For those models a small context is created, and the buffer sizes that llama.cpp logs are
read. Nothing is guessed from a model's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import llama_cpp

from llamaslot.backend.llama import library
from llamaslot.backend.llama.llama_settings import CACHE_TYPES, LlamaSettings
from llamaslot.backend.llama.loading import PADDING, context_params, padded

_OTHER_ATTENTION = ("kv_lora_rank", "key_length_mla", "indexer.key_length", "shared_kv_layers")
"""Metadata keys of attention whose cells are not simply K and V of every layer."""
_PROBE_UBATCH = 32
"""Batch size of the small context whose buffers are measured."""
_LOGGED_BUFFER = re.compile(r"(\S+) (KV|RS) buffer size = +([\d.]+) MiB")
_LOGGED_CACHE = re.compile(r"size = +[\d.]+ MiB \( *(\d+) cells")


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of KV in one place."""

    per_cell: int = 0
    fixed: int = 0
    """Bytes that do not grow with the pool: cells of sliding windows, and recurrent states."""


def kv_bytes(model: Any, settings: LlamaSettings, n_seqs: int, n_ctx_seq: int) -> tuple[KvBytes, KvBytes]:
    """Return the KV of `n_seqs` sequences on the GPUs and on the host.

    `n_ctx_seq` is the number of cells that one sequence may use; 0 if that is not known yet.
    """
    if not _is_uniform(model):
        return measured(model, settings, n_seqs, n_ctx_seq)
    n_layer, n_nextn = llama_cpp.llama_model_n_layer(model), llama_cpp.llama_model_n_layer_nextn(model)
    n_on_gpu = layers_on_gpu(n_layer, n_nextn, settings.n_gpu_layers)
    size = layer_bytes(model, settings.cache_type_k, settings.cache_type_v)
    return KvBytes(size * n_on_gpu), KvBytes(size * (n_layer - n_on_gpu))


def layers_on_gpu(n_layer: int, n_nextn: int, n_gpu_layers: int) -> int:
    """Return how many layers keep their KV on a GPU: llama.cpp puts them there from the output layer on down."""
    if not n_gpu_layers or not library.gpus():
        return 0
    return min(max(n_gpu_layers - 1 - n_nextn, 0), n_layer) if n_gpu_layers > 0 else n_layer


def _is_uniform(model: Any) -> bool:
    """True if every layer keeps K and V of the same width in every cell."""
    return library.number(model, "attention.head_count_kv") > 0 and not (
        llama_cpp.llama_model_is_recurrent(model)
        or llama_cpp.llama_model_is_hybrid(model)
        or llama_cpp.llama_model_n_swa(model) > 0
        or any(library.number(model, f"attention.{key}") for key in _OTHER_ATTENTION)
    )


def layer_bytes(model: Any, type_k: str, type_v: str) -> int:
    """Return the bytes of one cell in one layer of a model whose layers are alike."""
    head = llama_cpp.llama_model_n_embd(model) // max(llama_cpp.llama_model_n_head(model), 1)
    n_heads = library.number(model, "attention.head_count_kv")
    k = library.number(model, "attention.key_length") or head
    v = library.number(model, "attention.value_length") or head
    row_k = library.row_bytes(CACHE_TYPES[type_k], n_heads * k)
    return row_k + library.row_bytes(CACHE_TYPES[type_v], n_heads * v)


def measured(model: Any, settings: LlamaSettings, n_seqs: int, n_ctx_seq: int) -> tuple[KvBytes, KvBytes]:
    """Measure with a small context of this model. llama.cpp logs the size of each buffer to 0.01 MiB."""
    params = context_params(settings, n_ctx=PADDING, n_seqs=n_seqs, n_threads=1)
    params.n_batch = params.n_ubatch = _PROBE_UBATCH
    params.kv_unified = True
    with library.watched(quiet=True) as (lines, _):
        if context := llama_cpp.llama_init_from_model(model, params):
            llama_cpp.llama_free(context)
    return from_log(lines, _window_cells(model, settings, n_seqs, n_ctx_seq))


def _window_cells(model: Any, settings: LlamaSettings, n_seqs: int, n_ctx_seq: int) -> int:
    """Cells of a layer with a sliding window by llama.cpp's formula (fact 28); -1 if as many as other layers."""
    if settings.swa_full:
        return -1
    n_shared, n_streams = (n_seqs, 1) if settings.unified else (1, n_seqs)
    n_cells = llama_cpp.llama_model_n_swa(model) * n_shared + settings.n_ubatch
    return padded(min(n_cells, n_ctx_seq or n_cells)) * n_streams


def from_log(lines: Iterable[str], n_window_cells: int) -> tuple[KvBytes, KvBytes]:
    """Compute the bytes from llama.cpp's log, which for each cache has its buffers, then its number of cells."""
    per_cell, fixed = [0, 0], [0, 0]
    buffers: list[tuple[bool, int]] = []
    is_window = False
    for line in lines:
        if "creating" in line and "SWA KV cache" in line:
            is_window = "non-SWA" not in line
        elif found := _LOGGED_BUFFER.search(line):
            is_host = found[1].startswith("CPU") or found[1].endswith("_Host")
            n_bytes = round(float(found[3]) * 2**20)
            if found[2] == "RS":
                fixed[is_host] += n_bytes
            else:
                buffers.append((is_host, n_bytes))
        elif found := _LOGGED_CACHE.search(line):
            for is_host, n_bytes in buffers:
                size = n_bytes // int(found[1])
                if is_window and n_window_cells >= 0:
                    fixed[is_host] += size * n_window_cells
                else:
                    per_cell[is_host] += size
            buffers = []
    return KvBytes(per_cell[0], fixed[0]), KvBytes(per_cell[1], fixed[1])
