"""Which slot a request gets where tokens are sampled on the device: changing a sequence's samplers takes time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.events import Finished
from llamaslot.base.generation.sampling import Sampling
from tests.engine.harness import GREEDY, Harness, running

KINDS = {"g": GREEDY, "s": Sampling()}


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[Harness]:
    settings = LlamaSettings(tiny_model, n_ctx=2048, n_slots=2, n_ubatch=32, n_threads=1, backend_sampling=True)
    async with running(LlamaBackend(settings), debug_invariants=True) as engine:
        yield engine


async def slot_of(engine: Harness, name: str, prompt: str, sampling: Sampling) -> int:
    end = await engine.submit(name, prompt, sampling=sampling)
    assert isinstance(end, Finished), end
    return end.progress.slot


def n_changes(engine: Harness) -> int:
    return engine.engine._backend.n_sampler_changes


async def test_two_kinds_of_requests_each_get_the_slot_with_their_samplers(engine: Harness) -> None:
    slots: dict[str, set[int]] = {"g": set(), "s": set()}
    for i, kind in enumerate("gsgssggsssg"):
        sampling = Sampling(seed=i) if kind == "s" else GREEDY
        slots[kind].add(await slot_of(engine, str(i), chr(97 + i) * 20, sampling))
    assert n_changes(engine) == 2
    assert sorted(map(len, slots.values())) == [1, 1]


async def test_a_cached_prefix_comes_before_samplers_that_fit(engine: Harness) -> None:
    first = await slot_of(engine, "1", "a prompt that comes again", GREEDY)
    other = await slot_of(engine, "2", "other text", Sampling())
    assert await slot_of(engine, "3", "a prompt that comes again, with more", Sampling()) == first != other
