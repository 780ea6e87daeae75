"""Measurement of `StateCost`: how long taking and restoring a checkpoint takes on this machine.

A recurrent state always has the same size. Filling a sliding window takes many tokens, and computing them takes
long on a slow machine, but their content does not matter: one short sequence is saved whole, and loaded many times
into another one. That one then has each position many times, in as many cells as a full window.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import llama_cpp

from llamaslot.backend.llama.kv_cost import compute
from llamaslot.backend.llama.quiet import Quiet
from llamaslot.backend.llama.state.partial_states import PartialStates
from llamaslot.base.backend import Backend
from llamaslot.base.kv_ops import NotLoadedError, NotSavedError, Remove, Restore, Take
from llamaslot.base.model import StateCost

_COMPUTED_TOKENS = 64
"""Tokens of the sequence that is loaded repeatedly."""
_N_REPEATS = 5
"""Number of measurements of each cost."""
_CHECKPOINT = -1
"""Number of the checkpoint; the engine uses no such number."""


def measure(backend: Backend, context: Any, states: PartialStates, quiet: Quiet) -> StateCost | None:
    """Measure the cost on a backend with this context, whose sequences are empty before and after.

    None if no checkpoints are taken, or if pool or memory are too small for one of the largest size.
    """
    if not backend.info.keeps_checkpoints:
        return None
    try:
        return _measured(backend, context, states, quiet)
    except (NotSavedError, NotLoadedError):
        return None
    finally:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 1, -1, -1)
        backend.change(Remove(0, 0))


def _measured(backend: Backend, context: Any, states: PartialStates, quiet: Quiet) -> StateCost | None:
    """Measure. Sequences 0 and 1 may be left with cells."""
    n_swa = backend.info.state.n_swa
    n_tokens = min(n_swa or 1, _COMPUTED_TOKENS, backend.info.n_ubatch)
    compute(backend, n_tokens)
    if not _fill_state(context, -(-n_swa // n_tokens) or 1):
        return None
    quiet.begin()
    taking, restoring = [], []
    for _ in range(_N_REPEATS):
        taking.append(_ms(context, lambda: states.take(Take(_CHECKPOINT, src=1, end=n_tokens))))
        try:
            restoring.append(_ms(context, lambda: states.restore(Restore(_CHECKPOINT, dst=1), n_tokens)))
        finally:
            states.free(_CHECKPOINT)
        quiet.check()
    return StateCost(take_ms=statistics.median(taking), restore_ms=statistics.median(restoring))


def _fill_state(context: Any, n_loads: int) -> bool:
    """Load the content of sequence 0 into sequence 1 `n_loads` times; False if the cells do not suffice."""
    memory = llama_cpp.llama_get_memory(context)
    saved = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(context, 0))()
    llama_cpp.llama_state_seq_get_data(context, saved, len(saved), 0)
    for _ in range(n_loads):
        if not llama_cpp.llama_state_seq_set_data(context, saved, len(saved), 0):
            return False
        llama_cpp.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    return True


def _ms(context: Any, call: Callable[[], None]) -> float:
    started = perf_counter()
    call()
    llama_cpp.llama_synchronize(context)
    return 1e3 * (perf_counter() - started)
