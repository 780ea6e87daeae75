"""What the cache's state machines have in common on a real model: greedy tokens are those of a cold run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run, Status
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Free, Remove
from tests.kvcache.test_cache_machine import COUNTS, CacheMachine
from tests.noise import Noise
from tests.recorder import Past

N_CTX = 512
N_UBATCH = 64


class LlamaMachine(CacheMachine):
    """Prompts are longer, for llama.cpp pads a pool to 256 cells, and windows have 32 tokens."""

    pools = 256, N_CTX
    ubatches = 16, N_UBATCH
    stretch = 4

    model: Path
    cold: LlamaBackend
    noise: Noise

    def check_token(
        self, history: list[int], sampling: Sampling, n_drawn: int, token: int, past: Past = ()
    ) -> None:
        if sampling.temperature > 0:
            return
        (expected,) = self.cold_tokens(history, sampling, 1, past=past)
        is_same = token == expected or self.noise.explains(history, token, expected, past)
        assert is_same, "not what a cold run gives"

    def cold_tokens(self, history: list[int], sampling: Sampling, n: int, *, past: Past = ()) -> list[int]:
        compute(self.cold, history, past)
        sampler = self.cold.new_sampler(sampling, np.empty(0, dtype=np.int32))
        found: list[int] = []
        for end in range(len(history), min(len(history) + n, N_CTX)):
            if found:
                last = np.array(found[-1:], dtype=np.int32)
                assert self.cold.decode([Run(0, end - 1, last, 1)]).status is Status.OK
            ((token,),) = self.cold.sample([(0, sampler)])
            found.append(token)
        sampler.close()
        return found


def compute(backend: LlamaBackend, tokens: Sequence[int], past: Past = ()) -> None:
    """Compute all tokens in the first sequence, from an empty one on, with logits for the last.

    The shifts of `past` come before.
    """
    backend.change(Remove(0, 0))
    for held, shift in past:
        append(backend, held)
        backend.change(replace(shift, seq=0))
    append(backend, tokens)


def empty_pool(backend: LlamaBackend) -> None:
    """Remove all sequences, segments and checkpoints of a backend, for another cache that begins with none."""
    for seq in range(backend.n_seqs):
        backend.change(Remove(seq, 0))
    for number in [*backend._kv.segment_tokens, *backend._kv.states.checkpoints]:
        backend.change(Free(number))


def append(backend: LlamaBackend, tokens: Sequence[int]) -> None:
    """Compute the tokens that the first sequence does not hold yet, with logits for the last."""
    for at in range(backend.seq_len(0), len(tokens), N_UBATCH):
        chunk = np.array(tokens[at : at + N_UBATCH], dtype=np.int32)
        run = Run(0, at, chunk, n_outputs=at + N_UBATCH >= len(tokens))
        assert backend.decode([run]).status is Status.OK


def run_machine(
    machine: type[LlamaMachine], chosen: LlamaSettings, *, n_examples: int, expected: Sequence[str]
) -> None:
    """Run a state machine on a model.

    Raises `AssertionError` if no example came to one of the `expected` events.
    """
    machine.model, machine.cold, machine.noise = chosen.model, LlamaBackend(chosen), Noise(chosen)
    before = COUNTS.copy()
    try:
        run_state_machine_as_test(
            machine, settings=settings(max_examples=n_examples, stateful_step_count=40, deadline=None)
        )
    finally:
        machine.cold.close()
    counts = COUNTS - before
    print(f"{dict(counts)}, tokens that differed within noise: {machine.noise.n_explained}")
    missing = [event for event in expected if not counts[event]]
    assert not missing, "no example came to these"
    # Random weights leave little between the best tokens; a bug would show in far more of them.
    assert machine.noise.n_explained <= 5 + 0.05 * counts["tokens"]
