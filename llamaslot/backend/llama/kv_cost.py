"""Measurement of `KvCost`: what idle prefixes cost on this machine, in the pool and in RAM.

In the pool they slow down prefill, because attention scans it up to its highest used cell (fact 5). Computing
enough idle tokens would take long on a slow machine, but their content does not matter: one short sequence is
saved, and loaded many times into another sequence. That one then has each position many times, and tokens computed
after it attend to all of them, which is good enough for timing. Everything is cleared at the end.

In RAM they cost the time to save and to load them, measured with the tokens of the timed prefill.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

from llamaslot.backend.llama import saved_sequences
from llamaslot.backend.llama.quiet import Quiet
from llamaslot.base.backend import Backend, Run, Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.kv_ops import Free, Load, Operation, Remove, Save
from llamaslot.base.model import KvCost
from llamaslot.kvcache.cache_settings import MAX_SEGMENT_TOKENS

MAX_IDLE_CELLS = 8192
"""Most idle cells in the pool while prefill is measured."""
MIN_IDLE_CELLS = 2048
"""With fewer idle cells nothing is measured: the result would be noise, and they cost little."""

_SEGMENT = -1
"""Number of the saved segment; the engine uses no such number."""
_SAVED_TOKENS = 64
"""Tokens of the sequence that is loaded repeatedly."""
_PROBE_TOKENS = 16
"""Tokens computed first, to estimate how many take `_TARGET_S`; also the fewest that are worth measuring."""
_TARGET_S = 0.2
"""Time that each measured prefill should take."""
_N_PAIRS = 5
"""Number of prefills with, and without, idle cells."""


def measure(backend: Backend, context: Any, quiet: Quiet) -> KvCost | None:
    """Measure the cost on a backend with this context, which is empty before and after. Takes about two seconds.

    None if nothing can be saved, if a unified pool has less than `MIN_IDLE_CELLS` to spare, or if the model is too
    slow to measure. Raises `NotSavedError` if memory does not suffice.
    """
    info = backend.info
    n_idle = min(info.n_ctx - info.n_ubatch, MAX_IDLE_CELLS) // _SAVED_TOKENS * _SAVED_TOKENS
    if info.segment_size is None or info.n_ubatch < _SAVED_TOKENS or (info.unified and n_idle < MIN_IDLE_CELLS):
        return None
    if not info.unified:
        n_idle = 0
    try:
        return _measured(backend, context, n_idle, quiet)
    finally:
        if backend.kv_of(_SEGMENT) is not None:
            backend.change(Free(_SEGMENT))
        backend.change(Remove(0, 0))
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 1, -1, -1)


def _measured(backend: Backend, context: Any, n_idle: int, quiet: Quiet) -> KvCost | None:
    """Measure. Sequences 0 and 1 may be left with cells."""
    _prefill(backend, context, _PROBE_TOKENS)
    quiet.check()
    fastest = min(_prefill(backend, context, _PROBE_TOKENS) for _ in range(3))
    n_tokens = min(round(_PROBE_TOKENS * _TARGET_S / fastest), backend.info.n_ubatch, backend.info.n_ctx_slot)
    if n_tokens < _PROBE_TOKENS:
        return None
    n_saved = min(n_tokens, MAX_SEGMENT_TOKENS)
    ratios, prefill, saving, loading = [], [], [], []
    for _ in range(_N_PAIRS):
        alone = _prefill(backend, context, n_tokens)
        quiet.check()
        save, load = _save_and_load(backend, n_saved)
        if n_idle:
            is_full = fill(backend, context, n_idle)
            crowded = _prefill(backend, context, n_tokens)
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 1, -1, -1)
            if not is_full:
                return None
            ratios.append(crowded / alone)
        prefill.append(alone)
        saving.append(save)
        loading.append(load)
        quiet.check()
    quiet.compare(prefill)
    return KvCost(
        n_idle_cells=n_idle,
        prefill_slowdown=max(statistics.median(ratios), 1.0) if ratios else 1.0,
        prefill_us=1e6 * statistics.median(prefill) / n_tokens,
        save_us=1e6 * statistics.median(saving) / n_saved,
        first_save_us=1e6 * max(saving) / n_saved,
        load_us=1e6 * statistics.median(loading) / n_saved,
    )


def _prefill(backend: Backend, context: Any, n_tokens: int) -> float:
    """Return the seconds in which sequence 0 computes `n_tokens`."""
    backend.change(Remove(0, 0))
    started = perf_counter()
    compute(backend, n_tokens)
    llama_cpp.llama_synchronize(context)
    return perf_counter() - started


def _save_and_load(backend: Backend, n_tokens: int) -> tuple[float, float]:
    """Return the seconds to save `n_tokens` of sequence 0, and to load them again."""
    save = _change(backend, Save(_SEGMENT, 0, 0, n_tokens))
    backend.change(Remove(0, 0))
    load = _change(backend, Load(0, 0, ((_SEGMENT, n_tokens),)))
    backend.change(Free(_SEGMENT))
    return save, load


def _change(backend: Backend, operation: Operation) -> float:
    started = perf_counter()
    backend.change(operation)
    return perf_counter() - started


def fill(backend: Backend, context: Any, n_cells: int) -> bool:
    """Fill sequence 1 with `n_cells` without computing them; False if that fails. Raises `NotSavedError`.

    They are loaded from a segment, so layers with a sliding window, which have fewer cells, are not filled.
    """
    memory = llama_cpp.llama_get_memory(context)
    backend.change(Remove(0, 0))
    compute(backend, _SAVED_TOKENS)
    backend.change(Save(_SEGMENT, 0, 0, _SAVED_TOKENS))
    kv = backend.kv_of(_SEGMENT)
    assert kv is not None
    n_loaded = 0
    while n_loaded < n_cells and saved_sequences.load(context, 0, kv):
        llama_cpp.llama_memory_seq_cp(memory, 0, 1, -1, -1)
        n_loaded += _SAVED_TOKENS
    backend.change(Free(_SEGMENT))
    backend.change(Remove(0, 0))
    return n_loaded == n_cells


def compute(backend: Backend, n_tokens: int, *, seq: int = 0, start: int = 0) -> None:
    """Compute `n_tokens` in a sequence that holds `start` tokens; raises `ConfigError` if the model cannot."""
    tokens = np.arange(n_tokens, dtype=np.int32) % backend.info.n_vocab
    status = backend.decode([Run(seq=seq, start=start, tokens=tokens, n_outputs=1)]).status
    if status is not Status.OK:
        reason = f"the model cannot compute {n_tokens} tokens at once ({status.name})"
        raise ConfigError(reason, param="--ubatch-size")
