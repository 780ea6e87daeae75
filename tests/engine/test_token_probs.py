"""Probabilities go with their tokens, however the engine comes by them."""

from __future__ import annotations

from typing import Any

import pytest

from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import TokenProb
from tests.engine.harness import Harness, running
from tests.fake_backend import FakeBackend

SCORED = Sampling(temperature=0.0, ignore_eos=True, n_probs=2)


class Scripted(FakeBackend):
    """Generates a given text, a token for each byte."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._script = text.encode()

    def _draw(self, rows: Any, sampler: Any, index: int) -> int:
        super()._draw(rows, sampler, index)
        return self._script[sampler.n_drawn - 1]


def tokens_of(harness: Harness, name: str) -> list[int]:
    events = [event for event in harness.events[name] if isinstance(event, Output | Finished)]
    for event in events:
        assert len(list(event.probs or ())) == len(event.tokens)
    return [token for event in events for token in event.tokens]


def probs_of(harness: Harness, name: str) -> list[TokenProb]:
    events = [event for event in harness.events[name] if isinstance(event, Output | Finished)]
    return [row for event in events for row in event.probs or ()]


@pytest.mark.parametrize(
    ("script", "stop", "text", "n_tokens"),
    [
        ("aaab", "aab", "a", 1),
        ("xyaaaaab", "aab", "xyaaa", 5),
        ("abc", "abc", "", 0),
        ("é€x€", "€x€", "é", 2),
        ("abcd", "zz", "abcd", 4),
    ],
)
async def test_tokens_of_a_stop_string_are_left_out(script: str, stop: str, text: str, n_tokens: int) -> None:
    async with running(Scripted(script)) as harness:
        n = len(script.encode())
        end = await harness.submit("r", "q", sampling=SCORED, stop=(stop,), max_tokens=n)
        assert isinstance(end, Finished)
        assert harness.text("r") == text
        assert bytes(tokens_of(harness, "r")) == script.encode()[:n_tokens]
        assert end.progress.n_generated == n


async def test_preempted_requests_have_what_they_have_alone() -> None:
    long = {"max_tokens": 100, "sampling": SCORED}
    expected = {}
    for name in "abc":
        async with running(FakeBackend(n_ctx=256)) as harness:
            await harness.submit(name, name * 20, **long)
            expected[name] = (tokens_of(harness, name), probs_of(harness, name))
    async with running(FakeBackend(n_ctx=180, n_slots=3)) as harness:
        async with harness.held():
            ends = [harness.submit(name, name * 20, **long) for name in "abc"]
        for end in ends:
            await end
        assert harness.engine.scheduler.admission.n_preempted > 0
        for name in "abc":
            assert (tokens_of(harness, name), probs_of(harness, name)) == expected[name]
            assert len(expected[name][1]) == 100
            assert all(row.token == row.top[0].token for row in expected[name][1])


async def test_requests_that_do_not_ask_get_none_beside_those_that_do() -> None:
    async with running(FakeBackend()) as harness:
        plain = Sampling(temperature=0.0, ignore_eos=True)
        ends = [harness.submit("with", "q", sampling=SCORED), harness.submit("without", "q", sampling=plain)]
        for end in ends:
            await end
        assert len(probs_of(harness, "with")) == 8
        assert probs_of(harness, "without") == []
