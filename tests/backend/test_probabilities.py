"""Probabilities of tokens: those of the model's logits, and those after sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.backend.llama.sampling.candidates import score_of
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import FLOAT_MIN
from tests.backend.test_sampler import LOGITS, N_VOCAB, TOP, changed, sampler_of

OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, n_probs=5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - math.log(np.exp(wide).sum())


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 7, 300, 60_011]),
    n_top=st.sampled_from([0, 1, 20, 128, 400]),
    levels=st.sampled_from([3, 10**6]),
)
def test_scores_are_the_log_softmax(seed: int, size: int, n_top: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, levels, size) * (40.0 / levels) - 20).astype(np.float32)
    token = int(rng.integers(size))
    expected = log_softmax(logits)
    score = score_of(token, logits, n_top)
    assert score.token == token
    assert score.value == pytest.approx(expected[token], abs=1e-4)
    assert list(score.top_tokens) == np.argsort(-logits, kind="stable")[:n_top].tolist()
    assert score.top_values == pytest.approx(expected[score.top_tokens], abs=1e-4)


def test_a_token_that_is_ruled_out_has_the_lowest_float() -> None:
    logits = np.array([1.0, -np.inf, 2.0], dtype=np.float32)
    score = score_of(1, logits, 3)
    assert (score.value, score.top_tokens, score.top_values[2]) == (FLOAT_MIN, [2, 0, 1], FLOAT_MIN)


@pytest.mark.parametrize("sampling", [OPEN, changed(OPEN, temperature=0.0), changed(OPEN, top_k=3)])
def test_they_are_the_models_whatever_the_samplers_do(sampling: Sampling) -> None:
    best = int(TOP[0])
    changing = changed(sampling, logit_bias={best: -math.inf, int(TOP[1]): 9.0}, presence_penalty=2.0)
    sampler = sampler_of(changing, [int(TOP[1])])
    expected = log_softmax(LOGITS)
    for _ in range(4):
        token = sampler.choose(LOGITS)
        assert token != best
        assert sampler.scores
        assert sampler.scores[-1].token == token
        assert sampler.scores[-1].value == pytest.approx(expected[token], abs=1e-4)
        assert list(sampler.scores[-1].top_tokens) == TOP[:5].tolist()
    sampler.close()


def test_nothing_is_recorded_unasked() -> None:
    sampler = sampler_of(changed(OPEN, n_probs=-1), [])
    sampler.choose(LOGITS)
    assert not sampler.scores
    sampler.close()


def test_after_sampling_they_are_those_of_the_draw() -> None:
    logits = np.full(N_VOCAB, -100.0, dtype=np.float32)
    logits[[10, 20, 30, 40]] = np.log([0.5, 0.25, 0.15, 0.1])
    drawn = changed(OPEN, post_sampling_probs=True, top_k=3, temperature=0.5)
    weights = np.array([0.5, 0.25, 0.15]) ** 2
    expected = dict(zip([10, 20, 30], weights / weights.sum(), strict=True))
    sampler = sampler_of(drawn, [])
    seen = set()
    for _ in range(40):
        token = sampler.choose(logits)
        seen.add(token)
        assert sampler.scores
        assert sampler.scores[-1].value == pytest.approx(expected[token], rel=1e-4)
        assert sampler.scores[-1].top_tokens == [10, 20, 30], "tokens that cannot be drawn are left out"
        assert sampler.scores[-1].top_values == pytest.approx(list(expected.values()), rel=1e-4)
    sampler.close()
    assert len(seen) > 1


def test_after_xtc_the_most_likely_token_may_be_left_out() -> None:
    logits = np.full(N_VOCAB, -100.0, dtype=np.float32)
    logits[[10, 20, 30]] = np.log([0.6, 0.3, 0.1])
    xtc = changed(OPEN, post_sampling_probs=True, xtc_probability=1.0, xtc_threshold=0.2)
    sampler = sampler_of(xtc, [])
    sampler.choose(logits)
    assert sampler.scores
    assert sampler.scores[-1].top_tokens[:2] == [20, 30]
    assert sampler.scores[-1].top_values[:2] == pytest.approx([0.75, 0.25], rel=1e-4)
    sampler.close()


def test_a_greedy_choice_has_the_probability_1_after_sampling() -> None:
    for n_probs, top in ((0, []), (1, [int(TOP[0])]), (5, [int(TOP[0])])):
        sampler = sampler_of(changed(OPEN, temperature=0.0, post_sampling_probs=True, n_probs=n_probs), [])
        sampler.choose(LOGITS)
        assert sampler.scores
        assert (sampler.scores[-1].value, list(sampler.scores[-1].top_tokens)) == (1.0, top)
        sampler.close()
