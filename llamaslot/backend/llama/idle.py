"""What idle prefixes cost on this machine: prefill beside cells that others hold, measured.

Attention scans the pool up to its highest used cell. Computing as many idle tokens as the measurement wants would
take long on a slow machine, but what they say does not matter: one short sequence is saved, and loaded again and
again behind what another sequence holds already. That one has each position many times then; it is never decoded
and is cleared at the end, like all else.
"""

from __future__ import annotations

import ctypes
import statistics
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

from llamaslot.base.errors import ConfigError
from llamaslot.base.model import IdleCost
from llamaslot.core.backend import Backend, Remove, Run, Status

MOST = 8192
"""Idle cells to measure beside."""
LEAST = 2048
"""Fewer say little, and cost little."""

_SAVED = 64
"""Tokens of the sequence that is loaded again and again."""
_PROBE = 16
"""Tokens computed first to see how many will take `_SECONDS`: the least that says something."""
_SECONDS = 0.2
_PAIRS = 5


def measure(backend: Backend, context: Any) -> IdleCost | None:
    """The cost on a backend with this context, empty before and after; takes about two seconds.

    None where cells are not shared, the pool has less than `LEAST` to spare, or the model is too slow to measure.
    Without flash attention it takes too long as well, and nobody who cares for speed goes without.
    """
    info = backend.info
    n_idle = min(info.n_ctx - info.n_ubatch, MOST) // _SAVED * _SAVED
    is_shared = info.unified and info.reuse and backend.n_seqs > 1
    if not (is_shared and info.flash_attn) or info.n_ubatch < _SAVED or n_idle < LEAST:
        return None
    _prefill(backend, context, _PROBE)
    n_tokens = min(round(_PROBE * _SECONDS / _prefill(backend, context, _PROBE)), info.n_ubatch)
    if n_tokens < _PROBE:
        return None
    ratios = []
    for _ in range(_PAIRS):
        alone = _prefill(backend, context, n_tokens)
        is_full = _fill(backend, context, n_idle)
        beside = _prefill(backend, context, n_tokens)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 1, -1, -1)
        if not is_full:
            return None
        ratios.append(beside / alone)
    return IdleCost(n_idle, max(statistics.median(ratios), 1.0))


def _prefill(backend: Backend, context: Any, n_tokens: int) -> float:
    """Seconds in which sequence 0 computes so many tokens, which it then forgets."""
    started = perf_counter()
    _compute(backend, n_tokens)
    llama_cpp.llama_synchronize(context)
    seconds = perf_counter() - started
    backend.change(Remove(0, 0))
    return seconds


def _fill(backend: Backend, context: Any, n_cells: int) -> bool:
    """Let sequence 1 hold so many cells that nobody computed; whether it does."""
    memory = llama_cpp.llama_get_memory(context)
    _compute(backend, _SAVED)
    state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(context, 0))()
    llama_cpp.llama_state_seq_get_data(context, state, len(state), 0)
    n_loaded = 0
    while n_loaded < n_cells and llama_cpp.llama_state_seq_set_data(context, state, len(state), 0):
        llama_cpp.llama_memory_seq_cp(memory, 0, 1, -1, -1)
        n_loaded += _SAVED
    backend.change(Remove(0, 0))
    return n_loaded == n_cells


def _compute(backend: Backend, n_tokens: int) -> None:
    tokens = np.arange(n_tokens, dtype=np.int32) % backend.info.n_vocab
    status = backend.decode([Run(seq=0, start=0, tokens=tokens, output=True)]).status
    if status is not Status.OK:
        reason = f"the model cannot compute {n_tokens} tokens at once ({status.name})"
        raise ConfigError(reason, param="--ubatch-size")
