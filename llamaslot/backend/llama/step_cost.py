"""Measurement of `StepCost`: how long small steps take on this machine.

A few tokens, and `QUERY_BLOCK` of them, are timed in an empty sequence and after many cells, which `kv_cost.fill`
provides.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import llama_cpp

from llamaslot.backend.llama.kv_cost import compute, fill
from llamaslot.backend.llama.quiet import Quiet
from llamaslot.base.backend import Backend
from llamaslot.base.kv_ops import Remove
from llamaslot.base.model import QUERY_BLOCK, StepCost

_FEW_TOKENS, _MORE_TOKENS = 8, 32
"""Tokens of small steps."""
_MANY_CELLS = 1024
"""Cells to attend to in the measurements with many cells."""
_LIMIT_S = 0.2
"""If a small step takes longer, nothing is measured; also the time after which a measurement is not repeated."""
_MAX_REPEATS = 5
"""Most repetitions of a step."""


def measure(backend: Backend, context: Any, quiet: Quiet) -> StepCost | None:
    """Measure the cost on a backend with this context, which is empty before and after.

    Takes half a second, or a few for slow models. None if there is no scratch sequence to pad with, if the pool is
    too small, if the model is too slow to measure, and for models with a partial state, whose steps are not padded.
    """
    info = backend.info
    if (
        not info.can_trim
        or not info.unified
        or info.segment_size is None
        or info.n_ubatch < QUERY_BLOCK
        or info.n_ctx < _MANY_CELLS + 2 * QUERY_BLOCK
    ):
        return None
    try:
        return _measured(backend, context, quiet)
    finally:
        for seq in (0, 1):
            # The backend does not know what `fill` did; asking for the length corrects its record.
            backend.seq_len(seq)
            backend.change(Remove(seq, 0))


def _measured(backend: Backend, context: Any, quiet: Quiet) -> StepCost | None:
    """Measure. Sequence 1 may be left with cells."""
    if (few := _seconds(backend, context, _FEW_TOKENS)) > _LIMIT_S:
        return None
    quiet.check()
    more, block = _seconds(backend, context, _MORE_TOKENS), _seconds(backend, context, QUERY_BLOCK)
    if not fill(backend, context, _MANY_CELLS):
        return None
    few_far, block_far = _seconds(backend, context, _FEW_TOKENS), _seconds(backend, context, QUERY_BLOCK)
    token = max(more - few, 0.0) / (_MORE_TOKENS - _FEW_TOKENS)
    return StepCost(
        step_us=1e6 * max(few - _FEW_TOKENS * token, 0.0),
        token_us=1e6 * token,
        token_cell_us=1e6 * max(few_far - few, 0.0) / _FEW_TOKENS / _MANY_CELLS,
        block_us=1e6 * block,
        block_cell_us=1e6 * max(block_far - block, 0.0) / _MANY_CELLS,
    )


def _seconds(backend: Backend, context: Any, n_tokens: int) -> float:
    """Return the shortest time of several runs in which sequence 1 computes `n_tokens` after its own."""
    start = backend.seq_len(1)
    taken: list[float] = []
    while not taken or (sum(taken) < _LIMIT_S and len(taken) < _MAX_REPEATS):
        started = perf_counter()
        compute(backend, n_tokens, seq=1, start=start)
        llama_cpp.llama_synchronize(context)
        taken.append(perf_counter() - started)
        backend.change(Remove(1, start))
    return min(taken)
