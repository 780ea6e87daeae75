"""Partial states in a real backend: what sequences keep of them, and where one was lost, nothing is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench import synthetic
from llamaslot.backend.llama import LlamaBackend
from llamaslot.base.backend import Run, Status
from llamaslot.base.kv_ops import IllegalCallError, Remove
from tests.backend.test_models import failing, loaded, logits

N_SWA = 32
IDS = np.random.default_rng(3).integers(300, 512, 200).astype(np.int32)
EXACT = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "checkpoints": True, "n_cache_seqs": 1}


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.ensure("tiny-swa", folder=tmp_path_factory.mktemp("models"), is_exact=True)


def feed(backend: LlamaBackend, seq: int, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Compute tokens behind what the sequence holds; returns the logits after the last."""
    assert backend.decode([Run(seq, backend.seq_len(seq), tokens, True)]).status is Status.OK
    return logits(backend, len(tokens) - 1)


@pytest.mark.parametrize(("n_held", "is_whole"), [(N_SWA - 1, True), (N_SWA, False)])
def test_a_window_that_is_full_cannot_be_cut(window: Path, n_held: int, is_whole: bool) -> None:
    """No next token sees the oldest cell of a full window, so llama.cpp gives it to another sequence."""
    with loaded(window, **EXACT) as backend:
        assert backend.info.state.n_swa == N_SWA
        feed(backend, 0, IDS[:n_held])
        for at in range(0, 360, 60):
            feed(backend, 1, IDS[at % 120 :][:60])
        backend.change(Remove(0, 10))
        if not is_whole:
            with pytest.raises(IllegalCallError, match="sequence 0 has lost its state"):
                feed(backend, 0, IDS[100:102])
            return
        warm = feed(backend, 0, IDS[100:102])
        backend.change(Remove(1, 0))
        feed(backend, 1, IDS[:10])
        cold = feed(backend, 1, IDS[100:102])
        assert np.sqrt(np.square(warm - cold).mean()) < 0.01 * cold.std()


@pytest.mark.parametrize("shape", ["tiny-lfm2", "tiny-mamba", "tiny-swa"])
def test_a_failed_step_without_checkpoints_leaves_its_sequences_empty(shape: str) -> None:
    """llama.cpp cannot trim recurrent states, so it claims that the tokens of the failed step were computed."""
    with loaded(synthetic.ensure(shape)) as backend:
        cold = feed(backend, 0, IDS[:40])
        backend.change(Remove(0, 0))
        for seq in (0, 1):
            feed(backend, seq, IDS[seq:30])
        with failing(backend):
            run = Run(0, 30, IDS[30:40], True)
            assert backend.decode([run]).status is Status.ABORTED
        assert (backend.seq_len(0), backend.seq_len(1)) == (0, 29)
        assert np.array_equal(feed(backend, 0, IDS[:40]), cold)
