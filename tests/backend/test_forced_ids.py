"""On random weights, reused KV gives the same logits as cold KV, up to what another chunk size does to them.

The ids of a cold greedy run are forced on a warm sequence that went through trims, copies and other tenants; at
each position the greedy token may differ only where the cold run's two best lie within the noise that other chunk
sizes and other cells make (llama.cpp adds up attention in the order of the cells).
"""

from __future__ import annotations

import random
from pathlib import Path

import llama_cpp
import numpy as np

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run, Status
from llamaslot.base.kv_ops import Copy, Remove
from tests.conftest import LONG, new_seed

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


def cold_run(
    model: Path, prompt: list[int], forced: list[int] | None = None, *, chunk: int = 256, scattered: bool = False
) -> list[np.ndarray]:
    """Logits after the prompt and after each id, greedy ones unless they are forced.

    With `scattered`, the pool's first cells come free only later: cells do not lie in the order of positions.
    """
    rows = Rows(model)
    if scattered:
        rows.feed(3, [97] * len(prompt))
        rows.feed(0, prompt[: len(prompt) // 2], chunk)
        rows.backend.change(Remove(3, 0))
    rows.feed(0, prompt[rows.backend.seq_len(0) : -1], chunk)
    found = [rows.step(0, prompt[-1])]
    for i in range(N_GENERATED - 1):
        found.append(rows.step(0, forced[i] if forced else int(found[-1].argmax())))
    rows.backend.close()
    return found


def distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """The most that any logit differs between two runs."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def noise_of(model: Path, prompt: list[int], cold: list[np.ndarray], forced: list[int]) -> float:
    """Distance that a cold run's logits move with other chunks and other cells."""
    others = [
        cold_run(model, prompt, forced, chunk=11),
        cold_run(model, prompt, forced, scattered=True),
        cold_run(model, prompt, forced, chunk=37, scattered=True),
    ]
    return max(distance(cold, other) for other in others)


def warm_run(model: Path, rng: random.Random, prompt: list[int], forced: list[int]) -> list[np.ndarray]:
    """The same rows on sequence 1, after it was filled, shared, trimmed and refilled."""
    rows = Rows(model)
    n_same = rng.randrange(1, len(prompt) - 1)
    other_tail = [rng.randrange(97, 123) for _ in range(rng.randrange(1, 60))]
    rows.feed(2, [rng.randrange(97, 123) for _ in range(100)])
    rows.feed(0, prompt[:n_same] + other_tail, rng.choice([7, 64, 256]))
    rows.backend.change(Copy(0, 1, 0, n_same))
    rows.feed(3, other_tail)
    rows.backend.change(Remove(0, n_same // 2))
    rows.backend.change(Remove(2, 50))
    seq = rng.choice([0, 1])
    rows.feed(seq, prompt[rows.backend.seq_len(seq) : -1], rng.choice([5, 33, 256]))
    found = [rows.step(seq, prompt[-1])]
    found += [rows.step(seq, token) for token in forced]
    rows.backend.close()
    return found


def test_reused_kv_gives_the_cold_logits(tiny_model: Path) -> None:
    n_near = 0
    first_seed = new_seed()
    for seed in range(first_seed, first_seed + N_CASES):
        rng = random.Random(seed)
        prompt = [rng.randrange(97, 123) for _ in range(rng.randrange(20, 300))]
        cold = cold_run(tiny_model, prompt)
        forced = [int(row.argmax()) for row in cold[:-1]]
        noise = noise_of(tiny_model, prompt, cold, forced)
        warm = warm_run(tiny_model, rng, prompt, forced)
        for position, (a, b) in enumerate(zip(cold, warm, strict=True)):
            best, second = np.sort(a)[::-1][:2]
            if a.argmax() != b.argmax():
                n_near += 1
                assert best - second <= 2 * noise, (seed, position)
    print(f"tokens that differed within noise: {n_near} of {N_CASES * N_GENERATED}")


def test_the_comparison_notices_one_stale_token(tiny_model: Path) -> None:
    """Were KV reused one token too far, the logits would move by much more than noise."""
    rng = random.Random(5)
    prompt = [rng.randrange(97, 123) for _ in range(120)]
    cold = cold_run(tiny_model, prompt)
    forced = [int(row.argmax()) for row in cold[:-1]]
    stale = [*prompt]
    stale[60] = 97 if prompt[60] != 97 else 98
    moved = cold_run(tiny_model, stale, forced)
    assert distance(cold, moved) > 5 * noise_of(tiny_model, prompt, cold, forced)
