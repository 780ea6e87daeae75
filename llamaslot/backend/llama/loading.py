"""Settings of the llama backend, loading a GGUF file, creating its context.

Every failure becomes one line for the terminal (`ConfigError`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import llama_cpp
import structlog

from llamaslot.backend.llama import capabilities, library
from llamaslot.backend.llama.capabilities import Caches
from llamaslot.backend.llama.library import Device
from llamaslot.base.adapters import MAX_INVOCATION
from llamaslot.base.errors import ConfigError
from llamaslot.base.files import MetadataValue, check_file, has_tensor, open_regular, read_adapter
from llamaslot.base.model import QUERY_BLOCK, Adapter, ModelFile, Pooling

_log = structlog.get_logger(__name__)

PADDING = 256
"""In llama.cpp the number of cells of a sequence's context is a multiple of this."""

MIN_PART = 512
"""Fewest cells of a slot with which a pool may be partitioned at run time."""
_MOST_CELLS = 2**31
_MAX_PIECE = 1024
"""Bytes of the longest text of a token of an invocation."""
FLASH_ATTN = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_LOAD_MODES = {
    "auto": llama_cpp.LLAMA_LOAD_MODE_AUTO,
    "none": llama_cpp.LLAMA_LOAD_MODE_NONE,
    "mmap": llama_cpp.LLAMA_LOAD_MODE_MMAP,
    "mlock": llama_cpp.LLAMA_LOAD_MODE_MLOCK,
    "mmap+mlock": llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    "dio": llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO,
}
_LAZY_MODES = {
    "auto": llama_cpp.LLAMA_LAZY_MODE_AUTO,
    "on": llama_cpp.LLAMA_LAZY_MODE_ON,
    "off": llama_cpp.LLAMA_LAZY_MODE_OFF,
}
_SPLIT_MODES = {
    "none": llama_cpp.LLAMA_SPLIT_MODE_NONE,
    "layer": llama_cpp.LLAMA_SPLIT_MODE_LAYER,
    "row": llama_cpp.LLAMA_SPLIT_MODE_ROW,
}
_ROPE_SCALING = {
    "auto": llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    "none": llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
}
_BAD_OVERRIDE = re.compile(r"Bad metadata override type for key '(.*)', expected (\w+) but got (\w+)")
_USED_OVERRIDE = re.compile(r"Using metadata override \( *\w+\) '(.*)' =")
_OF_ALL: frozenset[Pooling] = frozenset({"none", "mean", "cls"})
"""Poolings of a micro-batch's tokens, so of whole inputs only if these are in one (fact 40)."""
_POOLINGS: dict[int, Pooling] = {
    llama_cpp.LLAMA_POOLING_TYPE_NONE: "none",
    llama_cpp.LLAMA_POOLING_TYPE_MEAN: "mean",
    llama_cpp.LLAMA_POOLING_TYPE_CLS: "cls",
    llama_cpp.LLAMA_POOLING_TYPE_LAST: "last",
    llama_cpp.LLAMA_POOLING_TYPE_RANK: "rank",
}
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


