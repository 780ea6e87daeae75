"""Size of the KV pool: as large as free memory allows where `--ctx-size` does not say, else checked against memory.

    cells = (free - total x (1 - fraction) - fixed) / bytes per cell,  free once the weights are loaded

`pool_size` is that arithmetic on plain numbers; the bytes come from `kv_bytes.py`, and free memory is the GPU's or
the host's, within what a container may use.

`most_cells` bounds what is taken of what fits: the model's training context for every slot, within a limit. Cells
are not free: attention and every operation on a sequence scan the used ones, the host zeroes all of them at start,
and the memory that they take is lost to everything else. So the limit is lower on the host than on a GPU of its
own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import structlog

from llamaslot.backend.host_memory import host_memory
from llamaslot.backend.llama import library
from llamaslot.backend.llama.kv_bytes import KvBytes, kv_bytes
from llamaslot.backend.llama.llama_settings import LlamaSettings
from llamaslot.backend.llama.loading import PADDING, padded
from llamaslot.base.errors import ConfigError

_log = structlog.get_logger(__name__)

MAX_AUTO_CELLS_HOST = 32_768
MAX_AUTO_CELLS_GPU = 131_072
"""Limit of a computed pool size: operations scan the pool (0.1 ms at this size), and masks are as wide."""

HOST = "the host"


@dataclass(frozen=True, slots=True)
class Place:
    """Memory in which a part of each cell lies."""

    name: str
    free: int
    total: int
    cell_bytes: int
    fixed: int = 0
    """Bytes of KV that do not grow with the pool."""

    def cells_that_fit(self, fraction: float) -> int:
        """Return the cells that fit if `1 - fraction` of all the memory stays free."""
        return max(int(self.free - self.total * (1 - fraction)) - self.fixed, 0) // self.cell_bytes


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a pool, and the arithmetic that led to it as a line to print."""

    n_cells: int
    """Cells of all slots together."""
    n_fitting: int
    """Cells that would fit, those of spare sequences included where the pool is partitioned."""
    places: tuple[Place, ...]
    fraction: float
    capped: bool
    """True if more would have fitted than is taken by default."""

    def line(self) -> str:
        """The arithmetic, to print."""
        terms = []
        for place in self.places:
            fixed = f" - {_size(place.fixed)} outside the cells" if place.fixed else ""
            free = (
                f"{_size(place.free)} free on {place.name} - {1 - self.fraction:.0%} of {_size(place.total)}{fixed}"
            )
            terms.append(f"({free}) / {place.cell_bytes:,} bytes a cell")
        smaller = "the smaller of " if len(terms) > 1 else ""
        why = " (default limit; --ctx-size overrides it)" if self.capped else ""
        return (
            f"KV pool: {smaller}{' and '.join(terms)} = {self.n_fitting:,} cells; {self.n_cells:,} allocated{why}"
        )


def choose(model: Any, settings: LlamaSettings, n_seqs: int, n_mapped: int) -> tuple[int, str]:
    """Return the cells of all slots together, and the line that says where they come from. Raises `ConfigError`.

    `n_seqs` sequences lie in the pool; `n_mapped` bytes of weights are mapped from the file.
    """
    n_parts, n_streams = (1, 1) if settings.unified else (settings.n_slots, n_seqs)
    gpu, host = kv_bytes(model, settings, n_seqs, padded(padded(settings.n_ctx) // n_parts))
    places = kv_places(gpu, host, n_mapped)
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
    if n_streams > n_parts:
        more = part * (n_streams - n_parts)
        size = f" ({_size(more * cell_bytes)})" if cell_bytes else ""
        line += f"; spare sequences add {more:,} cells{size}"
    return n_cells, line


def _fitting(
    model: Any, settings: LlamaSettings, places: Sequence[Place], n_parts: int, n_streams: int
) -> tuple[int, str]:
    """The cells and their line where `--ctx-size` does not say."""
    n_ctx_train = llama_cpp.llama_model_n_ctx_train(model)
    growing = [place for place in places if place.cell_bytes]
    unknown = [place.name for place in growing if not place.total]
    if unknown or not growing:
        reason = (
            f"{unknown[0]} does not say how much memory is free" if unknown else "its KV does not grow with them"
        )
        return (
            n_ctx_train,
            f"KV pool: {n_ctx_train:,} cells, the model's context, whatever memory is free: {reason}",
        )
    most = most_cells(n_ctx_train, settings.n_slots, on_host=any(place.name == HOST for place in growing))
    size = pool_size(growing, fraction=settings.kv_mem_fraction, most=most, n_parts=n_parts, n_streams=n_streams)
    return size.n_cells, size.line()


def _check_against_memory(n_ctx: int, n_cells: int, places: Sequence[Place]) -> None:
    """Compare a pool that was asked for with memory before llama.cpp tries to allocate it.

    A pool above free memory is warned of: on the host the attempt may well succeed, and the system end the server
    later. One above all memory is a `ConfigError`: with overcommitted memory even that allocation succeeds.
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
) -> PoolSize:
    """The cells that `fraction` of memory allows, at most `most`, in whole paddings. Raises `ConfigError`.

    A partitioned pool is `n_parts` equal ones for the slots; `n_streams`, spare sequences included, take memory.
    """
    n_fitting = min(place.cells_that_fit(fraction) for place in places)
    fits = n_fitting // n_streams // PADDING * PADDING
    if fits < PADDING:
        needed = PADDING * n_streams
        short = min(places, key=lambda place: place.cells_that_fit(fraction))
        raise ConfigError(
            f"no room for a KV pool of {needed:,} cells, {short.cell_bytes:,} bytes each: {_size(short.free)} of "
            f"{_size(short.total)} on {short.name} are free, and {1 - fraction:.0%} are to stay so; raise "
            "--kv-mem-fraction, or set --ctx-size yourself",
            param="--kv-mem-fraction",
        )
    wanted = padded(padded(most) // n_parts)
    part = min(fits, wanted)
    return PoolSize(
        n_cells=part * n_parts,
        n_fitting=n_fitting,
        places=tuple(places),
        fraction=fraction,
        capped=fits > wanted,
    )


def most_cells(n_ctx_train: int, n_slots: int, *, on_host: bool) -> int:
    """Return the upper limit of the cells without `--ctx-size`; never less than the longest request of the model
    needs.
    """
    return max(n_ctx_train, min(n_slots * n_ctx_train, MAX_AUTO_CELLS_HOST if on_host else MAX_AUTO_CELLS_GPU))


def kv_places(gpu: KvBytes, host: KvBytes, n_mapped: int) -> list[Place]:
    """Return the memory in which the KV on GPUs and host will lie, in addition to `n_mapped` bytes of weights."""
    found = []
    if gpu != KvBytes():
        gpus = library.gpus()
        name = " + ".join(each.name for each in gpus)
        free, total = sum(each.free for each in gpus), sum(each.total for each in gpus)
        found.append(Place(name, free, total, gpu.per_cell, gpu.fixed))
        if sys.platform == "darwin" or gpus[0].kind == library.INTEGRATED_GPU:
            # The memory of such a GPU is the host's.
            host = KvBytes(host.per_cell + gpu.per_cell, host.fixed + gpu.fixed)
    if host != KvBytes():
        free, total = host_memory()
        found.append(Place(HOST, max(free - n_mapped, 0), total, host.per_cell, host.fixed))
    return found


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
