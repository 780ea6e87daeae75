"""Size of the KV pool: as large as free memory allows, or `--ctx-size`, which is checked against memory.

    cells = (free - total x (1 - fraction) - fixed) / bytes per cell,  free once the weights are loaded

`pool_size` is this arithmetic on plain numbers. Free memory is the GPU's or the host's, within the limits of a
container.

If all layers are alike, each has a row of K and a row of V in every cell, and the bytes follow from the model's
metadata (`kv_bytes`). But layers with a sliding window keep fewer cells, recurrent layers keep one state per
sequence, and some models compress K and V. For those models a small context is created, and the buffer sizes that
llama.cpp logs are read. Nothing is guessed from a model's name.

`most_cells` limits the result to the model's training context for every slot, within a fixed limit. Cells are not
free: attention and every operation on a sequence scan the used ones, the host zeroes all of them at start, and
their memory is lost to everything else. So the limit is lower on the host than on a GPU with its own memory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import structlog

from llamaslot.backend.host import host_memory
from llamaslot.backend.llama import capabilities, library
from llamaslot.backend.llama.library import Device
from llamaslot.backend.llama.loading import CACHE_TYPES, PADDING, LlamaSettings, context_params, gpus, padded
from llamaslot.base.errors import ConfigError

_log = structlog.get_logger(__name__)


MAX_AUTO_CELLS_HOST = 32_768
MAX_AUTO_CELLS_GPU = 131_072
"""Limits of a computed pool size: operations scan the pool (0.1 ms at the larger one), and masks are as wide."""

HOST = "the host"
_OTHER_ATTENTION = ("kv_lora_rank", "key_length_mla", "indexer.key_length", "shared_kv_layers")
"""Metadata keys of attention whose cells are not simply K and V of every layer."""
_COMPUTE_BYTES = 640 * 2**20
"""About what a model's processes take beside weights and pool, where several models share memory."""
_MIN_SLOT = 1024
"""Cells for each slot that a model gets even so."""
ROLLBACK_LENGTHS = (7, 3)
"""Drafts for which earlier states are kept: with the token before them they fill tiles of four rows (fact 36). With
15 the graphs of larger models exceed llama.cpp's limit, and the process ends (fact 44).
"""
ROLLBACK_SHARE = 1 / 32
"""Most of the memory that these states take."""
_PROBE_UBATCH = 32
"""Batch size of the small context whose buffers are measured."""
_LOGGED_BUFFER = re.compile(r"(\S+) (KV|RS) buffer size = +([\d.]+) MiB")
_LOGGED_CACHE = re.compile(r"size = +[\d.]+ MiB \( *(\d+) cells")


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that has a part of each cell."""

    name: str
    free: int
    total: int
    cell_bytes: int
    fixed: int = 0
    """Bytes of KV that do not grow with the pool."""

    def cells_that_fit(self, fraction: float) -> int:
        """Return how many cells fit if `1 - fraction` of all memory stays free."""
        return max(int(self.free - self.total * (1 - fraction)) - self.fixed, 0) // self.cell_bytes


def choose(model: Any, settings: LlamaSettings, n_seqs: int, n_mapped: int) -> tuple[int, int, str]:
    """Return the cells of all slots together, and a line that explains the number. Raises `ConfigError`.

    The pool has `n_seqs` sequences; `n_mapped` bytes of weights are mapped from the file.
    """
    n_parts, n_streams = (1, 1) if settings.unified else (settings.n_slots, n_seqs)
    gpu, host = kv_bytes(model, settings, n_seqs, padded(padded(settings.n_ctx) // n_parts))
    # Only models without windows keep earlier states, so what is fixed are states.
    n_rollback = _rollback(model, settings, gpu.fixed + host.fixed)
    gpu, host = (KvBytes(each.per_cell, each.fixed * (1 + n_rollback)) for each in (gpu, host))
    places = kv_places(gpu, host, n_mapped, gpus(settings))
    n_fixed = gpu.fixed + host.fixed
    if settings.n_ctx:
        n_cells = settings.n_ctx
        line = f"KV pool: {n_cells:,} cells by --ctx-size" if n_fixed or n_streams > n_parts else ""
    else:
        n_cells, line = _fitting(model, settings, places, n_parts, n_streams)
    part = padded(padded(n_cells) // n_parts)
    if settings.n_ctx:
        _check_against_memory(n_cells, part * n_streams, places)
    cell_bytes = gpu.per_cell + host.per_cell
    if n_fixed:
        size = f", {_size(cell_bytes * part * n_streams)}" if cell_bytes else ""
        line += f"{size}; plus {_size(n_fixed)} for sliding windows or recurrent states"
        if n_rollback:
            line += f", {n_rollback} earlier ones of each sequence among them for drafts (--speculate)"
    if n_streams > n_parts:
        more = part * (n_streams - n_parts)
        size = f" ({_size(more * cell_bytes)})" if cell_bytes else ""
        line += f"; spare sequences add {more:,} cells{size}"
    return n_cells, n_rollback, line


def _rollback(model: Any, settings: LlamaSettings, n_bytes: int) -> int:
    """Return how many earlier states are kept for drafts, each of which takes `n_bytes`.

    None where nothing is drafted. A step must be longer than a draft (fact 44). By all memory, not what is free, so
    that the next start keeps as many, and what was measured counts for it.
    """
    is_reused = settings.checkpoints and settings.unified and settings.reuse_self_test != "off"
    used = gpus(settings)
    if not is_reused or settings.embeds or not capabilities.can_go_back(model, on_gpu=bool(used)):
        return 0
    most = ROLLBACK_SHARE * min((each.total for each in used), default=host_memory()[1])
    if settings.max_bytes:
        most = min(most, ROLLBACK_SHARE * settings.max_bytes)
    lengths = [min(each, settings.max_draft) for each in ROLLBACK_LENGTHS if each + 1 < settings.n_ubatch]
    return next((n for n in lengths if n * n_bytes <= most), 0)


def _fitting(
    model: Any, settings: LlamaSettings, places: Sequence[Place], n_parts: int, n_streams: int
) -> tuple[int, str]:
    """Return the cells, and the line that explains them, without `--ctx-size`."""
    n_ctx_train = llama_cpp.llama_model_n_ctx_train(model)
    growing = [place for place in places if place.cell_bytes]
    unknown = [place.name for place in growing if not place.total]
    if unknown or not growing:
        reason = f"free memory on {unknown[0]} is unknown" if unknown else "its KV does not grow with the context"
        return (
            n_ctx_train,
            f"KV pool: {n_ctx_train:,} cells, the model's context, regardless of free memory: {reason}",
        )
    most = most_cells(n_ctx_train, settings.n_slots, on_host=any(place.name == HOST for place in growing))
    if settings.max_bytes:
        # Less than that would be of no use: other models make place for such a pool.
        left = settings.max_bytes - llama_cpp.llama_model_size(model) - _COMPUTE_BYTES
        left -= settings.mmproj.stat().st_size if settings.mmproj is not None else 0
        left = (left - sum(place.fixed for place in places)) * n_parts // n_streams
        most = min(most, max(left // sum(place.cell_bytes for place in growing), settings.n_slots * _MIN_SLOT))
    return pool_size(growing, fraction=settings.kv_mem_fraction, most=most, n_parts=n_parts, n_streams=n_streams)


def _check_against_memory(n_ctx: int, n_cells: int, places: Sequence[Place]) -> None:
    """Compare the size set by `--ctx-size` with memory before llama.cpp tries to allocate it.

    More than free memory is a warning: on the host the allocation may succeed, and the system kill the server
    later. More than all memory is a `ConfigError`: if memory is overcommitted, even that allocation succeeds.
    """
    for place in places:
        needed = n_cells * place.cell_bytes + place.fixed
        if place.total and needed > place.free:
            fixed = f" + {_size(place.fixed)} outside the cells" if place.fixed else ""
            fits = f"at most {place.cells_that_fit(1):,} cells fit" if place.cell_bytes else "nothing fits"
            free = f"{_size(place.free)} of {_size(place.total)} are free"
            reason = (
                f"--ctx-size {n_ctx:,} needs {n_cells:,} cells x {place.cell_bytes:,} bytes{fixed} = "
                f"{_size(needed)} on {place.name}, where {free}; {fits}"
            )
            if needed > place.total:
                raise ConfigError(reason, param="--ctx-size")
            _log.warning("kv_pool.larger_than_memory", reason=reason)


def pool_size(
    places: Sequence[Place], *, fraction: float, most: int, n_parts: int = 1, n_streams: int = 1
) -> tuple[int, str]:
    """Return the cells that `fraction` of memory allows, at most `most`, and the arithmetic. Raises `ConfigError`.

    A partitioned pool has `n_parts` equal parts for slots, and `n_streams` parts including spare sequences.
    """
    n_fitting = min(place.cells_that_fit(fraction) for place in places)
    fits = n_fitting // n_streams // PADDING * PADDING
    if fits < PADDING:
        needed = PADDING * n_streams
        short = min(places, key=lambda place: place.cells_that_fit(fraction))
        raise ConfigError(
            f"not enough memory for a KV pool of {needed:,} cells, {short.cell_bytes:,} bytes each: "
            f"{_size(short.free)} of {_size(short.total)} on {short.name} are free, and {1 - fraction:.0%} must "
            "stay free; raise --kv-mem-fraction, or set --ctx-size yourself",
            param="--kv-mem-fraction",
        )
    wanted = padded(padded(most) // n_parts)
    part = min(fits, wanted)
    terms = []
    for place in places:
        fixed = f" - {_size(place.fixed)} outside the cells" if place.fixed else ""
        free = f"{_size(place.free)} free on {place.name} - {1 - fraction:.0%} of {_size(place.total)}{fixed}"
        terms.append(f"({free}) / {place.cell_bytes:,} bytes a cell")
    smaller = "the smaller of " if len(terms) > 1 else ""
    why = " (default limit; --ctx-size overrides it)" if fits > wanted else ""
    n_cells = part * n_parts
    return n_cells, f"KV pool: {smaller}{' and '.join(terms)} = {n_fitting:,} cells; {n_cells:,} allocated{why}"


def most_cells(n_ctx_train: int, n_slots: int, *, on_host: bool) -> int:
    """Return the most cells to allocate without `--ctx-size`: never less than the model's longest request needs."""
    return max(n_ctx_train, min(n_slots * n_ctx_train, MAX_AUTO_CELLS_HOST if on_host else MAX_AUTO_CELLS_GPU))


