"""What a server's process keeps in memory beyond what any server of the same model must.

Resident, on Linux, is what `smaps` says: every page of the process and its children but those of the weights' file.
macOS charges a process only for pages that cannot be read again from a file (`phys_footprint`), so the weights are
out of it, and the libraries too. From both go the KV pool, by the model's shape, and what is stored off the pool.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import psutil
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from bench.client import BenchmarkError
from bench.contenders import Contender, Load
from bench.server import Server
from bench.tokens import Tokens

_UNLIKE = ("attention.sliding_window", "attention.kv_lora_rank", "ssm.state_size", "shortconv.l_cache")
"""Metadata of models that keep something else than K and V of every layer for each cell."""
_TYPES = (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v"))


@dataclass(frozen=True)
class Memory:
    """Bytes of a server's process."""

    resident: int
    """All but the weights."""
    pool: int
    """The KV pool, where it lies in this memory."""
    tier: int
    """KV that is kept off the pool."""
    n_seqs: int | None
    """Sequence ids of llama.cpp's context: each has a row in its buffer of logits. None where nobody says."""

    @property
    def beyond(self) -> int:
        """What is left."""
        return self.resident - self.pool - self.tier


def resident(pid: int, model: Path) -> int:
    """Bytes of a process and its children, the weights' file aside."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    if sys.platform == "darwin":
        return sum(_footprint(each.pid) for each in family)
    weights = str(model.resolve())
    return sum(part.rss for each in family for part in each.memory_maps() if part.path != weights)


def pool_bytes(number: Callable[[str], int], n_cells: int, type_k: str = "f16", type_v: str = "f16") -> int:
    """Bytes of a KV pool: K and V of every layer's KV heads for each cell, by the `number`s of a model's file."""
    n_layers, n_heads = number("block_count"), number("attention.head_count_kv")
    if unlike := [key for key in _UNLIKE if number(key)]:
        raise BenchmarkError(f"the model's cells are not all alike: it has {unlike[0]}")
    if not (n_layers and n_heads):
        raise BenchmarkError("the model's metadata do not say how wide its KV is")
    width = number("embedding_length") // number("attention.head_count")
    row_k = _bytes(n_heads * (number("attention.key_length") or width), type_k)
    row_v = _bytes(n_heads * (number("attention.value_length") or width), type_v)
    return n_cells * n_layers * (row_k + row_v)


def pool_on_host(flags: Sequence[str]) -> bool:
    """Whether the pool lies in the memory that `resident` counts: not on a GPU that has its own."""
    is_offloaded = llama_cpp.llama_supports_gpu_offload() and option(flags, "all", "-ngl", "--gpu-layers") != "0"
    return sys.platform == "darwin" or not is_offloaded


async def weigh(server: Server, contender: Contender, load: Load, tokens: Tokens) -> Memory:
    """What a server has now. Its RAM tier is known of llamaslot alone: others are to be started without."""
    n_cells = load.n_ctx if pool_on_host(load.more) else 0
    types = (option(load.more, "f16", *names) for names in _TYPES)
    tier, n_seqs = 0, load.n_slots if contender.is_peer else None
    if contender.kind == "llamaslot":
        cache = await server.client.get("/cache")
        tier, n_seqs = cache["ram"]["used_bytes"], cache["sequences"]["total"]
    return Memory(
        resident=resident(server.pid, load.model),
        pool=pool_bytes(tokens.number, n_cells, *types),
        tier=tier,
        n_seqs=n_seqs,
    )


def option(flags: Sequence[str], default: str, *names: str) -> str:
    """The word behind the last of these names among the flags."""
    found = [flags[i + 1] for i in range(len(flags) - 1) if flags[i] in names]
    return found[-1] if found else default


def _bytes(n_elements: int, kind: str) -> int:
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return int(n_elements // elements * size)


def _footprint(pid: int) -> int:
    usage = (ctypes.c_uint64 * 12)()  # struct rusage_info_v0: a UUID of 16 bytes, then ten counters
    if ctypes.CDLL(None).proc_pid_rusage(pid, 0, usage) != 0:
        raise BenchmarkError(f"macOS does not say how much memory the process {pid} has")
    return int(usage[2 + 7])