class _BufferOverride(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("kind", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions are encoded; the defaults stand for the model's own."""

    scaling: Literal["auto", "none", "linear", "yarn"] = "auto"
    freq_base: float = 0.0
    freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_beta_fast: float = -1.0


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Settings for loading a model; 0 means llama.cpp's or the model's own choice."""

    model: Path
    n_ctx: int = 0
    """Cells of the KV pool; 0 for as many as fit into memory (`sizing.py`)."""
    max_bytes: int = 0
    """Without `n_ctx`: bytes that weights and pool may take; 0 for as many as there are."""
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
    devices: tuple[str, ...] | None = None
    """Names of the GPUs to use; None for all."""
    split_mode: str = "layer"
    """How several GPUs share the model, by llama-server's names (`_SPLIT_MODES`)."""
    tensor_split: tuple[float, ...] = ()
    """Share of the model for each GPU; none for llama.cpp's choice, by free memory."""
    main_gpu: int = 0
    """GPU of the whole model (`none`), or of its KV (`row`), among those to use."""
    kv_offload: bool = True
    op_offload: bool = True
    tensor_overrides: tuple[tuple[str, str], ...] = ()
    """Regular expressions for names of tensors with the buffer type that these get; the first match counts."""
    load_mode: str = "auto"
    """How weights are loaded, by llama-server's names (`_LOAD_MODES`)."""
    lazy_mode: Literal["auto", "on", "off"] = "auto"
    check_tensors: bool = False
    repack: bool = True
    no_host: bool = False
    numa: Literal["off", "distribute", "isolate", "numactl"] = "off"
    overrides: tuple[tuple[str, MetadataValue], ...] = ()
    """Keys and values in place of those of the model file's metadata."""
    adapters: tuple[tuple[Path, float], ...] = ()
    """Files of LoRA adapters, each with its scale at start."""
    mmproj: Path | None = None
    """File of the projector of images; None if prompts are text."""
    mmproj_is_optional: bool = False
    """If it cannot be used, log that, and serve text alone."""
    mmproj_offload: bool = True
    """Compute it on a GPU, if there is one."""
    image_min_tokens: int = 0
    image_max_tokens: int = 0
    """Fewest and most tokens of an image, for models that take images of any size; 0 for the file's numbers."""
    rope: Rope = Rope()
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
    max_draft: int = 0
    """Most tokens of a draft; 0 if nothing is drafted."""
    n_rollback: int = 0
    """Earlier recurrent states of each sequence that are kept for drafts. Chosen by `sizing.choose`."""
    context_shift: bool = False
    """Test at load if tokens can be moved."""
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    measure_costs: bool = False
    """Take `ModelInfo.kv_cost`, `step_cost` and `state_cost` from an earlier start, or leave them pending."""
    measure_at_load: bool = False
    """Measure them before the model is used: the pool may never be empty afterwards."""
    measurements: Path | None = None
    """Folder in which measurements are kept for the next start; None to keep none."""
    embeds: bool = False
    """Compute vectors or scores of prompts instead of text."""
    pooling: Pooling | None = None
    """Pooling of vectors; None for that of the model's file (`for_vectors`)."""
    why_whole: str = ""
    """Why inputs must be computed whole (`ModelInfo.embeds_whole`); empty if not. Set by `for_vectors`."""
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

    library.initialise()
    library.use_numa(settings.numa)
    params = model_params(settings)
    params.progress_callback = progress
    with library.watched() as (lines, errors):
        model = _loaded(settings.model, params)
        if stopped:
            raise LoadingStopped
        if not model:
            reason = f"it is damaged, incomplete or of a kind that llama.cpp does not know ({reason_of(errors)})"
            raise ConfigError(f"cannot load {settings.model}: {reason}", param="--model")
        n_mapped = logged_bytes("_Mapped model buffer", lines)
        reason = _check_overrides(settings, lines)
    if reason:
        llama_cpp.llama_model_free(model)
        raise ConfigError(f"--override-kv: {reason}", param="--override-kv")
    reason = capabilities.why_not_served(model, embeds=settings.embeds)
    if not llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)):
        reason = reason or "has no vocabulary"
    if reason:
        llama_cpp.llama_model_free(model)
        raise ConfigError(f"{settings.model} {reason}", param="--model")
    return model, n_mapped


def load_adapters(model: Any, settings: LlamaSettings) -> tuple[list[Any], tuple[Adapter, ...]]:
    """Return the handles of the adapters, which are freed with the model, and facts about them by the same ids.

    Raises `ConfigError`.
    """
    handles, found = [], []
    for path, scale in settings.adapters:
        before = ModelFile.of(path)
        texts = read_adapter(path, settings.model)
        try:
            with open_regular(path) as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise ConfigError(f"--lora: cannot read {path}: {error.strerror}", param="--lora") from None
        with library.watched() as (_, errors):
            handle = llama_cpp.llama_adapter_lora_init(model, os.fsencode(path))
            if not handle:
                raise ConfigError(f"--lora: cannot load {path}: {reason_of(errors)}", param="--lora")
        if ModelFile.of(path) != before:
            raise ConfigError(f"--lora: {path} was changed while it was loaded", param="--lora")
        handles.append(handle)
        name, prefix = (texts.get(f"adapter.lora.{key}", "") for key in ("task_name", "prompt_prefix"))
        found.append(Adapter(str(path), digest, scale, name, prefix, *_invocation(model, handle, path)))
    return handles, tuple(found)


