"""Settings of the llama backend, loading a GGUF file, creating its context.

Every failure becomes one line for the terminal (`ConfigError`).
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import llama_cpp

from llamaslot.backend.llama import capabilities, library
from llamaslot.backend.llama.capabilities import Caches
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import check_file

PADDING = 256
"""In llama.cpp the number of cells of a sequence's context is a multiple of this."""

MIN_PART = 512
"""Fewest cells of a slot with which a pool may be partitioned at run time."""
_MOST_CELLS = 2**31
_FLASH_ATTN = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_LOAD_MODES = {
    (True, False): llama_cpp.LLAMA_LOAD_MODE_AUTO,
    (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
    (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
}
"""llama.cpp's modes of loading weights, by whether they are mapped from the file and locked in memory."""
_INT32_MAX = 2**31 - 1
_SAMPLING_KEYS: dict[str, tuple[str, type[int] | type[float], float, float]] = {
    "temp": ("temperature", float, 0, 100),
    "top_k": ("top_k", int, 0, _INT32_MAX),
    "top_p": ("top_p", float, 0, 1),
    "min_p": ("min_p", float, 0, 1),
    "penalty_last_n": ("repeat_last_n", int, -1, _INT32_MAX),
    "penalty_repeat": ("repeat_penalty", float, 0.01, 100),
    "xtc_probability": ("xtc_probability", float, 0, 1),
    "xtc_threshold": ("xtc_threshold", float, 0, 1),
    "mirostat": ("mirostat", int, 0, 2),
    "mirostat_tau": ("mirostat_tau", float, 0, 100),
    "mirostat_eta": ("mirostat_eta", float, 0, 100),
}
"""Fields of `Sampling` with their types and bounds, by the keys of GGUF files after `general.sampling.`.

The order of the samplers (`sequence`) is not read.
"""


_MAX_SPARE_BYTES = 32 * 2**20
"""Most bytes of spare rows of logits: 55 rows of 151,936. Limited, because llama.cpp keeps the memory once it has
used it.
"""
CACHE_TYPES: dict[str, int] = {
    **{"f32": 0, "f16": 1, "bf16": 30},
    **{"q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20},
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
    backend_sampling: bool | None = None
    """Sample on the device where llama.cpp can; None for a GPU on which that is measured to be faster."""
    unified: bool = True
    """Layout at start: one pool for all sequences, or a part for each."""
    may_partition: bool = False
    """Allow a unified pool to be partitioned at run time, if the model allows it."""
    may_unload: bool = False
    """Allow the model to be unloaded and loaded again; its vocabulary is then loaded on its own."""
    swa_full: bool = False
    """Give layers with a sliding window as many cells as the others. Checkpoints are needed nevertheless."""
    checkpoints: bool = False
    """Take and restore checkpoints of partial states. Only in a unified pool."""
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    measure_costs: bool = False
    """Take `ModelInfo.kv_cost`, `step_cost` and `state_cost` from an earlier start, or leave them pending."""
    measure_at_load: bool = False
    """Measure them before the model is used: the pool may never be empty afterwards."""
    measurements: Path | None = None
    """Folder in which measurements are kept for the next start; None to keep none."""
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


class LoadingStopped(Exception):  # noqa: N818 - nothing went wrong
    """Loading was stopped on request."""


@dataclass(frozen=True, slots=True)
class Context:
    """A context of llama.cpp, and facts about it that only llama.cpp's log has."""

    handle: Any
    flash_attn: bool
    caches: Caches
    seconds: float
    """Time that creating it took."""


def load_model(settings: LlamaSettings, on_progress: Callable[[float], bool]) -> tuple[Any, int]:
    """Return the model handle, and how many bytes of the weights are mapped from the file.

    `on_progress` gets the fraction loaded. Raises `ConfigError`; `LoadingStopped` if `on_progress` returns False.
    """
    stopped = False

    @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
    def progress(share: float, _user: Any) -> bool:
        nonlocal stopped
        stopped = not on_progress(share)
        return not stopped

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = settings.n_gpu_layers
    params.progress_callback = progress
    params.load_mode = _LOAD_MODES[settings.use_mmap, settings.use_mlock]
    with library.watched() as (lines, errors):
        model = _loaded(settings.model, params)
        if stopped:
            raise LoadingStopped
        if not model:
            reason = f"it is damaged, incomplete or of a kind that llama.cpp does not know ({_reason(errors)})"
            raise ConfigError(f"cannot load {settings.model}: {reason}", param="--model")
        n_mapped = logged_bytes("_Mapped model buffer", lines)
    reason = capabilities.why_not_served(model)
    if not llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)):
        reason = reason or "has no vocabulary"
    if reason:
        llama_cpp.llama_model_free(model)
        raise ConfigError(f"{settings.model} {reason}", param="--model")
    return model, n_mapped


def load_vocab(path: Path) -> Any:
    """Load only the vocabulary of a model, without weights; raises `ConfigError`."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    with library.watched() as (_, errors):
        if model := _loaded(path, params):
            return model
        raise ConfigError(f"cannot load the vocabulary of {path}: {_reason(errors)}", param="--model")


def load_structure(path: Path) -> Any:
    """Load the structure of a model without its weights, to read its capabilities; raises `ConfigError`.

    Loading only the vocabulary would not suffice: llama.cpp then does not read the metadata from which they follow.
    """
    params = llama_cpp.llama_model_default_params()
    params.no_alloc = True
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    params.n_gpu_layers = 0
    with library.watched(quiet=True) as (_, errors):
        if model := _loaded(path, params):
            return model
        raise ConfigError(f"cannot load {path}: {_reason(errors)}", param="--model")


def _loaded(path: Path, params: Any) -> Any:
    check_file(path)
    library.initialise()
    return llama_cpp.llama_model_load_from_file(os.fsencode(path), params)


def kv_facts(model: Any, context: Any, settings: LlamaSettings, *, flash_attn: bool) -> str:
    """Return `ModelInfo.kv_facts`. A model with long RoPE chooses its factors by the size of the context."""
    facts = {
        "llama-cpp-python": llama_cpp.__version__,
        "types": f"{settings.cache_type_k}/{settings.cache_type_v}",
        "flash attention": flash_attn,
        "long positions": llama_cpp.llama_n_ctx_seq(context) > _long_rope_start(model),
    }
    return "; ".join(f"{name}: {value}" for name, value in facts.items())


def make_context(model: Any, settings: LlamaSettings, *, n_ctx: int, n_seqs: int, n_threads: int) -> Context:
    """Return a context for `n_seqs` sequences with `n_ctx` cells for the slots. Raises `ConfigError`."""
    params = context_params(settings, n_ctx=n_ctx, n_seqs=n_seqs, n_threads=n_threads)
    params.n_outputs_max += spare_rows(model, settings.n_ubatch)
    with library.watched() as (lines, errors):
        started = perf_counter()
        context = llama_cpp.llama_init_from_model(model, params)
        seconds = perf_counter() - started
        if not context:
            raise ConfigError(
                f"llama.cpp cannot create a KV pool of {params.n_ctx:,} cells, probably for lack of memory: "
                f"{_reason(errors)}; lower --ctx-size",
                param="--ctx-size",
            )
        n_ubatch = llama_cpp.llama_n_ubatch(context)
        if n_ubatch < settings.n_slots:
            llama_cpp.llama_free(context)
            raise ConfigError(
                f"a step of {n_ubatch} tokens is too small for {settings.n_slots} slots; "
                "raise --ctx-size, --batch-size and --ubatch-size, or lower --parallel",
                param="--parallel",
            )
        disabled = settings.flash_attn == "off" or any("Flash Attention not supported" in line for line in lines)
        caches = capabilities.caches_from_log(lines)
    return Context(context, not disabled, caches, seconds)


def part_cells(model: Any, context: Any, settings: LlamaSettings) -> int:
    """Return how many cells each slot would have if a unified pool were partitioned; 0 if they are too few.

    Also 0 if a token's KV would change, because RoPE factors depend on the size of the context (long RoPE).
    """
    n_ctx = llama_cpp.llama_n_ctx(context)
    part = n_ctx // settings.n_slots // PADDING * PADDING
    n_short = _long_rope_start(model)
    is_same = not _has_long_rope(model) or (part > n_short) == (n_ctx > n_short)
    return part if part >= MIN_PART and is_same else 0


def spare_rows(model: Any, n_ubatch: int) -> int:
    """Return `ModelInfo.n_spare_rows`."""
    n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return max(1, min(n_ubatch, _MAX_SPARE_BYTES // (4 * n_vocab)))


def context_params(settings: LlamaSettings, *, n_ctx: int, n_seqs: int, n_threads: int) -> Any:
    """Return llama.cpp's parameters for a context of `n_seqs` sequences with `n_ctx` cells for the slots."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx if settings.unified else in_parts(n_ctx, settings.n_slots, n_seqs)
    params.n_batch = max(settings.n_batch, settings.n_ubatch)
    params.n_ubatch = settings.n_ubatch
    params.n_seq_max = n_seqs
    # A step samples from at most one row of logits per slot, but llama.cpp requires one per sequence (fact 1).
    params.n_outputs_max = n_seqs
    params.n_threads = n_threads
    params.n_threads_batch = settings.n_threads_batch or n_threads
    params.flash_attn_type = _FLASH_ATTN[settings.flash_attn]
    params.kv_unified = settings.unified
    # The library's default is True, which gives layers with a sliding window as many cells as the others (fact 23).
    params.swa_full = settings.swa_full
    params.type_k = CACHE_TYPES[settings.cache_type_k]
    params.type_v = CACHE_TYPES[settings.cache_type_v]
    params.no_perf = True
    return params


def in_parts(n_ctx: int, n_slots: int, n_seqs: int) -> int:
    """Return the cells of `n_seqs` parts, each as large as if `n_ctx` were divided among the slots alone."""
    part = padded(padded(n_ctx) // n_slots)
    if part * n_seqs > _MOST_CELLS:
        raise ConfigError(
            f"{n_seqs} sequences of {part} cells each are more than llama.cpp can count; "
            "lower --ctx-size or --cache-seqs",
            param="--ctx-size",
        )
    return part * n_seqs


def padded(n_cells: int) -> int:
    """Round a number of cells up to a multiple of `PADDING`, as llama.cpp does."""
    return -(-n_cells // PADDING) * PADDING


def logged_bytes(what: str, lines: Iterable[str]) -> int:
    """Return the sum of the sizes that llama.cpp logged for buffers of a kind, each exact to 0.01 MiB."""
    pattern = re.compile(re.escape(what) + r" size = +([\d.]+) MiB")
    return sum(round(float(found[1]) * 2**20) for line in lines if (found := pattern.search(line)))


def sampling_defaults(model: Any) -> dict[str, int | float]:
    """Return the fields of `Sampling` for which the model file recommends a value (`general.sampling.*`).

    Values outside the bounds of request fields are ignored, because llama.cpp would use them unchecked.
    """
    found: dict[str, int | float] = {}
    for key, (name, kind, low, high) in _SAMPLING_KEYS.items():
        text = library.metadata(model, f"general.sampling.{key}")
        try:
            value = kind(text) if text else math.nan
        except ValueError:
            value = math.nan
        if math.isfinite(value) and low <= value <= high:
            found[name] = value
    return found


def builtin_template(source: str) -> str:
    """Return the name of the built-in template that llama.cpp recognizes in a Jinja source; empty if none."""
    names = (ctypes.c_char_p * 256)()
    n = min(llama_cpp.llama_chat_builtin_templates(names, len(names)), len(names))
    prompt = _prompt_by_builtin(source.encode())
    fitting = (name for name in names[:n] if name and prompt and _prompt_by_builtin(name) == prompt)
    return next(fitting, b"").decode()


def _has_long_rope(model: Any) -> bool:
    """True if RoPE factors may depend on the size of the context. Files of MiniCPM3 do not say so."""
    architecture = library.metadata(model, "general.architecture")
    names = "type", "original_context_length"
    kind, n_short = (library.metadata(model, f"{architecture}.rope.scaling.{each}") for each in names)
    return kind == "longrope" or bool(n_short) or architecture == "minicpm3"


def _long_rope_start(model: Any) -> int:
    """Return the size of a sequence's context above which a model with long RoPE uses other factors."""
    architecture = library.metadata(model, "general.architecture")
    n_short = library.metadata(model, f"{architecture}.rope.scaling.original_context_length")
    return int(n_short) if n_short.isdecimal() else int(llama_cpp.llama_model_n_ctx_train(model))


def _prompt_by_builtin(template: bytes) -> bytes:
    """Render a conversation for which all built-in templates differ, by a template's name or Jinja source."""
    roles = (b"system", b"user", b"assistant", b"user")
    chat = (llama_cpp.llama_chat_message * len(roles))(*((role, b" " + role + b" ") for role in roles))
    buffer = ctypes.create_string_buffer(4096)
    n = llama_cpp.llama_chat_apply_template(template, chat, len(roles), True, buffer, len(buffer))
    return buffer.raw[: max(n, 0)]


def _reason(errors: Any) -> str:
    return errors[0] if errors else "llama.cpp gave no reason"
