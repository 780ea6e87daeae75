"""Capabilities of a model and its context, read from llama.cpp before anything is computed.

They come from llama.cpp's predicates, the file's metadata, and llama.cpp's log about the caches that it creates.
They never come from the result of `seq_rm`, which claims success on sliding-window models, and leaves wrong logits
(fact 11).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import llama_cpp

from llamaslot.backend.llama import library
from llamaslot.base import files
from llamaslot.base.files import MetadataValue
from llamaslot.base.model import Capabilities, StateKind

_OWN_CACHES = frozenset({"deepseek32", "deepseek4", "dots3note", "glm-dsa", "glm5-next", "minimax-m3", "qwen4exp"})
"""Architectures for which llama.cpp's `create_memory` always creates a cache class of their own (fact 11).

For HY V4 it does so only if the file has an indexer, so that is recognized by its metadata.
"""
_GO_BACK, _GO_BACK_ON_CPU = frozenset({"lfm2", "lfm2moe"}), frozenset({"qwen35", "qwen35moe"})
"""Architectures whose recurrent states can go back."""
_COMMON_CACHES = (
    *("llama_kv_cache", "llama_kv_cache_iswa", "llama_memory_recurrent", "llama_memory_hybrid"),
    "llama_memory_hybrid_iswa",
)
"""Memory classes whose trimming and copying of sequences is covered by tests."""
_MROPE = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
"""Types of RoPE with positions of several dimensions."""
_LOGGED_CLASS = re.compile(r"(llama_(?:kv_cache|memory)\w*|operator\(\)): ")
_LOGGED_SIZE = re.compile(r"llama_kv_cache: size = .*\( *(\d+) cells, *(\d+) layers")


@dataclass(frozen=True, slots=True)
class Caches:
    """Caches that llama.cpp created for a context, according to its log."""

    n_layers: int = 0
    """Layers that keep KV of every token."""
    n_window_layers: int = 0
    n_window_cells: int = 0
    unknown: str = ""
    """Name of a class that is not in `_COMMON_CACHES`, or of an indexer's cache; empty if there is none."""


_NO_CACHES = Caches()


def why_not_served(model: Any, *, embeds: bool = False) -> str:
    """Return the reason why this model cannot generate text token by token, or embed texts; empty if it can."""
    architecture = library.metadata(model, "general.architecture")
    if reason := files.why_not_served(architecture, is_causal=_is_causal(model), embeds=embeds):
        return reason
    # For architectures that a later llama.cpp may add.
    if llama_cpp.llama_model_is_diffusion(model) or llama_cpp.llama_model_has_encoder(model):
        return f"is not a decoder alone ({architecture}); only models that generate token by token are served"
    return ""


def attends_later(model: Any, overrides: Mapping[str, MetadataValue]) -> bool:
    """Return True if tokens attend to those after them too, so that KV of a prefix is worth nothing.

    `overrides` are in place of the file's metadata (`--override-kv`).
    """
    architecture = library.metadata(model, "general.architecture")
    is_causal = bool(overrides.get(f"{architecture}.attention.causal", _is_causal(model)))
    return architecture in files.ENCODERS or not is_causal


def _is_causal(model: Any) -> bool:
    architecture = library.metadata(model, "general.architecture")
    return library.metadata(model, f"{architecture}.attention.causal") != "false"


def kind_of(model: Any) -> StateKind:
    """Return the kind of partial state, by llama.cpp's predicates."""
    has_window = llama_cpp.llama_model_n_swa(model) > 0
    if llama_cpp.llama_model_is_recurrent(model):
        return StateKind.RECURRENT
    if llama_cpp.llama_model_is_hybrid(model):
        return StateKind.HYBRID_WINDOW if has_window else StateKind.HYBRID
    return StateKind.WINDOW if has_window else StateKind.NONE


def has_own_cache(model: Any) -> bool:
    """Return True if llama.cpp has a cache class just for this model's architecture."""
    architecture = library.metadata(model, "general.architecture")
    return architecture in _OWN_CACHES or library.number(model, "attention.indexer.top_k") > 0


