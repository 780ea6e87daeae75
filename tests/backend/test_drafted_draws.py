"""Draws after drafted tokens have the distribution of draws one by one, on the host's samplers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.backend import Run, Status
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Remove
from tests.backend.test_device_sampler import (
    DEFAULT,
    N_DRAWS,
    START,
    TOP_K,
    assert_drawn_from,
    changed,
    distribution,
    ids,
)

N_SLOTS = 16
CASES = {
    "top-k": TOP_K,
    "default": changed(DEFAULT, temperature=1.2),
    "penalties": changed(DEFAULT, temperature=1.2, repeat_penalty=1.3, frequency_penalty=0.2),
}


def logits_after(backend: LlamaBackend, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Return the logits after a text."""
    assert backend.decode([Run(0, 0, ids(tokens), 1)]).status is Status.OK
    logits = backend._logits(len(tokens) - 1).astype(np.float64)
    backend.change(Remove(0, 0))
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_drafted_tokens_and_those_after_them_have_the_distribution_of_their_samplers(
    tiny_model: Path, name: str
) -> None:
    sampling: Sampling = CASES[name]
    settings = LlamaSettings(tiny_model, n_ctx=1024, n_slots=N_SLOTS, n_cache_seqs=1, n_ubatch=64, n_threads=1)
    backend = LlamaBackend(settings)
    likely = logits_after(backend, [START])
    # Each is drafted as often as the other: what is drafted must not matter.
    best, other = np.argsort(-likely)[[0, 2]].tolist()
    first = np.zeros(backend.vocab.n_tokens, dtype=np.int64)
    second = {drafted: first.copy() for drafted in (best, other)}
    for seed in range(0, N_DRAWS, N_SLOTS):
        drafts = [best if seq % 2 else other for seq in range(N_SLOTS)]
        draws = [(seq, backend.new_sampler(changed(sampling, seed=seed + seq), ids([]))) for seq in range(N_SLOTS)]
        runs = [Run(seq, 0, ids([START, token]), n_outputs=2) for seq, token in enumerate(drafts)]
        assert backend.decode(runs).status is Status.OK
        for drafted, tokens in zip(drafts, backend.sample(draws), strict=True):
            first[tokens[0]] += 1
            assert (len(tokens) == 2) == (tokens[0] == drafted)
            if len(tokens) == 2:
                second[drafted][tokens[1]] += 1
        for seq, sampler in draws:
            sampler.close()
            backend.change(Remove(seq, 0))
    assert_drawn_from(first, distribution(sampling, likely, ()))
    for drafted, counts in second.items():
        assert_drawn_from(counts, distribution(sampling, logits_after(backend, [START, drafted]), [drafted]))
    backend.close()