def _invocation(model: Any, adapter: Any, path: Path) -> tuple[tuple[int, ...], str]:
    """Return the invocation of an adapter and its text; both are empty for one that is always active."""
    n = llama_cpp.llama_adapter_get_alora_n_invocation_tokens(adapter)
    if n > MAX_INVOCATION:
        reason = f"has an invocation of {n} tokens, which may have {MAX_INVOCATION}"
        raise ConfigError(f"--lora: {path} {reason}", param="--lora")
    if not n:
        return (), ""
    tokens = tuple(llama_cpp.llama_adapter_get_alora_invocation_tokens(adapter)[:n])
    vocab = llama_cpp.llama_model_get_vocab(model)
    if not all(0 <= token < llama_cpp.llama_vocab_n_tokens(vocab) for token in tokens):
        reason = "has a token in its invocation that the model lacks"
        raise ConfigError(f"--lora: {path} {reason}", param="--lora")
    buffer = ctypes.create_string_buffer(_MAX_PIECE)
    lengths = (llama_cpp.llama_token_to_piece(vocab, token, buffer, _MAX_PIECE, 0, True) for token in tokens)
    return tokens, b"".join(buffer.raw[: max(n, 0)] for n in lengths).decode(errors="replace")


def model_params(settings: LlamaSettings) -> Any:
    """Return llama.cpp's parameters for a model. The arrays in them live as long. Raises `ConfigError`."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = settings.n_gpu_layers
    params.load_mode = _LOAD_MODES[settings.load_mode]
    params.lazy_mode = _LAZY_MODES[settings.lazy_mode]
    params.check_tensors = settings.check_tensors
    params.use_extra_bufts = settings.repack
    params.no_host = settings.no_host
    params.split_mode = _SPLIT_MODES[settings.split_mode]
    params.main_gpu = settings.main_gpu
    found = _chosen_gpus(settings)
    _check_gpu_flags(settings, found)
    kept: list[Any] = []
    if settings.devices is not None:
        handles = (ctypes.c_void_p * (len(found) + 1))(*(gpu.handle for gpu in found), None)
        params.devices = _address(handles, kept)
    if settings.tensor_split and found:
        # llama.cpp reads a share for as many GPUs as it could have.
        params.tensor_split = (ctypes.c_float * llama_cpp.llama_max_devices())(*settings.tensor_split)
    if settings.tensor_overrides:
        params.tensor_buft_overrides = _address(_buffer_overrides(settings), kept)
    params.kv_overrides = _metadata_overrides(settings.overrides)
    params.kept = kept
    return params


def _check_gpu_flags(settings: LlamaSettings, found: Sequence[Device]) -> None:
    """Raise `ConfigError` for a number that no GPU has; without GPUs, say that flags for several have no effect."""
    names, n = ", ".join(gpu.name for gpu in found), len(found)
    given = {
        "--split-mode": settings.split_mode != "layer",
        "--tensor-split": bool(settings.tensor_split),
        "--main-gpu": settings.main_gpu != 0,
    }
    if not found and (unused := [flag for flag, is_given in given.items() if is_given]):
        _log.info("flag.without_effect", flag=", ".join(unused), reason="no GPU is used")
    if found and settings.main_gpu >= n:
        message = f"--main-gpu {settings.main_gpu}: the GPUs have the numbers 0 to {n - 1} ({names})"
        raise ConfigError(message, param="--main-gpu")
    if found and len(settings.tensor_split) > n:
        message = f"--tensor-split has {len(settings.tensor_split)} shares for {n} GPUs ({names})"
        raise ConfigError(message, param="--tensor-split")


def _address(array: Any, kept: list[Any]) -> int:
    """Return the address of an array, which stays valid while `kept` exists."""
    kept.append(array)
    return ctypes.addressof(array)


def _buffer_overrides(settings: LlamaSettings) -> Any:
    kinds = library.buffer_types()
    unknown = next((kind for _, kind in settings.tensor_overrides if kind not in kinds), None)
    if unknown is not None:
        known = ", ".join(kinds)
        raise ConfigError(
            f"--override-tensor: there is no memory {unknown}; use {known}", param="--override-tensor"
        )
    array = (_BufferOverride * (len(settings.tensor_overrides) + 1))()
    for row, (pattern, kind) in zip(array, settings.tensor_overrides, strict=False):
        row.pattern, row.kind = os.fsencode(pattern), kinds[kind]
    return array


def _metadata_overrides(overrides: Sequence[tuple[str, MetadataValue]]) -> Any:
    """Return llama.cpp's array of overrides, which an empty key ends; None for none."""
    if not overrides:
        return None
    array = (llama_cpp.llama_model_kv_override * (len(overrides) + 1))()
    for row, (key, value) in zip(array, overrides, strict=False):
        row.key = os.fsencode(key)
        match value:
            case bool():
                row.tag, row.value.val_bool = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
            case int():
                row.tag, row.value.val_i64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, value
            case float():
                row.tag, row.value.val_f64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
            case str():
                row.tag, row.value.val_str = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR, os.fsencode(value)
    return array


