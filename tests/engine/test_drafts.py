"""Drafted tokens never change a reply: those that are accepted are the ones that would be chosen one by one."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llamaslot.base.backend import Decoded, Draws, Run, Status
from llamaslot.base.events import Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.tools import ReasoningBudget
from llamaslot.base.model import StateKind
from llamaslot.engine.engine import Engine
from llamaslot.scheduler import drafter
from llamaslot.scheduler.step import StepPlan
from llamaslot.text.grammars.json_schema import json_schema_constraint
from tests.engine.harness import Harness, draft_replies, running
from tests.fake_backend import FakeBackend

NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
NAMES = {
    "type": "object",
    "properties": {"one": {"enum": ["alpha", "alps", "beta"]}, "two": {"enum": ["gamma", "gavotte"]}},
    "required": ["one", "two"],
}
"""Names of which some letters are chosen, and most are forced."""
OPEN = Sampling(temperature=0.0, ignore_eos=True)
SCORED = Sampling(temperature=1.0, seed=7, n_probs=2)


class Steps:
    """Counts what an engine drafted and kept."""

    def __init__(self, engine: Engine) -> None:
        self.counts: Counter[str] = Counter()
        commit = engine.scheduler.commit

        def counted(plan: Any, result: Any, now: float) -> Any:
            for work, results in zip(plan.work, result.results, strict=result.decoded.status is Status.OK):
                self.counts["drafted"] += work.run.n_drafted
                self.counts["rejected"] += len(work.run.tokens) - len(work.kept(results[0].tokens))
                self.counts["longest"] = max(self.counts["longest"], work.run.n_drafted)
            return commit(plan, result, now)

        engine.scheduler.commit = counted


async def reply(
    n_drafted: tuple[int, int], expected: str, *, backend: dict[str, Any], **fields: Any
) -> tuple[dict[str, Any], Counter[str]]:
    """All that a client gets, and what was drafted."""
    async with running(FakeBackend(**backend)) as harness:
        steps = Steps(harness.engine)
        draft_replies(harness, n_drafted, {"a prompt": expected})
        end = await harness.submit("r", "a prompt", **fields)
        assert isinstance(end, Finished)
        seen = [event for event in harness.events["r"] if isinstance(event, Output | Finished)]
        return {
            "text": harness.text("r"),
            "tokens": harness.tokens("r"),
            "probs": [row for event in seen for row in event.probs or ()],
            "end": (end.reason, end.truncated, end.stopping_word, end.progress.n_generated),
            "generated": end.generated,
        }, steps.counts


@pytest.mark.slow
@pytest.mark.parametrize("n_drafted", [(7, 0), (3, 4), (1, 6), (0, 3)])
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 40},
        {"max_tokens": 40, "sampling": OPEN},
        {"max_tokens": 1, "sampling": OPEN},
        {"max_tokens": 3, "sampling": OPEN},
        {"max_tokens": -1, "sampling": OPEN},
        {"max_tokens": 40, "sampling": Sampling(temperature=1.0, seed=7, ignore_eos=True)},
        {"max_tokens": 40, "sampling": Sampling(temperature=0.0, ignore_eos=True, n_probs=2)},
        {"max_tokens": 40, "constraint": json_schema_constraint(NAME, "json_schema")},
        {
            "max_tokens": 40,
            "constraint": json_schema_constraint(NAMES, "json_schema"),
            "sampling": Sampling(temperature=1.0, seed=7),
        },
        {"max_tokens": 40, "constraint": json_schema_constraint(NAMES, "json_schema"), "sampling": SCORED},
        {"max_tokens": 40, "reasoning_budget": ReasoningBudget(9, (), (46, 46), is_open=True)},
    ],
    ids=[
        "eos",
        "limit",
        "one",
        "three",
        "context",
        "seed",
        "probs",
        "constraint",
        "seeded constraint",
        "scored constraint",
        "reasoning",
    ],
)
@pytest.mark.parametrize(
    "backend", [{}, {"unified": False}, {"n_spare_rows": 2}], ids=["unified", "parts", "few rows"]
)
async def test_a_reply_with_drafts_is_the_reply_without(
    n_drafted: tuple[int, int], fields: dict[str, Any], backend: dict[str, Any]
) -> None:
    plain, counts = await reply((0, 0), "", backend=backend, **fields)
    assert not counts["drafted"]
    drafted, counts = await reply(n_drafted, plain["text"], backend=backend, **fields)
    assert drafted == plain
    if fields["max_tokens"] in {-1, 40}:
        assert counts["drafted"]
        n_rows = backend.get("n_spare_rows", 8)
        assert counts["longest"] <= n_rows
        # A reply's forced tokens and its limits cut drafts short, so that they may have no wrong part.
        has_wrong = n_drafted[1] and n_drafted[0] < n_rows and not {"constraint", "reasoning_budget"} & {*fields}
        assert counts["rejected"] or not has_wrong
        assert counts["drafted"] > counts["rejected"] or not n_drafted[0]


@pytest.mark.parametrize("at", range(1, 12))
async def test_a_stop_string_within_a_draft_ends_the_reply(at: int) -> None:
    plain, _ = await reply((0, 0), "", backend={}, max_tokens=30, sampling=OPEN)
    stop = (plain["text"][at : at + 3],)
    expected, _ = await reply((0, 0), "", backend={}, max_tokens=30, sampling=OPEN, stop=stop)
    drafted, counts = await reply((7, 0), plain["text"], backend={}, max_tokens=30, sampling=OPEN, stop=stop)
    assert drafted == expected
    assert counts["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("at", range(40, 52))
async def test_a_stop_string_before_the_end_of_the_context_is_the_reason(at: int) -> None:
    backend = {"n_ctx": 64, "n_slots": 1}
    plain, _ = await reply((0, 0), "", backend=backend, max_tokens=-1, sampling=OPEN)
    stop = (plain["text"][at : at + 4],)
    expected, _ = await reply((0, 0), "", backend=backend, max_tokens=-1, sampling=OPEN, stop=stop)
    drafted, _ = await reply((7, 0), plain["text"], backend=backend, max_tokens=-1, sampling=OPEN, stop=stop)
    assert drafted == expected


@pytest.mark.parametrize("status", [Status.FATAL, Status.ABORTED, Status.INVALID])
async def test_a_step_that_fails_with_a_draft_is_tried_again_without(status: Status) -> None:
    backend = FakeBackend()
    async with running(backend) as harness:
        await harness.submit("plain", "a prompt", max_tokens=30, sampling=OPEN)
        plain = harness.text("plain")
    backend = FakeBackend()
    decode = backend.decode

    def failing(runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        if any(run.n_drafted for run in runs):
            backend.failures.append((status, 0))
        return decode(runs, draws)

    backend.decode = failing
    async with running(backend) as harness:
        draft_once(harness, plain)
        end = await harness.submit("r", "a prompt", max_tokens=30, sampling=OPEN)
        assert isinstance(end, Finished)
        assert harness.text("r") == plain


def draft_once(harness: Harness, expected: str) -> None:
    """Draft the tokens after the fifth, until a step with a draft was computed or failed."""
    scheduler = harness.engine.scheduler
    plan, was_drafted = scheduler.plan, False

    def planned(now: float) -> StepPlan:
        nonlocal was_drafted
        for request in scheduler.running:
            if request.n_generated >= 5 and not was_drafted:
                n = request.n_generated
                request.draft = np.array(list(expected.encode()[n : n + 4]), dtype=np.int32)
        made = plan(now)
        was_drafted |= any(work.run.n_drafted for work in made.work)
        return made

    scheduler.plan = planned


@pytest.mark.parametrize("n_drafted", [(7, 0), (3, 4), (0, 3)])
async def test_a_model_with_windows_removes_wrong_drafts(n_drafted: tuple[int, int]) -> None:
    backend = {"kind": StateKind.WINDOW, "n_ctx": 1024, "eos_every": 1000}
    plain, _ = await reply((0, 0), "", backend=backend, max_tokens=200, sampling=OPEN)
    drafted, counts = await reply(n_drafted, plain["text"], backend=backend, max_tokens=200, sampling=OPEN)
    assert drafted == plain
    assert counts["drafted"] > 100
    assert bool(counts["rejected"]) == bool(n_drafted[1])


@pytest.mark.parametrize("n_drafted", [(7, 0), (3, 4), (0, 3)])
async def test_a_recurrent_state_goes_back_to_the_last_right_token(n_drafted: tuple[int, int]) -> None:
    """As far as earlier states are kept: longer drafts are cut."""
    backend = {"kind": StateKind.HYBRID, "n_rollback": 5, "n_ctx": 1024, "eos_every": 1000}
    plain, _ = await reply((0, 0), "", backend=backend, max_tokens=200, sampling=OPEN)
    drafted, counts = await reply(n_drafted, plain["text"], backend=backend, max_tokens=200, sampling=OPEN)
    assert drafted == plain
    assert counts["drafted"] > 100
    assert counts["longest"] <= 5
    assert bool(counts["rejected"]) == bool(n_drafted[1])


@pytest.mark.parametrize("kind", [kind for kind in StateKind if kind.has_recurrent_state])
async def test_nothing_is_drafted_where_recurrent_states_cannot_go_back(kind: StateKind) -> None:
    plain, _ = await reply((0, 0), "", backend={"kind": kind}, max_tokens=20, sampling=OPEN)
    drafted, counts = await reply((7, 0), plain["text"], backend={"kind": kind}, max_tokens=20, sampling=OPEN)
    assert (drafted, counts["drafted"]) == (plain, 0)


async def test_invalid_logits_after_a_drafted_token_fail_the_request_where_they_do_without_drafts() -> None:
    async def text(n_drafted: tuple[int, int], expected: str) -> tuple[str, str]:
        backend = FakeBackend()
        async with running(backend) as harness:
            plain = await whole(harness)
            backend.poison = {ord(plain[10])}
            draft_replies(harness, n_drafted, {"a prompt": expected or plain})
            end = await harness.submit("bad", "a prompt", max_tokens=30, sampling=OPEN)
            return harness.text("bad"), type(end).__name__

    async def whole(harness: Harness) -> str:
        await harness.submit("good", "a prompt", max_tokens=30, sampling=OPEN)
        return harness.text("good")

    assert await text((7, 0), "") == await text((0, 0), "")
    assert (await text((0, 0), ""))[1] == "Failed"


async def test_drafts_of_several_streams_share_the_room_of_a_step() -> None:
    backend = FakeBackend(n_slots=3, n_ubatch=8, n_spare_rows=100)
    async with running(backend) as harness:
        ends = [harness.submit(name, name * 5, max_tokens=40, sampling=OPEN) for name in "abc"]
        for end in ends:
            await end
        texts = {name * 5: harness.text(name) for name in "abc"}
    backend = FakeBackend(n_slots=3, n_ubatch=8, n_spare_rows=100)
    async with running(backend) as harness:
        steps = Steps(harness.engine)
        draft_replies(harness, (7, 0), texts)
        ends = [harness.submit(name, name * 5, max_tokens=40, sampling=OPEN) for name in "abc"]
        for end in ends:
            await end
        assert {name * 5: harness.text(name) for name in "abc"} == texts
        assert steps.counts["drafted"] > 60


class CopyingBackend(FakeBackend):
    """A model that repeats its prompt of 40 tokens again and again, with a changed token in each repetition."""

    def _logits(self, seq: int) -> int:
        seen = self.seen(seq)
        if len(seen) % 41 == 0 or len(seen) < 40:
            return super()._logits(seq)
        return self.alphabet.index(seen[-40][1]) * self._eos_every + 1


async def test_a_reply_that_repeats_its_prompt_is_drafted_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "MIN_GAIN", -100.0)
    prompt, replies = string.ascii_lowercase + string.ascii_lowercase[:14], []
    for max_draft in (0, 7):
        async with running(CopyingBackend(n_ctx=1024, n_ubatch=64)) as harness:
            steps = Steps(harness.engine)
            await harness.submit("r", prompt, max_tokens=300, sampling=OPEN, max_draft=max_draft)
            replies.append(harness.text("r"))
            assert (steps.counts["drafted"] > 20) == bool(max_draft)
    assert replies[0] == replies[1]


async def test_multi_step_decode_makes_way_for_a_draft() -> None:
    async with running(FakeBackend()) as harness:
        await harness.submit("r", "a prompt", max_tokens=2, sampling=OPEN)
        assert not harness.engine._needs_plan()
        harness.engine.scheduler.has_drafts = True
        assert harness.engine._needs_plan()
