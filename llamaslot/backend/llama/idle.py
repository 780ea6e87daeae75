"""What idle prefixes cost on this machine: prefill beside cells that others hold, measured.

Attention scans the pool up to its highest used cell. Computing as many idle tokens as the measurement wants would
take long on a slow machine, but what they say does not matter: one short sequence is saved, and loaded again and
again behind what another sequence holds already. That one has each position many times then; it is never decoded
and is cleared at the end, like all else.
"""

from __future__ import annotations

import ctypes
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

from llamaslot.base.model import IdleCost
from llamaslot.core.backend import Backend, Remove, Run

MOST = 8192
"""Idle cells to measure beside."""
LEAST = 2048
"""Fewer say little, and cost little."""

_SAVED = 64
"""Tokens of the sequence that is loaded again and again."""
_PROBE = 16
"""Tokens computed first to see how many more will take `_SECONDS`."""
_SECONDS = 0.25
_REPEATS = 4


def measure(backend: Backend, context: Any) -> IdleCost | None:
    """The cost on a backend with this context, empty before and after; None where it cannot be told or is small."""
    info = backend.info
    n_idle = min(info.n_ctx - info.n_ubatch, MOST) // _SAVED * _SAVED
    if not (info.unified and info.reuse) or backend.n_seqs < 2 or info.n_ubatch < _SAVED or n_idle < LEAST:
        return None
    n_tokens = round(_PROBE * _SECONDS / _prefill(backend, context, _PROBE))
    n_tokens = min(max(n_tokens, _PROBE), info.n_ubatch)
    alone = min(_prefill(backend, context, n_tokens) for _ in range(_REPEATS))
    memory = llama_cpp.llama_get_memory(context)
    saved = _saved(backend, context)
    n_loaded = 0
    while n_loaded < n_idle and llama_cpp.llama_state_seq_set_data(context, saved, len(saved), 0):
        llama_cpp.llama_memory_seq_cp(memory, 0, 1, -1, -1)
        n_loaded += _SAVED
    backend.change(Remove(0, 0))
    beside = min(_prefill(backend, context, n_tokens) for _ in range(_REPEATS)) if n_loaded == n_idle else None
    llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
    return IdleCost(n_idle, max(beside / alone, 1.0)) if beside is not None else None


def _prefill(backend: Backend, context: Any, n_tokens: int) -> float:
    """Seconds in which sequence 0 computes so many tokens, which it then forgets."""
    started = perf_counter()
    _compute(backend, n_tokens)
    llama_cpp.llama_synchronize(context)
    seconds = perf_counter() - started
    backend.change(Remove(0, 0))
    return seconds


def _saved(backend: Backend, context: Any) -> Any:
    """The state of `_SAVED` tokens, which sequence 0 still holds."""
    _compute(backend, _SAVED)
    state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(context, 0))()
    llama_cpp.llama_state_seq_get_data(context, state, len(state), 0)
    return state


def _compute(backend: Backend, n_tokens: int) -> None:
    tokens = np.arange(n_tokens, dtype=np.int32) % backend.info.n_vocab
    backend.decode([Run(seq=0, start=0, tokens=tokens, output=True)])
