"""The cache's state machine on a real model: what the scheduler makes llama.cpp do gives what a cold run gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Backend, Run, Status
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Remove
from tests.conftest import LONG
from tests.kvcache.test_cache_machine import COUNTS, OFTEN, CacheMachine, Shape
from tests.noise import Noise

N_CTX = 512
N_UBATCH = 64


class LlamaMachine(CacheMachine):
    """Prompts are longer, for llama.cpp pads a pool to 256 cells; tokens are compared where they are greedy."""

    layouts = "shared", "shared", "shared", "partitions", "copied partitions"
    pools = 256, 512
    ubatches = 16, N_UBATCH
    stretch = 4

    model: Path
    cold: LlamaBackend
    noise: Noise

    def new_backend(self, shape: Shape) -> Backend:
        return LlamaBackend(
            LlamaSettings(
                self.model,
                n_ctx=shape.n_ctx,
                n_slots=shape.n_slots,
                n_cache_seqs=shape.n_spare,
                n_ubatch=shape.n_ubatch,
                n_threads=1,
                unified=shape.layout == "shared",
            )
        )

    def check_token(self, history: list[int], sampling: Sampling, n_drawn: int, token: int) -> None:
        if sampling.temperature > 0:
            return
        self.cold.change(Remove(0, 0))
        for at in range(0, len(history), N_UBATCH):
            chunk = np.array(history[at : at + N_UBATCH], dtype=np.int32)
            run = Run(0, at, chunk, output=at + N_UBATCH >= len(history))
            assert self.cold.decode([run]).status is Status.OK
        sampler = self.cold.new_sampler(sampling, np.empty(0, dtype=np.int32))
        (expected,) = self.cold.sample([(0, sampler)])
        sampler.close()
        assert token == expected or self.noise.explains(history, token, expected), "not what a cold run gives"


def test_the_cache_on_a_real_model(tiny_model: Path) -> None:
    chosen = LlamaSettings(tiny_model, n_ctx=N_CTX, n_slots=2, n_cache_seqs=0, n_ubatch=N_UBATCH, n_threads=1)
    cold = LlamaBackend(chosen)

    class Machine(LlamaMachine):
        pass

    Machine.model, Machine.cold, Machine.noise = tiny_model, cold, Noise(chosen)
    before = COUNTS.copy()
    try:
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=60 if LONG else 6, stateful_step_count=40, deadline=None)
        )
    finally:
        cold.close()
    counts = COUNTS - before
    print(f"{dict(counts)}, tokens that differed within noise: {Machine.noise.n_explained}")
    missing = [event for event in (OFTEN if LONG else ("tokens", "steps", "ended")) if not counts[event]]
    assert not missing, "no example came to these"
    # Random weights leave little between the best tokens; a bug would show in far more of them.
    assert Machine.noise.n_explained <= 5 + 0.05 * counts["tokens"]