def _check_overrides(settings: LlamaSettings, lines: Iterable[str]) -> str:
    """Return which override has another type than its key; warn of keys that llama.cpp never read (fact 39)."""
    used = set()
    for line in lines:
        if found := _BAD_OVERRIDE.search(line):
            return f"{found[1]} has the type {found[2]}, not {found[3]}"
        if found := _USED_OVERRIDE.search(line):
            used.add(found[1])
    for key, _ in settings.overrides:
        if key not in used:
            _log.warning("override_kv.unused", key=key, reason="llama.cpp reads no such key of this model")
    return ""


def _chosen_gpus(settings: LlamaSettings) -> list[Device]:
    """Return the GPUs that llama.cpp is given; raises `ConfigError` for an unknown one of `--device`."""
    if settings.devices is None:
        return library.gpus()
    known = {each.name: each for each in library.devices() if each.kind in (library.GPU, library.INTEGRATED_GPU)}
    for name in settings.devices:
        if name not in known:
            here = f"there are {', '.join(known)}" if known else "this machine, or llama.cpp's build, has none"
            raise ConfigError(f"--device: there is no GPU {name}; {here}", param="--device")
        if settings.devices.count(name) > 1:
            raise ConfigError(f"--device: {name} is there twice", param="--device")
    return [known[name] for name in settings.devices]


def gpus(settings: LlamaSettings) -> list[Device]:
    """Return the GPUs that have a part of the model; raises `ConfigError`."""
    if not settings.n_gpu_layers:
        return []
    found = _chosen_gpus(settings)
    return found[settings.main_gpu : settings.main_gpu + 1] if settings.split_mode == "none" else found


