"""The engine with images on the fake backend: tiles in steps of their own, and none computed twice."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.base.adapters import applied
from llamaslot.base.cache_ids import MAX_MARKED_FOR_IMAGE
from llamaslot.base.commands import ContextShift, ImagePart, PromptPart, TextPart
from llamaslot.base.events import Cancelled, Failed, Finished
from llamaslot.base.images import ImageLayout, ImageSize
from llamaslot.base.model import Adapter, StateKind
from llamaslot.kvcache.cache_settings import MAX_SEGMENT_TOKENS, CacheSettings
from llamaslot.scheduler import drafter
from llamaslot.scheduler.step import StepPlan
from tests.engine.harness import Harness, alone, running
from tests.engine.test_drafts import Steps
from tests.engine.test_workloads import ENDLESS, failures, turns
from tests.fake_backend import FakeBackend
from tests.scheduler.test_scheduler import Driver

N_CTX = 128


BARE = 7
"""An image whose tile has no delimiters beside it, so that a prompt may end within it."""


def picture(i: int, size: ImageSize | None = None) -> ImagePart:
    """An image; those with higher numbers have more tiles, up to 3."""
    layout = FakeBackend(projector=True).image_layout(size or ImageSize(64 * (i % 3) + 1, i + 1))
    return ImagePart(b"%d" % i, b"%d" % i * 16, ImageLayout((4,)) if i == BARE else layout)


ADAPTERS = tuple(
    Adapter(f"{i}.gguf", f"digest-{i}", 0.0, invocation=tuple(invocation))
    for i, invocation in enumerate((b"ab", b"b", b""))
)
"""Of them, two are active from their invocation on."""


def with_adapters(backend: FakeBackend) -> FakeBackend:
    backend.info = msgspec.structs.replace(backend.info, adapters=ADAPTERS)
    return backend


def parts_of(prompt: str) -> tuple[PromptPart, ...]:
    """Text, in which each digit stands for an image."""
    parts: list[PromptPart] = []
    for letter in prompt:
        if letter.isdigit():
            parts.append(picture(int(letter)))
        elif parts and isinstance(parts[-1], TextPart):
            parts[-1] = TextPart(parts[-1].text + letter)
        else:
            parts.append(TextPart(letter))
    return tuple(parts)


def n_tiles(prompt: str) -> int:
    return sum(
        isinstance(piece, int)
        for each in parts_of(prompt)
        if isinstance(each, ImagePart)
        for piece in each.layout.pieces
    )


def finished(event: object) -> Finished:
    assert isinstance(event, Finished), event
    return event


async def answer(prompt: str, max_tokens: int = 8, kind: StateKind = StateKind.NONE, **fields: Any) -> str:
    """The reply to a prompt by a server that has computed nothing else."""
    backend = with_adapters(FakeBackend(n_ctx=N_CTX, n_slots=1, projector=True, kind=kind))
    return await alone(parts_of(prompt), backend, max_tokens=max_tokens, **fields)


@functools.cache
def cold(prompt: str, max_tokens: int, kind: StateKind, scales: Sequence[float]) -> str:
    return asyncio.run(answer(prompt, max_tokens, kind, adapters=applied(ADAPTERS, scales)))


async def test_no_image_is_encoded_in_the_second_turn_by_another_user_or_from_ram() -> None:
    backend = FakeBackend(n_ctx=N_CTX, projector=True, n_reserved=1)
    async with running(backend, ram_bytes=10**6) as engine:
        first = "look: 2 what is it"
        await engine.submit("1", parts_of(first))
        assert backend.n_tiles_encoded == n_tiles(first) == 3
        second = f"{first}{engine.text('1')} and now"
        again = finished(await engine.submit("2", parts_of(second)))
        assert engine.text("2") == await answer(second)
        other = finished(await engine.submit("3", parts_of("look: 2 another question")))
        assert other.progress.n_cached == len("look: ") + picture(2).layout.n_tokens + len(" ") + 1
        # The pool is full of other prompts: what was in it is in RAM.
        for i in range(4):
            await engine.submit(f"filler {i}", f"{i}" * 100)
        assert engine.engine.scheduler.cache_stats().ram.tokens
        later = finished(await engine.submit("4", parts_of(second)))
        assert later.progress.n_loaded
        assert again.progress.n_prompt_computed < 10
        assert later.progress.n_prompt_computed < 10
        assert backend.n_tiles_encoded == 3


@pytest.mark.parametrize("min_restored", [0, 10**6])
@pytest.mark.parametrize("kind", [each for each in StateKind if each is not StateKind.NONE])
async def test_each_image_can_be_followed_by_another_question_where_a_state_must_be_restored(
    kind: StateKind, min_restored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a text of that length were computed sooner than restored."""
    monkeypatch.setattr(CacheSettings, "min_restored", min_restored)
    backend = FakeBackend(n_ctx=2 * N_CTX, projector=True, kind=kind)
    images = ("look at this: 2 and 5", "look at this: 2 and 5", "look at this: 2")
    async with running(backend, checkpoint_bytes=10**6, checkpoints_on_path=32) as engine:
        for i, question in enumerate((" what is it", " whose is it", ", and what is there")):
            end = finished(await engine.submit(str(i), parts_of(images[i] + question)))
            assert engine.text(str(i)) == await answer(images[i] + question, kind=kind)
            assert backend.n_tiles_encoded == n_tiles(images[0]) == 6
            # The question, and the delimiter before it.
            assert i == 0 or end.progress.n_prompt_computed == len(f"</i>{question}")


