"""How large the KV pool becomes where `--ctx-size` does not say: as large as free memory allows.

    cells = (free - total x (1 - fraction)) / bytes per cell,  free once the weights are loaded

`pool_size` is that arithmetic on plain numbers. The rest of this room finds the numbers: how wide each layer's KV
is (the model's metadata), and how much memory is free where it will lie (the GPU's or the host's, within what a
container may use). Nothing here allocates. Models whose cells are not all alike are told apart, never guessed.

How much is taken of what fits, `most_cells` says: the model's training context for every slot, within a bound.
Cells are not free: attention and every operation on a sequence scan the used ones, the host zeroes all of them at
start, and what they take there, everything else lacks. So the bound is lower there than on a GPU of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import psutil
from llama_cpp._ggml import libggml

from llamaslot.backend.llama.loading import PADDING, metadata, padded
from llamaslot.backend.llama.settings import CACHE_TYPES, LlamaSettings
from llamaslot.base.errors import ConfigError

MOST_ON_HOST = 32_768
MOST_ON_GPU = 131_072
"""An operation on a sequence scans the pool: 0.1 ms at so many cells, and the mask of a step is that wide."""

HOST = "the host"

_BLOCKS = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2)} | {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "iq4_nl": (32, 18),
}
"""Elements and bytes of a block by element type: ggml's `type_traits`."""
assert _BLOCKS.keys() == CACHE_TYPES.keys()

_UNLIKE = ("kv_lora_rank", "key_length_mla", "indexer.key_length", "shared_kv_layers")
"""Metadata of attention whose cells are not simply K and V of every layer."""
_GPU, _IGPU = 1, 2
"""ggml's device types of GPUs with memory of their own and of those that use the host's."""
_GGUF_UINT32, _GGUF_INT32, _GGUF_ARRAY = 4, 5, 9


