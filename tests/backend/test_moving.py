"""Moving cells on llama.cpp: every holder moves along, the old place comes free, and answers do not change."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run, Status
from llamaslot.base.kv_ops import Copy, IllegalCallError, Move, Piece, Remove
from tests.noise import Noise

N_CTX = 512


def test_all_holders_move_and_the_old_cells_come_free(tiny_model: Path) -> None:
    chosen = LlamaSettings(tiny_model, n_ctx=N_CTX, n_slots=4, n_cache_seqs=0, n_ubatch=N_CTX, n_threads=1)
    backend = LlamaBackend(chosen)
    prompt = np.random.default_rng(3).integers(300, 500, 200).astype(np.int32)
    backend.decode([Run(1, 0, prompt[::-1].copy(), False)])
    backend.decode([Run(0, 0, prompt, False)])
    backend.change(Copy(0, 2, 0, 200))
    backend.change(Remove(1, 0))
    backend.change(Move((Piece((0, 2), 50, 120), Piece((0, 2), 130, 200)), 4))
    assert [backend.seq_range(seq) for seq in range(5)] == [range(200), range(0), range(200), range(0), range(0)]
    noise = Noise(chosen)
    cold = int(noise.logits([*prompt.tolist(), 301], N_CTX, 0).argmax())
    for seq in (0, 2):
        decoded = backend.decode([Run(seq, 200, np.array([301], dtype=np.int32), True)])
        assert decoded.status is Status.OK
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(backend._context, 0), (backend.info.n_vocab,))
        warm = int(row.argmax())
        assert warm == cold or noise.explains([*prompt.tolist(), 301], warm, cold)
    # 200 cells that both see, and one each: exactly what is left can be filled.
    rest = N_CTX - 202
    assert backend.decode([Run(3, 0, np.full(rest, 301, dtype=np.int32), False)]).status is Status.OK
    assert backend.decode([Run(1, 0, prompt[:1], False)]).status is Status.NO_ROOM
    backend.close()


def full(model: Path) -> LlamaBackend:
    """A pool without a free cell: sequences 0 and 1 in turn, a token at a time at first."""
    backend = LlamaBackend(LlamaSettings(model, n_ctx=256, n_slots=2, n_cache_seqs=0, n_ubatch=256, n_threads=1))
    token = np.array([301], dtype=np.int32)
    for i in range(28):
        backend.decode([Run(0, i, token, False), Run(1, i, token, False)])
    for seq in (0, 1):
        backend.decode([Run(seq, 28, np.full(100, 301, dtype=np.int32), False)])
    assert backend.decode([Run(0, 128, token, False)]).status is Status.NO_ROOM
    return backend


def test_a_move_needs_no_free_cells(tiny_model: Path) -> None:
    backend = full(tiny_model)
    backend.change(Move((Piece((0,), 0, 128), Piece((1,), 5, 100)), 2))
    assert [backend.seq_range(seq) for seq in range(3)] == [range(128), range(128), range(0)]
    assert backend.decode([Run(1, 128, np.array([301], dtype=np.int32), False)]).status is Status.NO_ROOM
    backend.close()


@pytest.mark.parametrize("call", ["llama_state_seq_set_data", "llama_state_seq_get_data"])
def test_a_move_that_llama_cpp_cannot_make_is_told(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    backend = full(tiny_model)
    monkeypatch.setattr(llama_cpp, call, lambda *_: 0)
    with pytest.raises(IllegalCallError, match="could not"):
        backend.change(Move((Piece((0,), 0, 128),), 2))
    if call == "llama_state_seq_get_data":
        assert [backend.seq_range(seq) for seq in range(3)] == [range(128), range(128), range(0)]
    backend.close()