def has_partial_state(model: Any, caches: Caches = _NO_CACHES) -> bool:
    """Return True if this model has a partial state that llama.cpp can save and load separately.

    `caches` are those of its context, if there is one already.
    """
    return kind_of(model) is not StateKind.NONE and not has_own_cache(model) and not caches.unknown


def can_go_back(model: Any, *, on_gpu: bool) -> bool:
    """Return True if recurrent states of this model can go back by the last tokens of a step (fact 44).

    Those of other architectures can, too, but no test has a model of them. Qwen3.5 copies all of its earlier states
    for each token, which takes no time on a CPU and was never measured on a GPU.
    """
    architecture = library.metadata(model, "general.architecture")
    is_known = architecture in _GO_BACK or (architecture in _GO_BACK_ON_CPU and not on_gpu)
    return is_known and kind_of(model) is StateKind.HYBRID and has_partial_state(model)


def why_not_reusable(model: Any, caches: Caches = _NO_CACHES) -> str:
    """Return the reason why sequences of this model cannot be truncated and continued; empty if they can.

    `caches` are those of its context, if there is one already. A cache class that no test covers is a reason too.
    """
    if has_own_cache(model):
        architecture = library.metadata(model, "general.architecture")
        return f"{architecture} model: reuse of its own kind of cache in llama.cpp is untested"
    match kind_of(model):
        case StateKind.RECURRENT:
            return "recurrent model: its state cannot be cut back"
        case StateKind.HYBRID | StateKind.HYBRID_WINDOW:
            return "hybrid model: its recurrent state cannot be cut back"
        case StateKind.WINDOW:
            n_swa = llama_cpp.llama_model_n_swa(model)
            return f"sliding-window model: it forgets what is more than {n_swa} tokens back"
        case StateKind.NONE:
            unknown = "layers with a sliding window of no size" if caches.n_window_layers else caches.unknown
            return f"reuse of this kind of cache in llama.cpp is untested: {unknown}" if unknown else ""


def read(model: Any, context: Any, caches: Caches) -> Capabilities:
    """Return the capabilities of a model in a context (`ModelInfo.state`). A context may have no memory."""
    memory = llama_cpp.llama_get_memory(context)
    return Capabilities(
        kind=kind_of(model) if memory else StateKind.NONE,
        can_trim=bool(memory) and not why_not_reusable(model, caches),
        can_shift=llama_cpp.llama_memory_can_shift(memory),
        has_own_cache=has_own_cache(model) or bool(caches.unknown),
        n_swa=llama_cpp.llama_model_n_swa(model) if memory else 0,
        n_window_cells=caches.n_window_cells,
        n_rollback=llama_cpp.llama_n_rs_seq(context),
        n_layers=llama_cpp.llama_model_n_layer(model),
        n_attention_layers=caches.n_layers,
        n_window_layers=caches.n_window_layers,
        has_mla=library.number(model, "attention.key_length_mla") > 0,
        has_mrope=llama_cpp.llama_model_rope_type(model) in _MROPE,
    )


def caches_from_log(lines: Iterable[str]) -> Caches:
    """Return the caches of a context from the lines that llama.cpp logged while creating it.

    A cache logs its size when it is created; one that consists of several caches logs the name of each first.
    Layers of an unknown class are not counted, because the log does not say what they keep.
    """
    n_layers = n_window_layers = n_window_cells = 0
    is_window = False
    unknown = ""
    for line in lines:
        found = _LOGGED_CLASS.match(line)
        if found and found[1] not in _COMMON_CACHES and "creating" in line:
            unknown = unknown or ("a cache with an indexer" if "indexer" in line else found[1])
        elif found and "SWA KV cache" in line:
            is_window = "non-SWA" not in line
        elif size := _LOGGED_SIZE.match(line):
            if is_window:
                n_window_layers, n_window_cells = int(size[2]), int(size[1])
            else:
                n_layers = int(size[2])
    if unknown:
        return Caches(unknown=unknown)
    return Caches(n_layers, n_window_layers, n_window_cells)
