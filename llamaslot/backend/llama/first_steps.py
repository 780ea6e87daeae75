"""Facts about a model that only its first steps show, before it is used.

Each function computes copies of one `token`. The caller empties all sequences afterwards.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

from llamaslot.backend.llama.operations import KvOperations
from llamaslot.base import kv_ops
from llamaslot.base.adapters import applied
from llamaslot.base.backend import Backend, Run
from llamaslot.base.model import CheckpointSize, SegmentSize, StateKind
from llamaslot.base.tokens import Tokens


def state_sizes(
    backend: Backend, kv: KvOperations, token: Tokens
) -> tuple[SegmentSize | None, CheckpointSize | None]:
    """Return the sizes of segments and checkpoints, from those of one and two tokens; None for what is not kept.

    Sequence 0 holds one token.
    """
    info = backend.info
    segments, checkpoints = [], []
    for n_tokens in (1, 2):
        if n_tokens > 1:
            backend.decode([Run(seq=0, start=1, tokens=token, n_outputs=0)])
        segments.append(kv.transfer.size(0, range(n_tokens)))
        checkpoints.append(kv.partial.n_bytes(0))
    segment, checkpoint = (SegmentSize(2 * one - two, two - one) for one, two in (segments, checkpoints))
    # Without flash attention V is transposed, and saving is too slow (fact 7). A recurrent model has no V.
    is_saved = info.flash_attn or info.state.kind is StateKind.RECURRENT
    of_checkpoint = CheckpointSize(checkpoint.fixed, checkpoint.per_token, info.state.n_swa)
    return segment if is_saved else None, of_checkpoint if info.keeps_checkpoints else None


def adapter_switch_ms(backend: Backend, context: Any, token: Tokens) -> float:
    """Return how many milliseconds longer a step takes after a change of adapters.

    Steps with all adapters and with none are timed. llama.cpp ends the process if there is no memory for its
    graphs, so that had better happen now.
    """
    info = backend.info
    everything = applied(info.adapters, [1.0] * len(info.adapters))
    more_ms = []
    for adapters in (everything, (), everything, ()):
        backend.use_adapters(adapters)
        ms = []
        for _ in range(2):
            for seq in range(info.n_slots):
                backend.change(kv_ops.Remove(seq, 0))
            started = perf_counter()
            backend.decode([Run(seq, 0, token, n_outputs=1) for seq in range(info.n_slots)])
            llama_cpp.llama_synchronize(context)
            ms.append(1e3 * (perf_counter() - started))
        more_ms.append(max(ms[0] - ms[1], 0.0))
    # The first two changes also touch memory for the first time.
    return sum(more_ms[2:]) / 2


def shift_failure(backend: Backend, kv: KvOperations, token: Tokens) -> str:
    """Return why tokens cannot be moved without changing those that stay (fact 18), or why that is not known.

    Empty if they can.
    """
    info = backend.info
    if info.unified and backend.n_seqs == info.n_slots:
        return "no sequence id is left to test it, so lower --parallel"
    kv.clear()
    for position in range(3):
        backend.decode([Run(0, position, token, n_outputs=0)])
    before = kv.transfer.save(0, range(1))
    kv.change(kv_ops.Shift(0, 1, 2, copies=False))
    backend.decode([Run(0, 2, token, n_outputs=0)])
    if np.array_equal(before, kv.transfer.save(0, range(1))):
        return ""
    return "llama.cpp would also change the KV that stays where it is (RoPE scaling)"