async def test_another_image_is_never_reused() -> None:
    backend = FakeBackend(n_ctx=N_CTX, projector=True)
    async with running(backend) as engine:
        await engine.submit("1", parts_of("look: 1 what"))
        other = finished(await engine.submit("2", parts_of("look: 4 what")))
        assert other.progress.n_cached == 1 + len("look: <i>") - MAX_MARKED_FOR_IMAGE
        assert engine.text("2") == await answer("look: 4 what")


async def test_a_match_does_not_end_within_an_image() -> None:
    """Not even where the ids of two images begin alike, as those of an image with other tiles do here."""
    backend = FakeBackend(n_ctx=N_CTX, projector=True)
    async with running(backend) as engine:
        one, longer = picture(5, ImageSize(1, 5)), picture(5, ImageSize(1, 9))
        (_, n_one, _), (_, n_longer, _) = one.layout.pieces, longer.layout.pieces
        assert isinstance(n_one, int)
        assert isinstance(n_longer, int)
        assert n_one < n_longer
        for name, image in (("1", one), ("2", longer)):
            end = finished(await engine.submit(name, (TextPart("look: "), image, TextPart(" what"))))
        assert end.progress.n_cached == len("look: ") + 1 + len("<i>")


async def test_a_prompt_may_end_with_an_image() -> None:
    backend = FakeBackend(n_ctx=N_CTX, projector=True)
    async with running(backend) as engine:
        # Its last tokens are a delimiter. Without it, they are those of a tile.
        bare = ImagePart(b"9", b"9" * 16, ImageLayout((4,)))
        for name in "123":
            end = finished(await engine.submit(name, (TextPart("look: "), bare)))
            assert engine.text(name) == engine.text("1")
        assert end.progress.n_cached == len("look: ") + 1
        both = [engine.submit(name, (TextPart("look, two: "), bare)) for name in "45"]
        await asyncio.gather(*both)
        assert engine.text("4") == engine.text("5")


async def test_tiles_and_tokens_of_other_requests_take_turns() -> None:
    backend = FakeBackend(n_ctx=2 * N_CTX, projector=True)
    async with running(backend) as engine:
        scheduler = engine.engine.scheduler
        plan, steps = scheduler.plan, list[tuple[bool, int]]()

        def planned(now: float) -> StepPlan:
            made = plan(now)
            if made.work:
                steps.append((made.turn.tile is not None, len(scheduler.running)))
                assert made.turn.tile is None or [each.run.tile for each in made.work] == [made.turn.tile]
                assert made.turn.tile is not None or all(each.run.tile is None for each in made.work)
            return made

        scheduler.plan = planned
        stream = engine.submit("stream", "abc", max_tokens=60, sampling=ENDLESS)
        async with asyncio.timeout(10):
            while not engine.tokens("stream"):
                await asyncio.sleep(0)
        steps.clear()
        ends = [engine.submit(str(i), parts_of(f"{'xy'[i]}{2 + 3 * i}22")) for i in range(2)]
        await asyncio.gather(stream, *ends)
        shared = [is_image for is_image, n_running in steps if n_running == 3]
        assert sum(shared) > 4
        assert not any(a and b for a, b in itertools.pairwise(shared)), "streams wait for two tiles"