@dataclass(frozen=True, slots=True)
class Place:
    """Memory in which a part of each cell lies."""

    name: str
    free: int
    total: int
    cell_bytes: int

    def room(self, fraction: float) -> int:
        """Cells that fit if `1 - fraction` of all the memory stays free."""
        return max(int(self.free - self.total * (1 - fraction)), 0) // self.cell_bytes


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a pool, and the arithmetic that led to it as a line to print."""

    n_cells: int
    """Cells of all slots together."""
    n_room: int
    """Cells that would fit, those of reserved sequences included where the pool is partitioned."""
    places: tuple[Place, ...]
    fraction: float
    capped: bool
    """Whether more would have fitted than is taken by default."""

    def line(self) -> str:
        """The arithmetic, to print."""
        terms = [
            f"({_gib(place.free)} free on {place.name} - {1 - self.fraction:.0%} of {_gib(place.total)}) "
            f"/ {place.cell_bytes:,} bytes a cell"
            for place in self.places
        ]
        smaller = "the smaller of " if len(terms) > 1 else ""
        why = ", the most without --ctx-size" if self.capped else ""
        return f"KV pool: {smaller}{' and '.join(terms)} = {self.n_room:,} cells; {self.n_cells:,} taken{why}"


def choose(model: Any, settings: LlamaSettings, n_seqs: int, n_mapped: int) -> tuple[int, str]:
    """The cells of all slots together, and the line that says where they come from. Raises `ConfigError`.

    `n_seqs` sequences lie in the pool; `n_mapped` bytes of weights are mapped from the file.
    """
    n_parts, n_streams = (1, 1) if settings.unified else (settings.n_slots, n_seqs)
    if settings.n_ctx and n_streams == n_parts:
        return settings.n_ctx, ""
    reason = why_not_sized(model)
    widths = [] if reason else kv_widths(model, settings.model)
    flash_attn = settings.flash_attn != "off"
    layers = layer_bytes(widths, settings.cache_type_k, settings.cache_type_v, flash_attn=flash_attn)
    if settings.n_ctx:
        n_cells, line = settings.n_ctx, f"KV pool: {settings.n_ctx:,} cells by --ctx-size"
    else:
        n_layer_all = len(layers) + llama_cpp.llama_model_n_layer_nextn(model)
        places = kv_places(layers, n_layer_all, settings.n_gpu_layers, n_mapped)
        if not (reason or places):
            reason = "its metadata do not say how wide its KV is"
        elif silent := [place.name for place in places if not place.total]:
            reason = f"{silent[0]} does not say how much memory is free"
        n_ctx_train = llama_cpp.llama_model_n_ctx_train(model)
        if reason:
            n_cells = n_ctx_train
            line = f"KV pool: {n_cells:,} cells, the model's context, whatever memory is free: {reason}"
        else:
            on_host = any(place.name == HOST for place in places)
            most = most_cells(n_ctx_train, settings.n_slots, on_host=on_host)
            size = pool_size(
                places, fraction=settings.kv_mem_fraction, most=most, n_parts=n_parts, n_streams=n_streams
            )
            n_cells, line = size.n_cells, size.line()
    if n_streams > n_parts:
        more = padded(padded(n_cells) // n_parts) * (n_streams - n_parts)
        size_of = f" ({more * sum(layers) / 2**20:,.1f} MiB)" if layers else ""
        line += f"; reserved sequences add {more:,} cells{size_of}"
    return n_cells, line


def pool_size(
    places: Sequence[Place], *, fraction: float, most: int, n_parts: int = 1, n_streams: int = 1
) -> PoolSize:
    """The cells that `fraction` of memory allows, at most `most`, in whole paddings. Raises `ConfigError`.

    A partitioned pool is `n_parts` equal ones for the slots; `n_streams`, reserved sequences included, take memory.
    """
    n_room = min(place.room(fraction) for place in places)
    fits = n_room // n_streams // PADDING * PADDING
    if fits < PADDING:
        needed = PADDING * n_streams
        short = min(places, key=lambda place: place.room(fraction))
        raise ConfigError(
            f"no room for a KV pool of {needed:,} cells, {short.cell_bytes:,} bytes each: {_gib(short.free)} of "
            f"{_gib(short.total)} on {short.name} are free, and {1 - fraction:.0%} are to stay so; raise "
            "--kv-mem-fraction, or set --ctx-size yourself",
            param="--kv-mem-fraction",
        )
    wanted = padded(padded(most) // n_parts)
    part = min(fits, wanted)
    return PoolSize(
        n_cells=part * n_parts,
        n_room=n_room,
        places=tuple(places),
        fraction=fraction,
        capped=fits > wanted,
    )


def most_cells(n_ctx_train: int, n_slots: int, *, on_host: bool) -> int:
    """What is taken at most without `--ctx-size`; never less than the longest request of the model needs."""
    return max(n_ctx_train, min(n_slots * n_ctx_train, MOST_ON_HOST if on_host else MOST_ON_GPU))


def layer_bytes(widths: Sequence[tuple[int, int]], type_k: str, type_v: str, *, flash_attn: bool) -> list[int]:
    """Bytes of one cell in each layer, from the widths of its K and V.

    Without flash attention V lies transposed, and llama.cpp gives every layer the widest one's.
    """
    widest = max((v for _, v in widths), default=0)
    return [_row_bytes(k, type_k) + _row_bytes(v if flash_attn else widest, type_v) for k, v in widths]


def why_not_sized(model: Any) -> str:
    """Why a cell of this model is not so many bytes, or empty where it is."""
    if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
        return "a recurrent state does not grow with the cells"
    if llama_cpp.llama_model_n_swa(model) > 0:
        return "layers with a sliding window keep fewer cells"
    if any(_number(model, f"attention.{key}") for key in _UNLIKE):
        return "its attention keeps something else than K and V of every layer"
    return ""


def kv_widths(model: Any, path: Path) -> list[tuple[int, int]]:
    """The widths of K and V in each layer, or nothing where the metadata do not say."""
    n_layer, n_head = llama_cpp.llama_model_n_layer(model), llama_cpp.llama_model_n_head(model)
    if n_layer < 1 or n_head < 1:
        return []
    head = llama_cpp.llama_model_n_embd(model) // n_head
    k = _number(model, "attention.key_length") or head
    v = _number(model, "attention.value_length") or head
    n_kv = _number(model, "attention.head_count_kv")
    heads = [n_kv] * n_layer if n_kv else array(path, f"{_architecture(model)}.attention.head_count_kv")
    heads = (heads or [n_head] * n_layer)[:n_layer]
    return [(n * k, n * v) for n in heads] if len(heads) == n_layer and any(heads) else []


def array(path: Path, key: str) -> list[int]:
    """An array of integers in the file's metadata, which the loaded model does not tell; empty if there is none."""
    libggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, _GgufParams]
    libggml.gguf_init_from_file.restype = ctypes.c_void_p
    libggml.gguf_find_key.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    libggml.gguf_find_key.restype = ctypes.c_int64
    libggml.gguf_free.argtypes = [ctypes.c_void_p]
    libggml.gguf_get_arr_n.restype = ctypes.c_size_t
    libggml.gguf_get_arr_data.restype = ctypes.POINTER(ctypes.c_int32)
    for name in ("kv_type", "arr_type", "arr_n", "arr_data"):
        getattr(libggml, f"gguf_get_{name}").argtypes = [ctypes.c_void_p, ctypes.c_int64]
    file = libggml.gguf_init_from_file(os.fsencode(path), _GgufParams(no_alloc=True, ctx=None))
    if not file:
        return []
    try:
        at = libggml.gguf_find_key(file, key.encode())
        if at < 0 or libggml.gguf_get_kv_type(file, at) != _GGUF_ARRAY:
            return []
        if libggml.gguf_get_arr_type(file, at) not in (_GGUF_UINT32, _GGUF_INT32):
            return []
        return list(libggml.gguf_get_arr_data(file, at)[: libggml.gguf_get_arr_n(file, at)])
    finally:
        libggml.gguf_free(file)


