"""Vectors of prompts are those of all their tokens, whatever was reused, and no token is computed twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest

from llamaslot.base.backend import Decoded, Draws, Run, Status
from llamaslot.base.commands import VectorParams
from llamaslot.base.events import Cancelled, Event, Failed, Finished
from llamaslot.base.model import StateKind
from llamaslot.engine.vectors import formed
from tests.conftest import new_seed
from tests.engine.harness import Harness, running
from tests.fake_backend import BOS, N_VECTOR, FakeBackend, cold_vector

RAW = VectorParams()
HEAD = "Represent this sentence for searching relevant passages in a library of books about ships and the sea: "
"""Longer than the shortest prefix that is worth waiting for."""


def embedder(**fields: object) -> FakeBackend:
    return FakeBackend(pooling="last", **{"n_ctx": 1024, "n_reserved": 6, "n_ubatch": 64, **fields})


def numbers(end: Event) -> list[float]:
    assert isinstance(end, Finished), end
    return list(np.frombuffer(end.vector, dtype="<f4").tolist())


def send(harness: Harness, name: str, prompt: str, **fields: object) -> asyncio.Future[Event]:
    return harness.submit(name, prompt, max_tokens=0, **{"vector": RAW, **fields})


def expected(prompt: str) -> list[float]:
    return cold_vector([BOS, *prompt.encode()])


async def embed(harness: Harness, name: str, prompt: str, **fields: object) -> Finished:
    end = await send(harness, name, prompt, **fields)
    assert isinstance(end, Finished), end
    assert numbers(end) == expected(prompt)
    return end


@pytest.mark.parametrize("kind", [StateKind.NONE, StateKind.RECURRENT])
async def test_the_same_text_again_computes_its_last_token(kind: StateKind) -> None:
    backend = embedder(kind=kind)
    async with running(backend, debug_invariants=True) as harness:
        first = await send(harness, "first", HEAD)
        again = await send(harness, "again", HEAD)
        assert numbers(first) == numbers(again)
        assert len(numbers(first)) == N_VECTOR
        assert isinstance(again, Finished)
        assert again.progress.n_prompt_computed + again.progress.n_cached == again.progress.n_prompt
        if kind is StateKind.NONE:
            assert again.progress.n_prompt_computed == 1
            assert numbers(first) == expected(HEAD)
        assert (again.content, again.tokens, again.generated) == ("", (), None)


@pytest.mark.parametrize("n_texts", [1, 12, 24])
async def test_what_texts_share_is_computed_once(n_texts: int) -> None:
    texts = [f"{HEAD}{chr(ord('A') + i)}{'and so on ' * (i % 4)}" for i in range(n_texts)]
    async with running(embedder(), debug_invariants=True) as harness:
        ends = await asyncio.gather(*(send(harness, str(i), text) for i, text in enumerate(texts)))
        for text, end in zip(texts, ends, strict=True):
            assert numbers(end) == expected(text)
        computed = [end.progress.n_prompt_computed for end in ends if isinstance(end, Finished)]
        assert sum(computed) == len(HEAD) + 1 + sum(len(text) - len(HEAD) for text in texts)


@pytest.mark.parametrize("fields", [{"ram_bytes": 10**6}, {"ram_bytes": 0}])
async def test_vectors_of_prefixes_from_anywhere_are_those_of_cold_runs(fields: dict[str, int]) -> None:
    backend = embedder(n_ctx=256, n_slots=2, n_reserved=1)
    async with running(backend, debug_invariants=True, **fields) as harness:
        texts = [f"{i} is where this one begins. " * 4 for i in range(4)]
        for turn in range(3):
            for i, text in enumerate(texts):
                await embed(harness, f"{i} {turn}", text + "and more " * turn)
        other = await embed(harness, "private", texts[0], cache_prompt=False)
        assert other.progress.n_cached == 0
        salted = await embed(harness, "salted", texts[3], cache_salt="team")
        assert (salted.progress.n_cached, salted.progress.miss) == (0, "salted")


async def test_a_text_beside_replies_does_not_count_as_a_stream() -> None:
    backend = embedder()
    async with running(backend) as harness:
        await embed(harness, "first", HEAD)
        seen: list[bool] = []
        plan = harness.engine.scheduler.plan

        def planned(now: float) -> object:
            made = plan(now)
            seen.append(harness.engine.scheduler.cache.has_decodes)
            return made

        harness.engine.scheduler.plan = planned  # type: ignore[method-assign, assignment]
        await embed(harness, "again", HEAD)
        assert seen
        assert not any(seen)


async def test_numbers_that_are_not_finite_fail_only_their_request() -> None:
    backend = embedder()
    backend.poison = {ord("!")}
    async with running(backend, debug_invariants=True) as harness:
        bad, good = await asyncio.gather(send(harness, "bad", HEAD + "!"), send(harness, "good", HEAD + "?"))
        assert isinstance(bad, Failed)
        assert bad.error.type == "server_error"
        assert numbers(good) == expected(HEAD + "?")


async def test_bad_kv_is_dropped_and_the_text_computed_again() -> None:
    backend = embedder()
    async with running(backend, debug_invariants=True) as harness:
        for name in "abc":
            await embed(harness, name, f"{HEAD}{name} and more")
        backend.damage(50)
        assert (await embed(harness, "after", HEAD + "d and more")).progress.n_cached == 0
        assert (await embed(harness, "again", HEAD + "e and more")).progress.n_cached == 0
        assert (await embed(harness, "good", HEAD + "f and more")).progress.n_cached >= len(HEAD)


async def test_a_failed_step_is_computed_again_for_each_text_alone() -> None:
    backend = embedder()
    steps: list[list[int]] = []
    decode = backend.decode

    def recorded(runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        steps.append([run.seq for run in runs])
        return decode(runs, draws)

    backend.decode = recorded  # type: ignore[method-assign]
    async with running(backend, debug_invariants=True) as harness:
        backend.failures.append((Status.FATAL, 1))
        texts = [f"{i} has nothing in common" for i in range(3)]
        async with harness.held():
            futures = [send(harness, str(i), text) for i, text in enumerate(texts)]
        for text, end in zip(texts, await asyncio.gather(*futures), strict=True):
            assert numbers(end) == expected(text)
        assert len(steps[0]) == 3
        assert [len(each) for each in steps[1:]] == [1, 1, 1]
        assert {seq for each in steps[1:] for seq in each} == set(steps[0])
        backend.failures.append((Status.FATAL, 0))
        failed = await send(harness, "alone", "and this fails alone")
        assert isinstance(failed, Failed)
        assert "FATAL" in failed.error.message
        await embed(harness, "later", "and this fails alone")


class Faults:
    """Decodes that fail, and requests that are cancelled, at random; `ended` says which ends they explain."""

    def __init__(self, harness: Harness, backend: FakeBackend, chance: random.Random) -> None:
        self._harness, self._backend, self._chance = harness, backend, chance
        self._cancelled: set[str] = set()
        self._statuses: list[Status] = []

    async def draw(self, name: str, n_applied: int) -> None:
        """Inject what is to happen after a request was sent."""
        if self._chance.random() < 0.1:
            # The engine ends after the third one in a row.
            is_fatal = self._chance.random() < 0.5 and self._statuses.count(Status.FATAL) < 2
            self._statuses.append(Status.FATAL if is_fatal else Status.ABORTED)
            self._backend.failures.append((self._statuses[-1], n_applied))
        if self._chance.random() < 0.1:
            self._cancelled.add(name)
            self._harness.cancel(name)
        if self._chance.random() < 0.3:
            await asyncio.sleep(0)

    async def ended(self, futures: dict[str, asyncio.Future[Event]]) -> dict[str, Finished]:
        """Return the requests that finished: all but those cancelled, and at most one for each failed decode."""
        ends = {name: await future for name, future in futures.items()}
        assert {name for name, end in ends.items() if isinstance(end, Cancelled)} <= self._cancelled
        assert sum(isinstance(end, Failed) for end in ends.values()) <= len(self._statuses)
        finished = {name: end for name, end in ends.items() if isinstance(end, Finished)}
        assert len(finished) >= len(ends) - len(self._cancelled) - len(self._statuses) > 0
        return finished


async def test_random_texts_failures_and_cancels_leave_every_vector_right() -> None:
    chance = random.Random(new_seed())
    for _ in range(6):
        backend = embedder(n_ctx=chance.choice((128, 256)), n_slots=chance.randint(1, 4), n_reserved=2)
        async with running(backend, debug_invariants=True, ram_bytes=chance.choice((0, 10**6))) as harness:
            texts = {str(i): "".join(chance.choices("ab", k=chance.randint(1, 100))) for i in range(30)}
            faults = Faults(harness, backend, chance)
            futures: dict[str, asyncio.Future[Event]] = {}
            for name, text in texts.items():
                futures[name] = send(harness, name, text, cache_prompt=chance.random() < 0.9)
                await faults.draw(name, n_applied=chance.randint(0, 1))
            for name, end in (await faults.ended(futures)).items():
                assert numbers(end) == expected(texts[name])


async def test_a_vector_is_cut_before_it_is_normalized() -> None:
    async with running(embedder()) as harness:
        end = await send(harness, "cut", HEAD, vector=VectorParams(2, 3))
        first = np.array(expected(HEAD)[:3])
        assert numbers(end) == pytest.approx((first / np.linalg.norm(first)).tolist(), abs=1e-6)


@pytest.mark.parametrize("p", [-1, 0, 1, 2, 3, 100])
def test_vectors_are_normalized_as_llama_server_does(p: int) -> None:
    values = np.array([3.0, -4.0, 0.5, 0.0], dtype=np.float32)
    got = np.frombuffer(formed(values.tobytes(), VectorParams(p)), dtype="<f4")
    norms = {-1: 1.0, 0: 4 / 32760}
    norm = norms.get(p, float(np.power(np.power(np.abs(values.astype(float)), max(p, 1)).sum(), 1 / max(p, 1))))
    assert got == pytest.approx(values / norm, rel=1e-6)


@pytest.mark.parametrize("p", [-1, 0, 1, 2, 2**31 - 1])
@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-42, 0.0], [3e38, 3e38]])
def test_no_vector_makes_normalizing_fail(p: int, values: list[float]) -> None:
    assert len(formed(np.array(values, dtype="<f4").tobytes(), VectorParams(p))) == 8


@pytest.mark.parametrize("pooling", ["mean", "none", "last"])
async def test_random_inputs_are_computed_whole_and_as_many_at_once_as_fit(pooling: str) -> None:
    chance = random.Random(new_seed())
    for _ in range(6):
        n_ubatch = chance.choice((16, 64))
        backend = FakeBackend(
            pooling=pooling, n_ctx=n_ubatch, n_ubatch=n_ubatch, n_slots=chance.randint(1, 6), n_spare_rows=n_ubatch,
            attends_later=pooling == "last",
        )  # fmt: skip
        async with running(backend, debug_invariants=True) as harness:
            texts = {str(i): "x" * chance.randint(0, n_ubatch - 1) + str(i % 7) for i in range(40)}
            texts = {name: text[-(n_ubatch - 1) :] for name, text in texts.items()}
            faults = Faults(harness, backend, chance)
            futures: dict[str, asyncio.Future[Event]] = {}
            for name, text in texts.items():
                futures[name] = send(harness, name, text)
                await faults.draw(name, n_applied=0)
            for name, end in (await faults.ended(futures)).items():
                tokens = [BOS, *texts[name].encode()]
                assert end.progress.n_prompt_computed >= len(tokens)
                assert end.progress.n_cached == 0
                own = cold_vector(tokens)
                rows = [x for i in range(len(tokens)) for x in cold_vector(tokens[: i + 1])]
                assert numbers(end) == (rows if pooling == "none" else own)
        assert harness.stopped is not None
        assert not harness.stopped.reason
