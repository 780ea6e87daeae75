"""Moving cells on llama.cpp: every holder moves along, the old place comes free, and answers do not change."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.core.backend import Copy, Move, Piece, Remove, Run, Status
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