def load_vocab(path: Path, overrides: Sequence[tuple[str, MetadataValue]] = ()) -> Any:
    """Load only the vocabulary of a model, without weights; raises `ConfigError`."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    params.kv_overrides = _metadata_overrides(overrides)
    with library.watched() as (_, errors):
        if model := _loaded(path, params):
            return model
        raise ConfigError(f"cannot load the vocabulary of {path}: {reason_of(errors)}", param="--model")


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
        raise ConfigError(f"cannot load {path}: {reason_of(errors)}", param="--model")


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
        "long positions": llama_cpp.llama_n_ctx_seq(context) > _long_rope_start(model, settings),
    }
    # Only if they are given, so that what was stored before stays valid.
    if settings.rope != Rope():
        facts["RoPE"] = settings.rope
    if settings.overrides:
        facts["overrides"] = sorted(settings.overrides)
    return "; ".join(f"{name}: {value}" for name, value in facts.items())


def make_context(model: Any, settings: LlamaSettings, *, n_ctx: int, n_seqs: int, n_threads: int) -> Context:
    """Return a context for `n_seqs` sequences with `n_ctx` cells for the slots. Raises `ConfigError`."""
    params = context_params(settings, n_ctx=n_ctx, n_seqs=n_seqs, n_threads=n_threads)
    params.n_outputs_max += spare_rows(model, settings, settings.n_ubatch)
    with library.watched() as (lines, errors):
        started = perf_counter()
        context = llama_cpp.llama_init_from_model(model, params)
        seconds = perf_counter() - started
        if not context:
            raise ConfigError(
                f"llama.cpp cannot create a KV pool of {params.n_ctx:,} cells, probably for lack of memory: "
                f"{reason_of(errors)}; lower --ctx-size",
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
        sees_all = not (llama_cpp.llama_get_memory(context) and llama_cpp.llama_get_causal_attn(context))
        if sees_all and not settings.why_whole:
            # A model of which only llama.cpp knows it: computed in parts, its results would be wrong.
            llama_cpp.llama_free(context)
            raise ConfigError(f"the tokens of {settings.model} attend to later ones", param="--model")
        disabled = settings.flash_attn == "off" or any("Flash Attention not supported" in line for line in lines)
        caches = capabilities.caches_from_log(lines)
    return Context(context, not disabled, caches, seconds)


def part_cells(model: Any, context: Any, settings: LlamaSettings) -> int:
    """Return how many cells each slot would have if a unified pool were partitioned; 0 if they are too few.

    Also 0 if a token's KV would change, because RoPE factors depend on the size of the context (long RoPE).
    """
    n_ctx = llama_cpp.llama_n_ctx(context)
    part = n_ctx // settings.n_slots // PADDING * PADDING
    n_short = _long_rope_start(model, settings)
    # Other settings of RoPE change what llama.cpp says of the training context.
    is_known = settings.rope == Rope() and (part > n_short) == (n_ctx > n_short)
    is_same = is_known or not _has_long_rope(model, settings)
    return part if part >= MIN_PART and is_same else 0


def spare_rows(model: Any, settings: LlamaSettings, n_ubatch: int) -> int:
    """Return `ModelInfo.n_spare_rows`; with vectors so many that a step of more tokens has two query blocks."""
    if settings.why_whole:
        return n_ubatch
    n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return max(2 * QUERY_BLOCK if settings.embeds else 1, min(n_ubatch, _MAX_SPARE_BYTES // (4 * n_vocab)))


def for_vectors(model: Any, settings: LlamaSettings) -> LlamaSettings:
    """Return the settings with the pooling that the model's file asks for, unless they have one.

    If inputs are computed whole, the pool has as many cells as a step has tokens: so only inputs that fit into one
    step together are admitted. Raises `ConfigError` for a model without such vectors or scores.
    """
    if not settings.embeds:
        return settings
    name = settings.model.name
    key = f"{library.metadata(model, 'general.architecture')}.pooling_type"
    # A file that says nothing of it has `none`; an override is not in the metadata (fact 39).
    of_file = str(dict(settings.overrides).get(key, library.number(model, "pooling_type")))
    pooling = settings.pooling or next((each for n, each in _POOLINGS.items() if str(n) == of_file), None)
    if pooling is None:
        raise ConfigError(f"{name} asks for a pooling that is not known: give --pooling", param="--pooling")
    settings = replace(settings, pooling=pooling)
    if pooling == "rank" and not _has_head(model, settings):
        raise ConfigError(f"{name} cannot rerank: it has no classification head", param="--pooling")
    if capabilities.attends_later(model, dict(settings.overrides)):
        why = "its tokens attend to later ones too"
    elif pooling in _OF_ALL:
        why = f"with the pooling {pooling}, a vector is of all tokens of an input"
    else:
        return settings
    if capabilities.kind_of(model).has_recurrent_state:
        # llama.cpp may split a step into micro-batches, and then pools those of an input one by one.
        reason = f"the pooling {pooling} is not supported with recurrent states, which {name} has"
        raise ConfigError(f"{reason}: give --pooling last", param="--pooling")
    n_ctx = padded(settings.n_ubatch)
    return replace(settings, why_whole=why, n_ctx=n_ctx, checkpoints=False, n_cache_seqs=None)


def _has_head(model: Any, settings: LlamaSettings) -> bool:
    """True if the model has a head for scores; without one llama.cpp would read them from hidden states."""
    # Jina's rerankers have one layer where others have two, and the last one of those.
    is_jina = library.metadata(model, "general.architecture") == "jina-bert-v2"
    found = has_tensor(settings.model, "cls." if is_jina else "cls.output", dict(settings.overrides))
    return found and llama_cpp.llama_model_n_cls_out(model) > 0


def context_params(settings: LlamaSettings, *, n_ctx: int, n_seqs: int, n_threads: int) -> Any:
    """Return llama.cpp's parameters for a context of `n_seqs` sequences with `n_ctx` cells for the slots."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx if settings.unified else in_parts(n_ctx, settings.n_slots, n_seqs)
    params.n_batch = max(settings.n_batch, settings.n_ubatch)
    params.n_ubatch = settings.n_ubatch
    params.n_seq_max = n_seqs
    # llama.cpp takes 0 instead for models without recurrent states, and for those that cannot go back.
    params.n_rs_seq = settings.n_rollback
    # A step samples from at most one row of logits per slot, but llama.cpp requires one per sequence (fact 1).
    params.n_outputs_max = n_seqs
    params.n_threads = n_threads
    params.n_threads_batch = settings.n_threads_batch or n_threads
    params.flash_attn_type = FLASH_ATTN[settings.flash_attn]
    params.kv_unified = settings.unified
    # The library's default is True, which gives layers with a sliding window as many cells as the others (fact 23).
    params.swa_full = settings.swa_full
    params.type_k = CACHE_TYPES[settings.cache_type_k]
    params.type_v = CACHE_TYPES[settings.cache_type_v]
    params.offload_kqv = settings.kv_offload
    params.op_offload = settings.op_offload
    rope = settings.rope
    params.rope_scaling_type = _ROPE_SCALING[rope.scaling]
    params.rope_freq_base, params.rope_freq_scale = rope.freq_base, rope.freq_scale
    params.yarn_orig_ctx = rope.yarn_orig_ctx
    params.yarn_ext_factor, params.yarn_attn_factor = rope.yarn_ext_factor, rope.yarn_attn_factor
    params.yarn_beta_slow, params.yarn_beta_fast = rope.yarn_beta_slow, rope.yarn_beta_fast
    params.no_perf = True
    if settings.pooling is not None:
        params.pooling_type = next(number for number, name in _POOLINGS.items() if name == settings.pooling)
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


def _has_long_rope(model: Any, settings: LlamaSettings) -> bool:
    """True if RoPE factors may depend on the size of the context. Files of MiniCPM3 do not say so."""
    architecture = library.metadata(model, "general.architecture")
    names = "type", "original_context_length"
    kind, n_short = (_scaling(model, settings, each) for each in names)
    return kind == "longrope" or bool(n_short) or architecture == "minicpm3"


def _scaling(model: Any, settings: LlamaSettings, name: str) -> str:
    """Return a value of the model's metadata on RoPE, unless it is overridden (fact 39); empty if it is missing."""
    key = f"{library.metadata(model, 'general.architecture')}.rope.scaling.{name}"
    return str(dict(settings.overrides).get(key, library.metadata(model, key)))


def _long_rope_start(model: Any, settings: LlamaSettings) -> int:
    """Return the size of a sequence's context above which a model with long RoPE uses other factors."""
    n_short = _scaling(model, settings, "original_context_length")
    return int(n_short) if n_short.isdecimal() else int(llama_cpp.llama_model_n_ctx_train(model))


def reason_of(errors: Any) -> str:
    """Return the first error that llama.cpp logged while it was watched."""
    return errors[0] if errors else "llama.cpp gave no reason"