def kv_places(layers: Sequence[int], n_layer_all: int, n_gpu_layers: int, n_mapped: int) -> list[Place]:
    """Where the KV of the layers will lie, from the bytes of a cell in each; llama.cpp fills GPUs from the end."""
    gpus = _gpus() if n_gpu_layers else []
    first = max(n_layer_all + 1 - n_gpu_layers, 0) if n_gpu_layers > 0 else 0
    on_gpu = sum(layers[first:]) if gpus else 0
    on_host = sum(layers) - on_gpu
    found = []
    if on_gpu:
        name = " + ".join(gpu.name for gpu in gpus)
        found.append(Place(name, sum(gpu.free for gpu in gpus), sum(gpu.total for gpu in gpus), on_gpu))
        if sys.platform == "darwin" or gpus[0].kind == _IGPU:
            on_host += on_gpu  # the memory of such a GPU is the host's
    if on_host:
        free, total = host_memory()
        found.append(Place(HOST, max(free - n_mapped, 0), total, on_host))
    return found


def host_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """Free and all memory of the host, or of the control groups that this process is in where they allow less."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    try:
        entries = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        return free, total
    for entry in entries:
        group = cgroups / entry
        for folder in (group, *group.parents):
            if not folder.is_relative_to(cgroups):
                break
            limit, used = _cgroup(folder)
            free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


@dataclass(frozen=True, slots=True)
class _Device:
    """A device of ggml's."""

    name: str
    kind: int
    free: int
    total: int


class _GgufParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _cgroup(folder: Path) -> tuple[int, int]:
    """The limit of a control group and what it uses beyond files that can be read again."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return sys.maxsize, 0
    return limit, used - int(stat.get("inactive_file", 0)) - int(stat.get("active_file", 0))


def _gpus() -> list[_Device]:
    """The GPUs that llama.cpp uses: integrated ones only where there are no others."""
    found = _devices()
    return [device for device in found if device.kind == _GPU] or [
        device for device in found if device.kind == _IGPU
    ]


def _devices() -> list[_Device]:
    libggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    libggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    libggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    libggml.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_dev_type.restype = ctypes.c_int
    libggml.ggml_backend_dev_name.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_dev_name.restype = ctypes.c_char_p
    libggml.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2]
    libggml.ggml_backend_dev_memory.restype = None
    found = []
    for i in range(libggml.ggml_backend_dev_count()):
        device = libggml.ggml_backend_dev_get(i)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        libggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = libggml.ggml_backend_dev_name(device).decode(errors="replace")
        found.append(_Device(name, libggml.ggml_backend_dev_type(device), free.value, total.value))
    return found


def _architecture(model: Any) -> str:
    return metadata(model, "general.architecture")


def _number(model: Any, key: str) -> int:
    """A number of the architecture's metadata; 0 where there is none."""
    text = metadata(model, f"{_architecture(model)}.{key}")
    return int(text) if text.isdecimal() else 0


def _row_bytes(width: int, kind: str) -> int:
    elements, size = _BLOCKS[kind]
    return -(-width // elements) * size


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
