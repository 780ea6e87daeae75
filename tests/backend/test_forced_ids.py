"""On random weights, reused KV gives the same logits as cold KV, up to what another chunk size does to them.

The ids of a cold greedy run are forced on a warm sequence that went through trims, copies and other tenants; at
each position the greedy token may differ only where the cold run's two best lie within chunking noise.
"""

from __future__ import annotations

import random
from pathlib import Path

import llama_cpp
import numpy as np

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.core.backend import Run, Status
from tests.conftest import LONG

N_GENERATED = 24
N_CASES = 60 if LONG else 3


class Rows:
    """Forces ids on sequences of one backend and reads the logits at each."""

    def __init__(self, model: Path) -> None:
        settings = LlamaSettings(model, n_ctx=1024, n_slots=4, n_ubatch=256, n_threads=1)
        self.backend = LlamaBackend(settings)

    def feed(self, seq: int, ids: list[int], chunk: int = 256) -> None:
        """Decode ids without asking for logits."""
        for at in range(0, len(ids), chunk):
            self._decode(seq, ids[at : at + chunk], False)

    def step(self, seq: int, token: int) -> np.ndarray:
        """Decode one id; the logits after it, float32 of the vocabulary's size."""
        self._decode(seq, [token], True)
        row = llama_cpp.llama_get_logits_ith(self.backend._context, 0)
        return np.ctypeslib.as_array(row, (self.backend.info.n_vocab,)).copy()

    def _decode(self, seq: int, ids: list[int], output: bool) -> None:
        run = Run(seq, self.backend.seq_len(seq), np.array(ids, dtype=np.int32), output)
        assert self.backend.decode([run]).status is Status.OK


def cold_run(model: Path, prompt: list[int], chunk: int, forced: list[int] | None = None) -> list[np.ndarray]:
    """Logits after the prompt and after each id, greedy ones unless they are forced."""
    rows = Rows(model)
    rows.feed(0, prompt[:-1], chunk)
    found = [rows.step(0, prompt[-1])]
    for i in range(N_GENERATED - 1):
        found.append(rows.step(0, forced[i] if forced else int(found[-1].argmax())))
    rows.backend.close()
    return found


def warm_run(model: Path, rng: random.Random, prompt: list[int], forced: list[int]) -> list[np.ndarray]:
    """The same rows on sequence 1, after it was filled, shared, trimmed and refilled."""
    rows = Rows(model)
    n_same = rng.randrange(1, len(prompt) - 1)
    other_tail = [rng.randrange(97, 123) for _ in range(rng.randrange(1, 60))]
    rows.feed(2, [rng.randrange(97, 123) for _ in range(100)])
    rows.feed(0, prompt[:n_same] + other_tail, rng.choice([7, 64, 256]))
    rows.backend.seq_cp(0, 1, 0, n_same)
    rows.feed(3, other_tail)
    rows.backend.seq_rm(0, n_same // 2)
    rows.backend.seq_rm(2, 50)
    seq = rng.choice([0, 1])
    rows.feed(seq, prompt[rows.backend.seq_len(seq) : -1], rng.choice([5, 33, 256]))
    found = [rows.step(seq, prompt[-1])]
    found += [rows.step(seq, token) for token in forced]
    rows.backend.close()
    return found


def test_reused_kv_gives_the_cold_logits(tiny_model: Path) -> None:
    n_near = 0
    for case in range(N_CASES):
        seed = random.SystemRandom().randrange(2**32)
        rng = random.Random(seed)
        prompt = [rng.randrange(97, 123) for _ in range(rng.randrange(20, 300))]
        cold = cold_run(tiny_model, prompt, chunk=256)
        forced = [int(row.argmax()) for row in cold[:-1]]
        rechunked = cold_run(tiny_model, prompt, chunk=11, forced=forced)
        noise = max(float(np.abs(a - b).max()) for a, b in zip(cold, rechunked, strict=True))
        warm = warm_run(tiny_model, rng, prompt, forced)
        for position, (a, b) in enumerate(zip(cold, warm, strict=True)):
            best, second = np.sort(a)[::-1][:2]
            if a.argmax() != b.argmax():
                n_near += 1
                assert best - second <= 4 * noise, (case, seed, position)
    print(f"tokens that differed within chunking noise: {n_near} of {N_CASES * N_GENERATED}")


def test_the_comparison_notices_one_stale_token(tiny_model: Path) -> None:
    """Were KV reused one token too far, the logits would move by far more than noise."""
    rng = random.Random(5)
    prompt = [rng.randrange(97, 123) for _ in range(120)]
    cold = cold_run(tiny_model, prompt, chunk=256)
    forced = [int(row.argmax()) for row in cold[:-1]]
    rechunked = cold_run(tiny_model, prompt, chunk=11, forced=forced)
    noise = max(float(np.abs(a - b).max()) for a, b in zip(cold, rechunked, strict=True))
    stale = [*prompt]
    stale[60] = 97 if prompt[60] != 97 else 98
    moved = cold_run(tiny_model, stale, chunk=256, forced=forced)
    assert max(float(np.abs(a - b).max()) for a, b in zip(cold, moved, strict=True)) > 10 * noise