def free_bytes(settings: LlamaSettings) -> int:
    """Return the free memory of the GPU in use that has least, or of the host if there is none."""
    return min((each.free for each in gpus(settings)), default=host_memory()[0])


def kv_places(gpu: KvBytes, host: KvBytes, n_mapped: int, used: Sequence[Device]) -> list[Place]:
    """Return the memory in which the KV on the `used` GPUs and on the host will be.

    `n_mapped` bytes of the host will have weights, in addition.
    """
    found = []
    if gpu != KvBytes():
        name = " + ".join(each.name for each in used)
        free, total = sum(each.free for each in used), sum(each.total for each in used)
        found.append(Place(name, free, total, gpu.per_cell, gpu.fixed))
        if sys.platform == "darwin" or used[0].kind == library.INTEGRATED_GPU:
            # Such a GPU uses the host's memory.
            host = KvBytes(host.per_cell + gpu.per_cell, host.fixed + gpu.fixed)
    if host != KvBytes():
        free, total = host_memory()
        found.append(Place(HOST, max(free - n_mapped, 0), total, host.per_cell, host.fixed))
    return found


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


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
        return measured_bytes(model, settings, n_seqs, n_ctx_seq)
    n_layer, n_nextn = llama_cpp.llama_model_n_layer(model), llama_cpp.llama_model_n_layer_nextn(model)
    has_gpu = settings.kv_offload and bool(gpus(settings))
    n_on_gpu = layers_on_gpu(n_layer, n_nextn, settings.n_gpu_layers) if has_gpu else 0
    size = layer_bytes(model, settings.cache_type_k, settings.cache_type_v)
    return KvBytes(size * n_on_gpu), KvBytes(size * (n_layer - n_on_gpu))


