"""The state machine of models with a partial state on real ones: restored states give what a cold run gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Backend, Run, Status
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Remove
from tests.backend.test_models import failing
from tests.conftest import LONG
from tests.kvcache.test_cache_machine import COUNTS, Shape
from tests.kvcache.test_checkpoint_machine import CheckpointMachine
from tests.noise import Noise

N_CTX, N_UBATCH = 512, 64
EXACT = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "checkpoints": True, "n_threads": 1}


class LlamaCheckpointMachine(CheckpointMachine):
    """Prompts are longer, for windows have 32 tokens; tokens are compared where they are greedy."""

    pools = 256, 512
    ubatches = 16, N_UBATCH
    stretch = 4

    model: Path
    cold: LlamaBackend
    noise: Noise

    def new_backend(self, shape: Shape) -> Backend:
        chosen = LlamaSettings(
            self.model, n_ctx=shape.n_ctx, n_slots=shape.n_slots, n_cache_seqs=shape.n_spare,
            n_ubatch=shape.n_ubatch,
            **EXACT,
        )  # fmt: skip
        backend = LlamaBackend(chosen)
        self.kind = backend.info.state.kind
        return backend

    def carry_out(self, plan) -> None:
        self.backend.abort = failing
        super().carry_out(plan)

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

    def check_samplers(self) -> None:
        """Real ones free themselves."""


@pytest.mark.parametrize("shape", ["tiny-lfm2", "tiny-mamba", "tiny-swa"])
def test_the_cache_on_a_real_model_with_a_partial_state(shape: str, tmp_path: Path) -> None:
    model = synthetic.ensure(shape, folder=tmp_path, is_exact=True)
    chosen = LlamaSettings(model, n_ctx=N_CTX, n_slots=2, n_cache_seqs=0, n_ubatch=N_UBATCH, **EXACT)
    cold = LlamaBackend(chosen)

    class Machine(LlamaCheckpointMachine):
        pass

    Machine.model, Machine.cold, Machine.noise = model, cold, Noise(chosen)
    before = COUNTS.copy()
    try:
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=60 if LONG else 4, stateful_step_count=40, deadline=None)
        )
    finally:
        cold.close()
    counts = COUNTS - before
    print(f"{dict(counts)}, tokens that differed within noise: {Machine.noise.n_explained}")
    missing = [event for event in ("tokens", "takes", "restores") if not counts[event]]
    assert not missing, "no example came to these"
    assert Machine.noise.n_explained <= 5 + 0.05 * counts["tokens"]
