"""On the embedded model, whose answers break when KV is wrong, drafts never change a text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llamaslot.base.events import Finished
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.stats import SpeculationStats
from llamaslot.scheduler import drafter
from tests.demo.talks import dialogues, turns
from tests.demo.test_reuse import open_backend, sound
from tests.live import Server

pytestmark = pytest.mark.gpu

GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=0.7, top_k=40, repeat_penalty=1.1, seed=5)
MAX_DRAFT = 63


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft after short matches, whether it pays or not, so that many drafts are wrong."""
    monkeypatch.setattr(drafter, "MIN_MATCH", 2)
    monkeypatch.setattr(drafter, "MIN_GAIN", -100.0)
    monkeypatch.setattr(drafter, "MAX_DELAY", 100.0)


async def texts(
    prompts: list[list[str]], sampling: Sampling, max_draft: int, **backend: Any
) -> tuple[dict[tuple[int, int], str], SpeculationStats]:
    """The texts of conversations side by side, and what was drafted for them."""
    found = {}
    async with sound(open_backend(**backend)) as engine:

        async def talk(i: int) -> None:
            for t, prompt in enumerate(prompts[i]):
                end = await engine.submit(f"{i}-{t}", prompt, max_tokens=60, sampling=sampling, max_draft=max_draft)
                assert isinstance(end, Finished), end
                found[i, t] = engine.text(f"{i}-{t}")

        async with asyncio.TaskGroup() as group:
            for i in range(len(prompts)):
                group.create_task(talk(i))
        stats = engine.engine.scheduler.cache_stats().speculation
    return found, stats


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_replies_with_drafts_are_those_without(sampling: Sampling) -> None:
    talks = [turns(each) for each in dialogues(8, seed=31, filler_tokens=60)]
    plain, none = await texts(talks, sampling, 0)
    drafted, stats = await texts(talks, sampling, MAX_DRAFT)
    assert not none.drafts
    assert stats.drafts > len(plain)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert drafted == plain


async def test_replies_on_a_full_pool_are_those_without() -> None:
    """Requests are preempted, and what they drafted goes with them."""
    talks = [turns(each) for each in dialogues(6, seed=32, filler_tokens=100)]
    plain, _ = await texts(talks, GREEDY, 0, n_ctx=1024)
    drafted, stats = await texts(talks, GREEDY, MAX_DRAFT, n_ctx=1024)
    assert stats.accepted_tokens
    assert drafted == plain


def test_a_reply_says_what_was_drafted(demo: Server) -> None:
    """`speculate: false` drafts nothing; without drafts there are no fields, as in llama-server."""
    text = "copper lamp, silver key, iron gate, " * 12
    body = {"prompt": text, "n_predict": 60, "temperature": 0, "ignore_eos": True}
    plain = demo.post("/completion", {**body, "speculate": False})
    assert not {"draft_n", "draft_n_accepted"} & {*plain["timings"]}
    n_drafted = n_accepted = 0
    for _ in range(4):
        drafted = demo.post("/completion", body)
        assert drafted["content"] == plain["content"]
        timings = drafted["timings"]
        n_drafted += timings.get("draft_n", 0)
        n_accepted += timings.get("draft_n_accepted", 0)
    # The tree has the reply to this prompt.
    assert 0 < n_accepted <= n_drafted