async def test_an_image_that_cannot_be_encoded_fails_its_request_alone() -> None:
    backend = FakeBackend(n_ctx=2 * N_CTX, projector=True)
    backend.bad_images.add(b"2")
    async with running(backend) as engine:
        ends = [engine.submit(str(i), parts_of(prompt)) for i, prompt in enumerate(("a1b", "a2b", "abc"))]
        good, bad, text = await asyncio.gather(*ends)
        finished(good)
        finished(text)
        assert isinstance(bad, Failed)
        assert engine.text("0") == await answer("a1b")
        assert engine.text("2") == await answer("abc")


async def test_a_context_with_images_is_not_shifted() -> None:
    """Its tiles would be at other places."""
    backend = FakeBackend(n_ctx=N_CTX, n_slots=1, projector=True)
    async with running(backend) as engine:
        prompt, shift = f"{'b' * 80}2 what", ContextShift(is_on=True)
        end = finished(await engine.submit("1", parts_of(prompt), max_tokens=300, sampling=ENDLESS, shift=shift))
        assert (end.reason, end.progress.n_prompt + end.progress.n_generated) == ("limit", N_CTX)
        text = finished(await engine.submit("2", "b" * 80, max_tokens=300, sampling=ENDLESS, shift=shift))
        assert text.progress.n_generated == 300


