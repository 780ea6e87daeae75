"""The noise that tests allow for: it covers what rounding does, and not what wrong KV does."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.app.model_files import resolve_model
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.generation.sampling import Sampling
from tests.noise import Noise

SETTINGS = LlamaSettings(resolve_model("demo"), n_ctx=1024, n_slots=2, n_threads=1)
PROMPT = "<|im_start|>user\nMy name is Ada, and I keep bees.<|im_end|>\n<|im_start|>assistant\nHello Ada! Bees"
N_SEEDS = 1000
N_DIFFERING = 6
MAX_BY_CHANCE = 2
"""Wrong KV now and then gives a token that lies next to the right one."""


def draws(logits: np.ndarray, **sampling: float) -> list[tuple[Sampling, int]]:
    """The first token drawn with each seed."""
    backend = LlamaBackend(SETTINGS)
    drawn = []
    for seed in range(N_SEEDS):
        each = Sampling(temperature=3.0, min_p=0.0, seed=seed, **sampling)
        sampler = backend.new_sampler(each, np.array([1], dtype=np.int32))
        drawn.append((each, sampler.choose(logits)))
        sampler.close()
    backend.close()
    return drawn


@pytest.mark.slow
def test_draws_that_only_rounding_changes_are_explained_and_others_are_not() -> None:
    noise = Noise(SETTINGS)
    ids = noise.tokenize(PROMPT)
    cold = noise.logits(ids, SETTINGS.n_ubatch, 0)
    rounded = noise.logits(ids, 1, 40)
    wrong = noise.logits([*ids[:5], 300, *ids[6:]], SETTINGS.n_ubatch, 0)
    for sampling in ({"top_k": 0, "top_p": 1.0}, {"top_k": 40, "top_p": 1.0}):
        expected = draws(cold, **sampling)
        for logits, is_explained in ((rounded, True), (wrong, False)):
            others = draws(logits, **sampling)
            differing = [(s, b, a) for (s, a), (_, b) in zip(expected, others, strict=True) if a != b][:N_DIFFERING]
            assert differing
            found = [noise.explains_draw(ids, [], s, b, a) for s, b, a in differing]
            assert all(found) if is_explained else sum(found) <= MAX_BY_CHANCE, (sampling, found, differing)
