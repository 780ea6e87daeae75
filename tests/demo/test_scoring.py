"""Log-probabilities and samplers on the embedded model, over HTTP."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from tests.live import Server

CHAT = [
    {"role": "user", "content": "My cat's name is Otto."},
    {"role": "assistant", "content": "Nice to meet Otto."},
    {"role": "user", "content": "What is my cat's name?"},
]
TEXT = "/v1/completions"


def score(demo: Server, context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and True if it is the greedy one, as lm-eval computes them."""
    ids = [demo.post("/tokenize", {"content": text})["tokens"] for text in (context, continuation)]
    body = {
        "prompt": [ids[0] + ids[1]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    [choice] = demo.post(TEXT, body)["choices"]
    n_context = len(ids[0])
    values = choice["logprobs"]["token_logprobs"][n_context:-1]
    tops = choice["logprobs"]["top_logprobs"][n_context:-1]
    assert len(values) == len(ids[1])
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


def test_the_right_answer_is_the_most_likely_one(demo: Server) -> None:
    context = demo.post("/apply-template", {"messages": CHAT})["prompt"]
    greedy = demo.post(TEXT, {"prompt": context, "temperature": 0, "max_tokens": 30})["choices"][0]["text"]
    assert "Otto" in greedy
    likelihood, is_greedy = score(demo, context, greedy)
    assert is_greedy
    for name in ("Anna", "Mimi", "a cat"):
        other, is_greedy = score(demo, context, greedy.replace("Otto", name))
        assert other < likelihood - 1
        assert not is_greedy


def test_a_reply_has_the_scores_that_its_text_has_as_a_prompt(demo: Server) -> None:
    context = demo.post("/apply-template", {"messages": CHAT})["prompt"]
    asked = {"temperature": 0, "n_predict": 12, "n_probs": 1, "return_tokens": True, "prompt": context}
    reply = demo.post("/completion", asked)
    rows = reply["completion_probabilities"]
    assert [row["id"] for row in rows] == reply["tokens"]
    ids = demo.post("/tokenize", {"content": context})["tokens"]
    echoed = demo.post(TEXT, {"prompt": [ids + reply["tokens"]], "max_tokens": 0, "logprobs": 0, "echo": True})
    values = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert values[len(ids) :] == pytest.approx([row["logprob"] for row in rows], abs=0.05)


def test_the_best_are_the_most_likely_per_token(demo: Server) -> None:
    context = demo.post("/apply-template", {"messages": CHAT})["prompt"]
    drawn = {"temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 3}
    asked = {"prompt": context, **drawn, "max_tokens": 6, "logprobs": 0}
    candidates = demo.post(TEXT, {**asked, "n": 8})["choices"]
    ranked = sorted(candidates, key=lambda choice: -mean(choice["logprobs"]["token_logprobs"]))
    assert len({choice["text"] for choice in ranked}) > 3
    assert ranked[0]["text"] != candidates[0]["text"], "another seed is needed"
    best = demo.post(TEXT, {**asked, "best_of": 8, "n": 5})["choices"]
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:5]]
    without = demo.post(TEXT, {**asked, "best_of": 8, "logprobs": None})["choices"]
    assert [(choice["text"], choice["logprobs"]) for choice in without] == [(ranked[0]["text"], None)]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "dry_multiplier": 3, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
    {"temperature": 1.5, "xtc_probability": 1, "xtc_threshold": 0.02},
    {"mirostat": 1, "mirostat_tau": 8},
    {"mirostat": 2, "mirostat_tau": 8},
    {"temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 2},
    {"temperature": 3, "top_n_sigma": 1},
    {"samplers": ["adaptive_p"], "adaptive_target": 0.3},
    {"samplers": "tk", "top_k": 3, "temperature": 2},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_sampler_reaches_the_model(demo: Server, sampling: dict[str, Any]) -> None:
    def text(**fields: Any) -> str:
        body = {"messages": CHAT, "max_tokens": 40, "seed": 5, "ignore_eos": True, **fields}
        return demo.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]

    cold = text(**sampling, cache_prompt=False)
    assert text(**sampling, cache_prompt=False) == cold
    assert text(temperature=sampling.get("temperature", 0.2), cache_prompt=False) != cold
    if sampling.get("temperature") == 0:
        text(**sampling)
        assert text(**sampling) == cold, "the cache changes nothing"
