"""A prompt's tokens are scored once each, whatever happens to the steps that compute them."""

from __future__ import annotations

import pytest

from llamaslot.base.backend import Status
from llamaslot.base.events import Failed, Finished, Output
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import TokenProb
from tests.engine.harness import Harness, running
from tests.fake_backend import FakeBackend, FakeVocab, prompt_score

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


def scored(harness: Harness, name: str) -> list[TokenProb]:
    outputs = [event for event in harness.events[name] if isinstance(event, Output)]
    return [row for event in outputs for row in event.prompt_probs or ()]


def expected(prompt: str, n_top: int) -> list[tuple[int, float | None, list[float]]]:
    tokens = FakeVocab().tokenize(prompt, add_special=True, parse_special=True).tolist()
    pairs = list(enumerate(tokens))
    scores = [prompt_score(pairs[:i], tokens[i], n_top) for i in range(1, len(tokens))]
    return [(tokens[0], None, []), *((each.token, each.value, list(each.top_values)) for each in scores)]


def plain(rows: list[TokenProb]) -> list[tuple[int, float | None, list[float]]]:
    return [(row.token, row.value, [top.value for top in row.top if top.value is not None]) for row in rows]


async def test_all_scores_come_before_the_first_text() -> None:
    async with running(FakeBackend()) as harness:
        await harness.submit("r", "some prompt", prompt_probs=2, sampling=ENDLESS)
        outputs = [event for event in harness.events["r"] if isinstance(event, Output)]
        kinds = [event.prompt_probs is None for event in outputs]
        assert kinds == sorted(kinds)
        assert plain(scored(harness, "r")) == expected("some prompt", 2)


async def test_preempted_prompts_are_scored_once() -> None:
    backend = FakeBackend(n_ctx=180, n_slots=3, n_spare_rows=4)
    async with running(backend) as harness:
        names = {name: name * 20 for name in "abc"}
        async with harness.held():
            ends = [
                harness.submit(name, prompt, prompt_probs=1, max_tokens=100, sampling=ENDLESS)
                for name, prompt in names.items()
            ]
        for end in ends:
            assert isinstance(await end, Finished)
        assert harness.engine.scheduler.admission.n_preempted > 0
        for name, prompt in names.items():
            assert plain(scored(harness, name)) == expected(prompt, 1)


@pytest.mark.slow
@pytest.mark.parametrize("status", [Status.FATAL, Status.ABORTED, Status.INVALID, Status.NO_CELLS])
@pytest.mark.parametrize("n_applied", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 2, 4])
async def test_what_a_failed_step_computed_is_scored_all_the_same(
    status: Status, n_applied: int, after: int
) -> None:
    backend = FakeBackend(n_spare_rows=7)
    backend.failures.extend([*[(Status.OK, 9)] * after, (status, n_applied)])
    async with running(backend) as harness:
        # A request that fails alone in its step fails for good.
        async with harness.held():
            ends = [harness.submit("beside", "and a text that is not scored", max_tokens=40, sampling=ENDLESS)]
            prompts = {"a": "a prompt of some length", "b": "b another one, longer than it"}
            ends += [harness.submit(name, prompt, prompt_probs=0) for name, prompt in prompts.items()]
        for end in ends:
            assert isinstance(await end, Finished)
        assert not backend.failures
        for name, prompt in prompts.items():
            assert plain(scored(harness, name)) == expected(prompt, 0)


async def test_a_prompt_with_invalid_logits_fails() -> None:
    backend = FakeBackend(n_spare_rows=6)
    backend.poison.add(ord("!"))
    async with running(backend) as harness:
        for max_tokens in (0, 4):
            name = f"bad {max_tokens}"
            end = await harness.submit(
                name, "a long text! and what follows it", prompt_probs=0, max_tokens=max_tokens
            )
            assert isinstance(end, Failed)
        assert isinstance(await harness.submit("good", "a long text", prompt_probs=0), Finished)
        assert plain(scored(harness, "good")) == expected("a long text", 0)


async def test_completions_of_one_prompt_are_each_scored() -> None:
    async with running(FakeBackend()) as harness:
        names = ["r-0", "r-1"]
        ends = [harness.submit(name, "the prompt", prompt_probs=0, group="r") for name in names]
        for end in ends:
            await end
        for name in names:
            assert plain(scored(harness, name)) == expected("the prompt", 0)
