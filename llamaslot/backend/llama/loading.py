"""Loading a GGUF file and making its context, with every failure turned into one line for the terminal."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp

from llamaslot.backend.llama import library
from llamaslot.backend.llama.settings import CACHE_TYPES, MAX_SEQS, LlamaSettings
from llamaslot.base.errors import ConfigError

_FLASH_ATTN = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


class LoadingStopped(Exception):  # noqa: N818 - nothing went wrong
    """Loading was given up because it was asked to."""


def load_model(settings: LlamaSettings, on_progress: Callable[[float], bool]) -> Any:
    """The model handle. Raises `ConfigError`, or `LoadingStopped` once `on_progress` has returned False.

    `on_progress` gets the share loaded, 0 to 1.
    """
    check_file(settings.model)
    stopped = False

    @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
    def progress(share: float, _user: Any) -> bool:
        nonlocal stopped
        stopped = not on_progress(share)
        return not stopped

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = settings.n_gpu_layers
    params.progress_callback = progress
    with library.watched() as (_lines, errors):
        model = llama_cpp.llama_model_load_from_file(os.fsencode(settings.model), params)
        if stopped:
            raise LoadingStopped
        if not model:
            reason = f"it is damaged, incomplete or of a kind that llama.cpp does not know ({_reason(errors)})"
            raise ConfigError(f"cannot load {settings.model}: {reason}", param="--model")
    if not llama_cpp.llama_model_has_decoder(model) or llama_cpp.llama_model_has_encoder(model):
        llama_cpp.llama_model_free(model)
        raise ConfigError(f"{settings.model} is not a text generation model", param="--model")
    if llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)) == 0:
        llama_cpp.llama_model_free(model)
        raise ConfigError(f"{settings.model} has no vocabulary", param="--model")
    return model


def check_file(path: Path) -> None:
    """Refuse what is not a readable GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ConfigError(f"there is no model file {path}", param="--model") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="--model") from None
    if magic != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file", param="--model")


def make_context(model: Any, settings: LlamaSettings, n_threads: int) -> tuple[Any, bool]:
    """A context for `n_slots` sequences, and whether flash attention is on. Raises `ConfigError`."""
    if not 1 <= settings.n_slots <= MAX_SEQS:
        raise ConfigError(f"--parallel must be between 1 and {MAX_SEQS}", param="--parallel")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = settings.n_ctx or llama_cpp.llama_model_n_ctx_train(model)
    params.n_batch = max(settings.n_batch, settings.n_ubatch)
    params.n_ubatch = settings.n_ubatch
    params.n_seq_max = settings.n_slots
    # A step asks for at most one row of logits a slot, and llama.cpp wants room for one a sequence.
    params.n_outputs_max = settings.n_slots
    params.n_threads = n_threads
    params.n_threads_batch = settings.n_threads_batch or n_threads
    params.flash_attn_type = _FLASH_ATTN[settings.flash_attn]
    params.kv_unified = settings.unified
    params.type_k = CACHE_TYPES[settings.cache_type_k]
    params.type_v = CACHE_TYPES[settings.cache_type_v]
    params.no_perf = True
    with library.watched() as (lines, errors):
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise ConfigError(
                f"cannot make a context of {params.n_ctx} tokens: {_reason(errors)}; try a smaller --ctx-size",
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
    return context, not disabled


def metadata(model: Any, key: str) -> str:
    """A value of the file's metadata, or empty."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, size)
        if n < 0:
            return ""
        if n < size:
            return buffer.value.decode(errors="replace")
        size = n + 1


def why_not_reusable(model: Any) -> str:
    """Why the KV of this model cannot be trimmed and continued, or empty where it can.

    Read from the model, never inferred from what `seq_rm` answers: on sliding-window models a trim claims success
    and leaves wrong logits behind.
    """
    if llama_cpp.llama_model_is_recurrent(model):
        return "recurrent model: its state cannot be cut back"
    if llama_cpp.llama_model_is_hybrid(model):
        return "hybrid model: its recurrent state cannot be cut back"
    window = llama_cpp.llama_model_n_swa(model)
    if window > 0:
        return f"sliding-window model: it forgets what is more than {window} tokens back"
    return ""


def _reason(errors: Any) -> str:
    return errors[0] if errors else "llama.cpp gave no reason"
