"""The state machine of models with a partial state on real ones: restored states give what a cold run gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Backend
from tests.backend.llama_machine import N_CTX, N_UBATCH, LlamaMachine, run_machine
from tests.backend.test_models import failing
from tests.conftest import LONG
from tests.kvcache.test_cache_machine import Shape
from tests.kvcache.test_checkpoint_machine import CheckpointMachine

pytestmark = pytest.mark.gpu

EXACT = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "checkpoints": True, "n_threads": 1}


class LlamaCheckpointMachine(LlamaMachine, CheckpointMachine):
    """States are taken and restored by llama.cpp."""

    def new_backend(self, shape: Shape) -> Backend:
        chosen = LlamaSettings(
            self.model, n_ctx=shape.n_ctx, n_slots=shape.n_slots, n_cache_seqs=shape.n_spare,
            n_ubatch=shape.n_ubatch, may_unload=True,
            **EXACT,
        )  # fmt: skip
        backend = LlamaBackend(chosen)
        self.kind = backend.info.state.kind
        return backend

    def carry_out(self, plan) -> None:
        self.backend.abort = failing
        super().carry_out(plan)

    def check_samplers(self) -> None:
        """Real ones free themselves."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny-lfm2", "tiny-mamba", "tiny-swa"])
def test_the_cache_on_a_real_model_with_a_partial_state(shape: str, tmp_path: Path) -> None:
    model = synthetic.ensure(shape, folder=tmp_path, is_exact=True)
    chosen = LlamaSettings(model, n_ctx=N_CTX, n_slots=2, n_cache_seqs=0, n_ubatch=N_UBATCH, **EXACT)

    class Machine(LlamaCheckpointMachine):
        """One of its own for each model."""

    run_machine(Machine, chosen, n_examples=60 if LONG else 8, expected=("tokens", "takes", "restores"))
