"""The engine on a host without free memory: what cannot be offloaded is computed again, and replies stay right."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from llamaslot.backend.disk import DiskStore
from llamaslot.base.backend import Run
from llamaslot.base.commands import ClearCache, GenerateParams, SlotActionDone
from llamaslot.base.errors import ErrorInfo
from llamaslot.base.events import Finished
from llamaslot.base.kv_ops import Copy, Free, Load, NotLoadedError, NotSavedError, Operation, Remove, Save, Share
from llamaslot.base.tokens import TokenizedPrompt, packed
from llamaslot.kvcache.tiers import pacing
from llamaslot.scheduler.request import Request
from llamaslot.scheduler.step import StepPlan, Work, apply, next_decode_step
from tests.conftest import LONG
from tests.engine.harness import GREEDY, alone, running
from tests.engine.test_slot_actions import served
from tests.fake_backend import FakeBackend

PROMPTS = [f"{i} is where this one begins. " * 12 for i in range(3)]


class Short(FakeBackend):
    """A backend that saves nothing while memory is short."""

    is_short = True

    def change(self, operation: Operation) -> None:
        """Refuse to save."""
        if self.is_short and isinstance(operation, Save):
            raise NotSavedError(operation.segment)
        super().change(operation)


async def test_a_prefix_that_could_not_be_offloaded_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "RETRY_DELAY_S", 0.0)
    backend = Short(n_slots=2, n_ctx=768, n_reserved=2)
    store = DiskStore(tmp_path)
    store.open(b"k" * 32, 10**7)
    async with running(backend, debug_invariants=True, disk=store, ram_bytes=10**6) as engine:
        tiers = engine.engine.scheduler.cache._tiers
        assert tiers is not None
        computed = []
        for turn in range(3):
            backend.is_short = turn == 0
            for i, prompt in enumerate(PROMPTS):
                end = await engine.submit(f"{turn}-{i}", prompt)
                assert isinstance(end, Finished)
                assert engine.text(f"{turn}-{i}") == await alone(prompt, FakeBackend(n_slots=1, n_ctx=768))
                computed.append(end.progress.n_prompt_computed)
            assert bool(tiers.ram.n_tokens) != backend.is_short
        assert computed[3] > 1, "the first was not offloaded"
        assert computed[6:] == [1, 1, 1]
    store.close()
    assert engine.stopped is not None
    assert not engine.stopped.reason


def test_a_failed_save_that_the_same_plan_discards_is_not_reported() -> None:
    backend = Short(n_slots=1, n_ctx=64, n_reserved=1)
    tokens = np.arange(10, dtype=np.int32)
    backend.decode([Run(0, 0, tokens, n_outputs=0)])
    operations = [Save(0, 0, 0, 5), Save(1, 0, 5, 10), Free(0), Remove(0, 0)]
    result = apply(StepPlan(operations), backend, lambda: 0.0)
    assert result.unsaved == {1}
    assert backend.seq_len(0) == 0


@pytest.mark.slow
async def test_replies_to_bursts_are_right_with_few_sequence_ids_and_failing_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "RETRY_DELAY_S", 0.0)
    for seed in range(100 if LONG else 10):
        chance = random.Random(seed)
        backend = Short(n_slots=chance.choice([2, 3, 4]), n_ctx=512, n_reserved=chance.choice([0, 1, 2]))
        heads = ["".join(chance.choices("abcdef", k=chance.choice([40, 90, 160]))) for _ in range(5)]
        async with running(backend, debug_invariants=True, ram_bytes=10**6, idle_cells=0) as engine:
            for burst in range(8):
                prompts = [chance.choice(heads)[: chance.randint(30, 160)] + "xyz" for _ in range(5)]
                backend.is_short = chance.random() < 0.3
                asked = [engine.submit(f"{burst}-{i}", prompt) for i, prompt in enumerate(prompts)]
                for end in await asyncio.gather(*asked):
                    assert isinstance(end, Finished), (seed, end)
            cold = await alone(prompts[0], FakeBackend(n_slots=1, n_ctx=512))
            assert engine.text(f"{burst}-0") == cold
        assert engine.stopped is not None
        assert not engine.stopped.reason


class Failing(FakeBackend):
    """A backend that has no memory for some of the operations, by kind, while `chance` says so."""

    def __init__(self, **shape: int) -> None:
        super().__init__(**shape)
        self.kinds: tuple[type[Operation], ...] = ()
        self.chance = random.Random(0)
        self.failed: Counter[str] = Counter()

    def change(self, operation: Operation) -> None:
        """Fail before anything is done."""
        if isinstance(operation, self.kinds) and self.chance.random() < 0.3:
            self.failed[type(operation).__name__] += 1
            match operation:
                case Save():
                    raise NotSavedError(operation.segment)
                case Load():
                    raise NotLoadedError(operation.parts[0][0])
            raise MemoryError
        super().change(operation)


async def test_no_operation_without_memory_ends_the_engine_or_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "RETRY_DELAY_S", 0.0)
    failed: Counter[str] = Counter()
    for seed in range(300 if LONG else 4):
        chance = random.Random(seed)
        backend = Failing(n_slots=chance.choice([2, 3, 4]), n_ctx=512, n_reserved=chance.choice([0, 1, 2]))
        backend.chance = chance
        heads = ["".join(chance.choices("abcdef", k=chance.choice([40, 90, 160]))) for _ in range(5)]
        idle_cells = chance.choice([0, None])
        async with running(backend, debug_invariants=True, ram_bytes=10**6, idle_cells=idle_cells) as engine:
            for burst in range(8):
                prompts = [chance.choice(heads)[: chance.randint(30, 160)] + "xyz" for _ in range(5)]
                backend.kinds = tuple(chance.sample([Save, Load, Copy, Share, Remove], chance.choice([0, 1, 5])))
                asked = [engine.submit(f"{burst}-{i}", prompt) for i, prompt in enumerate(prompts)]
                for end in await asyncio.gather(*asked):
                    assert isinstance(end, Finished), (seed, end)
                for i in range(5) if LONG else (0,):
                    cold = await alone(prompts[i], FakeBackend(n_slots=1, n_ctx=512))
                    assert engine.text(f"{burst}-{i}") == cold, seed
        assert engine.stopped is not None
        assert not engine.stopped.reason
        failed += backend.failed
    assert failed.keys() >= {"Save", "Load", "Copy", "Remove"}, "a kind never failed"


async def test_after_a_load_without_memory_prompts_are_computed_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    backend = Failing(n_slots=2, n_ctx=768, n_reserved=2)
    async with running(backend, debug_invariants=True, ram_bytes=10**6, clock=lambda: now) as engine:

        async def run(name: str, prompt: str) -> int:
            end = await engine.submit(name, prompt)
            assert isinstance(end, Finished)
            assert engine.text(name) == await alone(prompt, FakeBackend(n_slots=1, n_ctx=768))
            return end.progress.n_prompt_computed

        for i, prompt in enumerate(PROMPTS):
            await run(str(i), prompt)
        backend.kinds, backend.chance = (Load,), Always()
        assert await run("failed", PROMPTS[0]) > 200
        assert backend.failed == {"Load": 1}
        assert await run("paused", PROMPTS[1]) > 200
        assert backend.failed == {"Load": 1}, "tried again at once"
        backend.kinds = ()
        now += pacing.RETRY_DELAY_S
        assert await run("again", PROMPTS[2]) == 1


async def test_a_copy_between_partitions_without_memory_is_computed_instead() -> None:
    backend = Failing(n_slots=2, n_ctx=1024, unified=False)
    async with running(backend, ram_bytes=2**20) as engine:
        head = "a long beginning that both have " * 6
        await engine.submit("one", head + "one", max_tokens=5)
        busy = engine.submit("busy", head + "one and on", max_tokens=200)
        backend.kinds, backend.chance = (Copy,), Always()
        end = await engine.submit("other", head + "two", max_tokens=5)
        assert isinstance(end, Finished)
        assert backend.failed["Copy"] == 1
        await busy


class Always(random.Random):
    """A chance that always comes true."""

    def random(self) -> float:
        """Return the lowest number."""
        return 0.0


def test_what_follows_from_a_failed_operation_is_left_out_and_the_rest_computed() -> None:
    backend = Failing(n_slots=4, n_ctx=64, n_reserved=1)
    tokens = np.arange(10, dtype=np.int32)
    backend.decode([Run(0, 0, tokens, n_outputs=0)])
    backend.change(Save(7, 0, 0, 10))
    backend.kinds, backend.chance = (Load,), Always()
    operations = [Copy(0, 1, 0, 4), Load(1, 4, ((7, 10),)), Copy(1, 2, 0, 10), Save(8, 2, 0, 10), Copy(0, 3, 0, 9)]
    requests = [request_of(i) for i in range(3)]
    runs = [Run(seq, at, tokens[:1], n_outputs=1) for seq, at in ((1, 10), (2, 10), (3, 9))]
    work = [Work(each, run) for each, run in zip(requests, runs, strict=True)]
    result = apply(StepPlan(operations, work, n_extra_steps=5), backend, lambda: 0.0)
    assert (result.incomplete, result.unsaved) == ({1, 2}, {8})
    assert [each.request for (each,) in result.results] == [requests[2]]
    assert [backend.seq_len(seq) for seq in range(4)] == [10, 4, 0, 10]
    assert next_decode_step(StepPlan(work=work, n_extra_steps=5), result, frozenset()) is None
    again = apply(StepPlan([*operations[1:3], Remove(1, 0), Remove(2, 0)]), backend, lambda: 0.0)
    assert again.incomplete == frozenset(), "they are empty, as planned"


def request_of(number: int) -> Request:
    prompt = TokenizedPrompt(packed(np.arange(11, dtype=np.int32)))
    return Request(GenerateParams(f"r{number}", sampling=GREEDY), prompt, arrival=number, now=0.0, can_reuse=True)


async def test_a_slot_that_cannot_be_restored_is_told_and_empty(tmp_path: Path) -> None:
    backend = Failing(n_slots=2, n_ctx=4096, n_reserved=4)
    async with served(tmp_path, backend, debug_invariants=True) as engine:
        await engine.complete(PROMPTS[0])
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
        await engine.act(0, "erase")
        await engine.ask(ClearCache())
        backend.kinds, backend.chance = (Load,), Always()
        failed = await engine.act(1, "restore")
        assert isinstance(failed, ErrorInfo)
        assert "memory" in failed.message
        assert backend.seq_len(1) == 0
        backend.kinds = ()
        assert isinstance(await engine.act(1, "restore"), SlotActionDone)
        assert (await engine.complete(PROMPTS[0])).n_prompt_computed == 1


async def test_a_slot_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    class Shorter(Short):
        def change(self, operation: Operation) -> None:
            """Refuse to save all but the first segment."""
            self.is_short = isinstance(operation, Save) and operation.start > 0
            super().change(operation)

    async with served(tmp_path, Shorter(n_slots=2, n_ctx=4096, n_reserved=4), debug_invariants=True) as engine:
        await engine.complete("Some words that are said again and again. " * 30)
        for _ in range(2):
            failed = await engine.act(0, "save")
            assert isinstance(failed, ErrorInfo)
            assert "memory" in failed.message
        await engine.complete("Something else.", slot=1)
        assert all(number >= 0 for number in engine.backend.segments)


async def test_a_failed_save_of_a_slot_can_be_repeated(tmp_path: Path) -> None:
    backend = Short(n_slots=2, n_ctx=4096, n_reserved=4)
    async with served(tmp_path, backend, debug_invariants=True) as engine:
        await engine.complete(PROMPTS[0])
        failed = await engine.act(0, "save")
        assert isinstance(failed, ErrorInfo)
        assert "memory" in failed.message
        backend.is_short = False
        assert isinstance(await engine.act(0, "save"), SlotActionDone)
        assert (await engine.complete(PROMPTS[0])).n_prompt_computed == 1