async def test_a_request_waits_for_no_more_than_what_precedes_an_image_that_differs() -> None:
    """Two images whose ids begin alike: the second request shares the text before, and computes its own image."""
    one, longer = picture(5, ImageSize(1, 5)), picture(5, ImageSize(1, 9))
    prompts = [(TextPart("look at this: " * 6), image, TextPart(" what")) for image in (one, longer)]
    replies = []
    for prompt in prompts:
        replies.append(await alone(prompt, FakeBackend(n_ctx=2 * N_CTX, projector=True), max_tokens=30))
    backend = FakeBackend(n_ctx=4 * N_CTX, projector=True)
    async with running(backend) as engine:
        scheduler, n_running = engine.engine.scheduler, list[int]()
        plan = scheduler.plan

        def planned(now: float) -> StepPlan:
            n_running.append(len(scheduler.running))
            return plan(now)

        scheduler.plan = planned
        async with engine.held():
            ends = [engine.submit(str(i), prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
        first, second = [finished(each) for each in await asyncio.gather(*ends)]
        assert [engine.text("0"), engine.text("1")] == replies
        assert max(first.progress.n_cached, second.progress.n_cached) == 1 + len("look at this: " * 6 + "<i>")
        assert max(n_running) == 2, "it waited for the end of the first reply"


async def test_nothing_is_drafted_from_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the reply repeats all that precedes one."""
    monkeypatch.setattr(drafter, "MIN_GAIN", -100.0)
    backend = FakeBackend(n_ctx=2 * N_CTX, projector=True)
    backend.alphabet = b"y"
    async with running(backend) as engine:
        # What a step costs must be known before anything is drafted.
        await engine.submit("before", "abc", max_tokens=20, sampling=ENDLESS)
        steps, fields = Steps(engine.engine), {"max_tokens": 5, "max_draft": 7, "sampling": ENDLESS}
        end = finished(
            await engine.submit("1", parts_of(f"what does it say, sir {BARE} and what does it sa"), **fields)
        )
        assert steps.counts["longest"] == len(", sir ") - MAX_MARKED_FOR_IMAGE
        assert (engine.text("1"), end.reason) == ("y" * 5, "limit")


def test_a_draft_ends_before_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(n_ctx=N_CTX)
    request = driver.submit("abc", max_tokens=20, max_draft=16)
    drafts = driver.scheduler._drafter
    monkeypatch.setattr(drafts, "max_draft", 16)
    for follows, expected in (([1, 2, -5, 3], [1, 2]), ([-5, 3], None), ([1, 2, 3], [1, 2, 3])):
        monkeypatch.setattr(drafts, "_find", lambda *_, follows=follows: (64, np.array(follows, dtype=np.int32)))
        found = drafts._candidate(request)
        assert (found.follows.tolist() if found is not None else None) == expected


@dataclass(frozen=True)
class Job:
    prompt: str
    max_tokens: int
    cache_prompt: bool
    pause: int
    patience: int | None
    scales: Sequence[float]


jobs = st.builds(
    Job,
    prompt=st.builds(
        "".join,
        st.tuples(
            st.sampled_from(("", "a1", "ab2b", "system 1 prompt 2 ")), st.text("ab0127", min_size=1, max_size=6)
        ),
    ),
    max_tokens=st.integers(0, 16),
    cache_prompt=st.booleans() | st.just(True),
    pause=st.integers(0, 30),
    patience=st.none() | st.integers(0, 60),
    scales=st.sampled_from([(), (), (1.0,), (0.5,), (0.0, 1.0), (1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 0.0, 1.0)]),
)
LAYOUTS: Sequence[dict[str, Any]] = (
    {"n_reserved": 2},
    {},
    {"unified": False, "n_ctx": 2 * N_CTX},
    {"can_trim": False},
    {"projector": "whole", "n_reserved": 2},
    {"projector": "joint", "n_reserved": 2},
    {"projector": "joint", "unified": False, "n_ctx": 2 * N_CTX},
    {"projector": "joint", "kind": StateKind.HYBRID, "n_reserved": 2},
    {"kind": StateKind.WINDOW, "n_reserved": 2},
    {"kind": StateKind.HYBRID, "n_reserved": 2},
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@given(
    todo=st.lists(jobs, min_size=1, max_size=6),
    faults=failures,
    ram=st.sampled_from([{}, {"ram_bytes": 10**6, "offload_after": 1}, {"ram_bytes": 3000}]),
    segment_tokens=st.sampled_from([5, MAX_SEGMENT_TOKENS]),
)
def test_reuse_changes_no_answer(
    layout: dict[str, Any], todo: list[Job], faults: list[Any], ram: dict[str, int], segment_tokens: int
) -> None:
    """Also where segments, of which those of a test have few tokens, begin and end within images.

    Nor where adapters become active within a prompt.
    """
    backend = with_adapters(FakeBackend(**{"n_ctx": N_CTX, "n_slots": 2, "projector": True} | layout))

    async def run() -> Harness:
        async with running(backend, **ram) as engine:

            async def run_job(i: int, job: Job) -> None:
                await turns(job.pause)
                end = engine.submit(
                    str(i),
                    parts_of(job.prompt),
                    max_tokens=job.max_tokens,
                    cache_prompt=job.cache_prompt,
                    adapters=applied(ADAPTERS, job.scales),
                )
                if job.patience is not None:
                    await turns(job.patience)
                    engine.cancel(str(i))
                await end

            async def inject() -> None:
                for pause, status, n_applied in faults:
                    await turns(pause)
                    backend.failures.append((status, n_applied))

            await asyncio.gather(inject(), *(run_job(i, job) for i, job in enumerate(todo)))
            return engine

    with mock.patch.object(CacheSettings, "segment_tokens", segment_tokens):
        engine = asyncio.run(run())
    for i, job in enumerate(todo):
        end, text = engine.ends[str(i)].result(), engine.text(str(i))
        if is_too_long(job):
            assert isinstance(end, Failed | Cancelled)
            continue
        expected = cold(job.prompt, job.max_tokens, layout.get("kind", StateKind.NONE), job.scales)
        if isinstance(end, Finished):
            assert text == expected, job
        else:
            assert expected.startswith(text), job
            # A request fails only when its step failed although it ran alone.
            assert isinstance(end, Cancelled) or faults, end


def is_too_long(job: Job) -> bool:
    """True if the prompt does not fit into a slot."""
    n = sum(len(each.text) if isinstance(each, TextPart) else each.layout.n_tokens for each in parts_of(job.prompt))
    return 1 + n > N_CTX - 1
