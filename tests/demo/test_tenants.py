"""A prober with a key of its own: can it tell that another key sent this very prompt before?

Each trial has another key send either the prober's prompt or one of equal length, then the prober its own, which is
new to it. Both name the same `cache_salt`, another one in each trial, so that the prober's own earlier prompts make
no difference. The long form has 1,000 trials of each kind and prints the AUC of the prober's times to first token:

    LLAMASLOT_TESTS=long pytest -n 0 -s tests/demo/test_tenants.py
"""

from __future__ import annotations

import http.client
import json
import math
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import LONG
from tests.live import serving

N_TRIALS = 1000 if LONG else 3
"""Of each kind."""
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "his", "they"]


@dataclass(frozen=True)
class Answered:
    """Observations of a client: its own timing and the reply's cache figures."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    miss: str | None


class Client:
    """A client with a key and one connection."""

    def __init__(self, url: str, key: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def close(self) -> None:
        self._connection.close()

    def ask(self, prompt: str, salt: str) -> Answered:
        """Send a prompt; the reply has one token, so its time is that of the first token."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt})
        started = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        response = self._connection.getresponse()
        content = response.read()
        seconds = time.perf_counter() - started
        assert response.status == 200, content
        reply = json.loads(content)
        usage = reply["usage"]
        return Answered(
            seconds,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            reply["cache"]["miss"],
        )


def auc(positive: Sequence[float], negative: Sequence[float]) -> tuple[float, float]:
    """Return the probability that a positive is below a negative, and half of its 95% confidence interval.

    The interval is Hanley and McNeil's.
    """
    ordered = sorted(negative)
    n, m = len(positive), len(negative)
    wins = sum(m - (bisect_left(ordered, x) + bisect_right(ordered, x)) / 2 for x in positive)
    a = wins / (n * m)
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    variance = (a * (1 - a) + (n - 1) * (q1 - a * a) + (m - 1) * (q2 - a * a)) / (n * m)
    return a, 1.96 * math.sqrt(max(variance, 0.0))


def test_the_auc_is_that_of_its_definition() -> None:
    assert auc([1, 2], [3, 4]) == (1.0, 0.0)
    assert auc([3, 4], [1, 2])[0] == 0.0
    assert auc([1, 3], [2, 4])[0] == 0.75
    assert auc([1, 1], [1, 1])[0] == 0.5
    rng = random.Random(1)
    same, other = ([rng.gauss(0, 1) for _ in range(1000)] for _ in range(2))
    value, half = auc(same, other)
    assert abs(value - 0.5) < 2 * half
    assert 0.02 < half < 0.03


@pytest.mark.slow
def test_a_prober_cannot_tell_whether_another_key_sent_this_very_prompt(tmp_path: Path) -> None:
    rng = random.Random(16)

    def new_prompt() -> str:
        """Of the same words in another order, so that all have the same length."""
        return "".join(f" {word}" for word in rng.sample(WORDS * 12, len(WORDS * 12)))

    flags = (
        "--cache-salt-from-api-key",
        "--api-key",
        "victim,prober",
        "-c",
        "4096",
        "--cache-disk",
        tmp_path / "kv",
    )
    kinds = [True, False] * N_TRIALS
    rng.shuffle(kinds)
    results: dict[bool, list[Answered]] = {True: [], False: []}
    again: list[Answered] = []
    with (
        serving(tmp_path, *flags) as server,
        closing(Client(server.url, "victim")) as victim,
        closing(Client(server.url, "prober")) as prober,
    ):
        for i, is_same in enumerate(kinds):
            prompt, salt = new_prompt(), f"trial {i}"
            sent = victim.ask(prompt if is_same else new_prompt(), salt)
            results[is_same].append(prober.ask(prompt, salt))
            assert sent.prompt_tokens == results[is_same][-1].prompt_tokens, "of equal length"
            # The control: where the prober asked itself before, it must see that.
            again.append(prober.ask(prompt, salt))
    same, other = results[True], results[False]
    assert {(each.cached_tokens, each.miss) for each in same} == {(each.cached_tokens, each.miss) for each in other}
    assert {each.cached_tokens for each in (*same, *other)} == {0}
    assert all(each.cached_tokens >= each.prompt_tokens - 1 for each in again), "the cache is on"
    if not LONG:
        return
    value, half = auc([each.seconds for each in same], [each.seconds for each in other])
    control, _ = auc([each.seconds for each in again], [each.seconds for each in other])
    n, m = len(same), len(other)
    print(f"\nAUC of TTFT over {n} + {m} trials: {value:.3f} (95%: +-{half:.3f}); of own prompts: {control:.3f}")
    assert 0.45 <= value <= 0.55
    assert control > 0.9, "times would not show a hit"
