"""Random workloads with cancellations and decode failures: reuse never changes an answer, nothing gets lost.

What the fake generates depends on exactly the tokens that a sequence sees, so a greedy request must give the text
that it gives alone, whatever ran beside it, before it, or instead of it for a while.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaslot.base.backend import Status
from llamaslot.base.commands import ContextShift
from llamaslot.base.events import Cancelled, Failed, Finished
from llamaslot.base.generation.sampling import Sampling
from tests.engine.harness import Harness, Threaded, alone, draft_replies, running
from tests.fake_backend import FakeBackend

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
HEADS = ("", "a" * 9, "ab" * 8, "ab" * 8 + "c" * 12, "system prompt ")


@dataclass(frozen=True)
class Job:
    head: str
    tail: str
    max_tokens: int
    cache_prompt: bool
    id_slot: int
    pause: int
    """Turns of the event loop before it is sent."""
    patience: int | None
    """Turns of the event loop after which it is cancelled, None for never."""
    shifts: bool
    """It goes on beyond its context, if the model can, for many more tokens."""

    @property
    def prompt(self) -> str:
        return self.head + self.tail


jobs = st.builds(
    Job,
    head=st.sampled_from(HEADS),
    tail=st.text("abc", min_size=1, max_size=12),
    max_tokens=st.integers(0, 24),
    cache_prompt=st.booleans() | st.just(True),
    id_slot=st.just(-1) | st.integers(0, 1),
    pause=st.integers(0, 30),
    patience=st.none() | st.integers(0, 60),
    shifts=st.sampled_from([False, False, False, True]),
)
failures = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(list(Status)[1:]), st.integers(0, 3)), max_size=6
).filter(lambda faults: sum(status is Status.FATAL for _, status, _ in faults) < 3)
"""Turns of the event loop before each, its status, and the runs that are applied. An engine that fails to compute
three requests in a row ends.
"""


@functools.cache
def cold(prompt: str, max_tokens: int) -> str:
    return asyncio.run(alone(prompt, FakeBackend(n_ctx=96, n_slots=1), max_tokens=max_tokens))


async def run_jobs(
    todo: list[Job],
    faults: list[tuple[int, Status, int]],
    backend: FakeBackend,
    kind: type[Harness] = Harness,
    *,
    n_drafted: tuple[int, int] = (0, 0),
    replies: dict[str, str] | None = None,
    **settings: int,
) -> dict[int, tuple[object, str]]:
    async with running(backend, kind=kind, debug_invariants=kind is Threaded, **settings) as engine:
        draft_replies(engine, n_drafted, replies or {})

        async def run_job(i: int, job: Job) -> None:
            await turns(job.pause)
            fields: dict[str, object] = {"cache_prompt": job.cache_prompt, "id_slot": job.id_slot}
            if job.shifts:
                fields |= {"shift": ContextShift(backend.info.can_trim), "sampling": ENDLESS}
            end = engine.submit(str(i), job.prompt, max_tokens=n_tokens(job), **fields)
            if job.patience is not None:
                await turns(job.patience)
                engine.cancel(str(i))
            await end

        async def inject() -> None:
            for pause, status, n_applied in faults:
                await turns(pause)
                backend.failures.append((status, n_applied))

        await asyncio.gather(inject(), *(run_job(i, job) for i, job in enumerate(todo)))
        backend.failures.clear()
        scheduler = engine.engine.scheduler
        assert not scheduler.queue
        assert not scheduler.running
        async with asyncio.timeout(10):
            while kind is Threaded and not engine.engine._is_checked:
                await asyncio.sleep(0.001)
        assert all(sampler.closed for sampler in backend.samplers)
        return {i: (engine.ends[str(i)].result(), engine.text(str(i))) for i in range(len(todo))}


def n_tokens(job: Job) -> int:
    """The limit of tokens that a job generates."""
    return job.max_tokens * (8 if job.shifts else 1)


async def turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


LAYOUTS = (
    {"n_ctx": 96, "n_reserved": 2},
    {"n_ctx": 96},
    {"n_ctx": 192, "unified": False},
    {"n_ctx": 96, "can_trim": False},
    {"n_ctx": 192, "unified": False, "can_trim": False},
)


STORING = (
    {},
    {"ram_bytes": 10**6, "offload_after": 1},
    {"ram_bytes": 10**6},
    {"ram_bytes": 700, "offload_after": 1},
)


@pytest.mark.parametrize("kind", [Harness, Threaded])
@given(
    todo=st.lists(jobs, min_size=1, max_size=10),
    faults=failures,
    layout=st.sampled_from(LAYOUTS),
    storing=st.sampled_from(STORING),
    n_drafted=st.sampled_from([(0, 0), (7, 0), (3, 4), (0, 2)]),
)
def test_every_answer_is_the_cold_one(
    kind: type[Harness],
    *,
    todo: list[Job],
    faults: list[tuple[int, Status, int]],
    layout: dict[str, float],
    storing: dict[str, int],
    n_drafted: tuple[int, int],
) -> None:
    backend = FakeBackend(n_slots=2, n_ubatch=16, **layout)
    replies = {job.prompt: cold(job.prompt, job.max_tokens) for job in todo}
    run = run_jobs(todo, faults, backend, kind, n_drafted=n_drafted, replies=replies, **storing)
    for i, (end, text) in asyncio.run(run).items():
        job = todo[i]
        if job.shifts:
            if isinstance(end, Finished) and backend.info.can_trim:
                assert end.progress.n_generated == n_tokens(job)
            continue
        expected = cold(job.prompt, job.max_tokens)
        if isinstance(end, Finished):
            assert text == expected, job
            assert end.progress.n_generated <= job.max_tokens
        else:
            assert isinstance(end, Cancelled | Failed)
            assert expected.startswith(text), job
            # A request fails only when its step failed although it ran alone.
            assert isinstance(end, Cancelled) or faults


@given(st.lists(jobs, min_size=2, max_size=8))
def test_prompt_tokens_add_up(todo: list[Job]) -> None:
    """The backend has computed no token that no request reported as computed."""
    backend = FakeBackend(n_ctx=1024, n_slots=4)
    results = asyncio.run(run_jobs(todo, [], backend))
    computed = 0
    for end, _ in results.values():
        assert isinstance(end, Finished | Cancelled)
        if end.progress is None:
            continue
        p = end.progress
        assert p.n_cached + p.n_prompt_computed == p.n_prompt or isinstance(end, Cancelled)
        computed += p.n_prompt_computed + max(0, p.n_generated - 1)
    # Without preemption or failures each token is computed once, but for the last one a request sampled; a
    # cancelled request may have had one more step.
    assert computed <= backend.n_decoded <= computed + len(todo)