def layers_on_gpu(n_layer: int, n_nextn: int, n_gpu_layers: int) -> int:
    """Return how many layers are on a GPU, if there is one: llama.cpp puts them there from the output on down."""
    if not n_gpu_layers:
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


def measured_bytes(model: Any, settings: LlamaSettings, n_seqs: int, n_ctx_seq: int) -> tuple[KvBytes, KvBytes]:
    """Measure with a small context of this model. llama.cpp logs the size of each buffer to 0.01 MiB."""
    params = context_params(settings, n_ctx=PADDING, n_seqs=n_seqs, n_threads=1)
    params.n_batch = params.n_ubatch = _PROBE_UBATCH
    params.kv_unified = True
    with library.watched(quiet=True) as (lines, _):
        if context := llama_cpp.llama_init_from_model(model, params):
            llama_cpp.llama_free(context)
    return bytes_from_log(lines, _window_cells(model, settings, n_seqs, n_ctx_seq))


def _window_cells(model: Any, settings: LlamaSettings, n_seqs: int, n_ctx_seq: int) -> int:
    """Cells of a layer with a sliding window by llama.cpp's formula (fact 28); -1 if as many as other layers."""
    if settings.swa_full:
        return -1
    n_shared, n_streams = (n_seqs, 1) if settings.unified else (1, n_seqs)
    n_cells = llama_cpp.llama_model_n_swa(model) * n_shared + settings.n_ubatch
    return padded(min(n_cells, n_ctx_seq or n_cells)) * n_streams


def bytes_from_log(lines: Iterable[str], n_window_cells: int) -> tuple[KvBytes, KvBytes]:
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
