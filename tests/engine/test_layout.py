"""The engine partitions the pool for requests that share little, and unifies it again for a long one."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec
import pytest

from llamaslot.base.adapters import applied
from llamaslot.base.commands import ClearCache, ContextShift, InspectEngine
from llamaslot.base.events import Finished, Started
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.model import KvCost
from llamaslot.base.stats import EngineState
from llamaslot.kvcache.cache_settings import Budgets, cache_settings
from llamaslot.scheduler.admission import MAX_CANDIDATES
from llamaslot.text.grammars.json_schema import json_schema_constraint
from tests.engine.harness import Harness, alone, running
from tests.fake_backend import FakeBackend

COST = KvCost(100, 10.0, prefill_us=1e3, save_us=0.1, first_save_us=0.1, load_us=0.1)
"""Each cell of another request makes a token take 90 us longer, and to save and load a token takes 0.2 us."""
RAM = {"ram_bytes": 10**6}
PROMPTS = [letter * 40 for letter in "abc"]


class Backend(FakeBackend):
    """Four slots in a pool of 256 cells, or 64 for each; counts the layouts that it is given."""

    def __init__(self, *, lacks_memory: bool = False, cost: KvCost | None = COST, **shape: int) -> None:
        super().__init__(may_partition=True, **shape)
        self.info = msgspec.structs.replace(self.info, kv_cost=cost)
        self.lacks_memory = lacks_memory
        self.layouts: list[bool] = []

    def set_layout(self, *, unified: bool) -> None:
        self.layouts.append(unified)
        if self.lacks_memory:
            raise MemoryError("no memory for another context")
        super().set_layout(unified=unified)


async def answers(engine: Harness, prompts: list[str], eos_every: int = 40) -> list[Finished]:
    """Answers to prompts that come at once, each compared with that of an engine of its own."""
    names = [f"{len(engine.events)} {i}" for i in range(len(prompts))]
    ends = await asyncio.gather(*map(engine.submit, names, prompts))
    for name, prompt, end in zip(names, prompts, ends, strict=True):
        assert isinstance(end, Finished), end
        assert engine.text(name) == await alone(prompt, FakeBackend(eos_every=eos_every))
    return [end for end in ends if isinstance(end, Finished)]


async def test_requests_that_share_nothing_get_a_part_each() -> None:
    backend = Backend()
    async with running(backend, **RAM) as engine:
        await answers(engine, PROMPTS)
        assert backend.layouts == [False]
        await answers(engine, PROMPTS[:1])
        ends = await answers(engine, [prompt + "d" for prompt in PROMPTS])
        assert backend.layouts == [False]
        assert min(end.progress.n_cached for end in ends) >= 40
        state = await engine.ask(InspectEngine())
        assert isinstance(state, EngineState)
        assert (state.cache.layout_changes, state.cache.preemptions) == (1, 0)


@pytest.mark.parametrize("invocation", [b"", b"!"])
@pytest.mark.parametrize("is_empty", [True, False])
async def test_requests_with_the_same_adapters_run_in_adjacent_parts(*, is_empty: bool, invocation: bytes) -> None:
    """llama.cpp computes those in one pass, and those of other adapters in another step.

    With an invocation all name the same adapter, and half of them invoke it.
    """
    backend = Backend(n_adapters=2, n_slots=8, n_ctx=512, invocation=invocation)
    one, two = [applied(backend.info.adapters, scales) for scales in ((0.0, 1.0), (1.0, 0.0))]
    prompts = {name: name * 30 + invocation.decode() * (name in "aceg") for name in "abcdefgh"}
    async with running(backend, **RAM) as engine:
        await answers(engine, [letter * 40 for letter in "ijklmnop"])
        assert backend.layouts == [False]
        if is_empty:
            await engine.ask(ClearCache())
        given, slots = list(zip(prompts, [one, one if invocation else two] * 4, strict=True)), {}
        ends = [engine.submit(name, prompts[name], max_tokens=20, adapters=adapters) for name, adapters in given]
        for (name, adapters), end in zip(given, ends, strict=True):
            finished = await end
            assert isinstance(finished, Finished)
            slots[name] = finished.progress.slot
            fake = FakeBackend(n_adapters=2, invocation=invocation)
            expected = await alone(prompts[name], fake, max_tokens=20, adapters=adapters)
            assert engine.text(name) == expected
        names = sorted(slots, key=slots.__getitem__)
        n_passes = 1 + sum((a in "aceg") != (b in "aceg") for a, b in pairwise(names))
        assert n_passes == 2 if is_empty else n_passes <= 3, slots


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_request_that_is_longer_than_a_part_unifies_the_pool(*, is_first: bool) -> None:
    backend = Backend()
    async with running(backend, **RAM) as engine:
        await answers(engine, PROMPTS)
        long = "e" * 120
        ends = await answers(engine, [long, *PROMPTS] if is_first else [*PROMPTS, long])
        assert backend.layouts[:2] == [False, True]
        assert sum(end.progress.n_cached >= 39 for end in ends) == 3, "what had to leave the pool was in RAM"


async def test_a_long_request_takes_no_slot_of_running_ones() -> None:
    """It waits while no slot is free, and then the others stay in theirs."""
    backend = Backend()
    backend._eos_every = 10**9
    async with running(backend, **RAM) as engine:
        streams = [engine.submit(f"stream {i}", letter * 20, max_tokens=30) for i, letter in enumerate("abcd")]
        while not backend.layouts:
            await asyncio.sleep(0)
        long = await engine.submit("long", "e" * 120)
        ends = await asyncio.gather(*streams)
        assert isinstance(long, Finished)
        assert engine.text("long") == await alone("e" * 120, FakeBackend(eos_every=10**9))
        for letter, end in zip("abcd", ends, strict=True):
            assert isinstance(end, Finished)
            name = f"stream {'abcd'.index(letter)}"
            cold = await alone(letter * 20, FakeBackend(eos_every=10**9), max_tokens=30)
            assert engine.text(name) == cold
            assert end.progress.n_prompt_computed <= end.progress.n_prompt, "computed twice"
            assert sum(isinstance(event, Started) for event in engine.events[name]) <= 1
        assert engine.engine.scheduler.admission.n_preempted == 0


async def test_a_long_request_that_is_next_does_not_stop_the_others() -> None:
    """It is its client's turn, though more requests than there are slots came before it."""
    async with running(Backend(), **RAM) as engine:
        await answers(engine, PROMPTS)
        first = [engine.submit(f"first {letter}", letter * 30, client="x") for letter in "abcd"]
        later = [engine.submit(f"later {letter}", letter * 30, client="x") for letter in "efghij"]
        long = engine.submit("long", "k" * 120, client="y")
        async with asyncio.timeout(20):
            ends = await asyncio.gather(*first, *later, long)
        assert all(isinstance(end, Finished) for end in ends)


@pytest.mark.slow
async def test_many_long_requests_do_not_stop_shorter_ones_with_longer_prefixes() -> None:
    """Only the oldest `MAX_CANDIDATES` are looked at, which are all long."""
    async with running(Backend(), **RAM) as engine:
        await answers(engine, PROMPTS)
        first = [engine.submit(f"first {letter}", letter * 30, max_tokens=20) for letter in "abcd"]
        while len(engine.engine.scheduler.running) < 4:
            await asyncio.sleep(0)
        longs = [engine.submit(f"long {i}", f"{i:04d}" * 30) for i in range(MAX_CANDIDATES + 6)]
        shorts = [engine.submit(f"short {letter}", letter * 30 + f"z{letter}") for letter in "abcd"]
        async with asyncio.timeout(30):
            ends = await asyncio.gather(*first, *longs, *shorts)
        assert all(isinstance(end, Finished) for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("n_shared", [0, 16])
async def test_a_few_tokens_in_common_cost_no_more_than_themselves_after_a_change(n_shared: int) -> None:
    """They are resident in another slot after the first one has its KV again, and not worth a copy."""
    cost = KvCost(100, 10.0, prefill_us=1e3, save_us=20, first_save_us=20, load_us=20)
    backend = Backend(cost=cost, n_ctx=8192, n_ubatch=512)
    backend._eos_every = 10**9
    async with running(backend, **RAM) as engine:
        engine.engine.scheduler.keeps_layout = True
        histories = ["S" * n_shared + letter * 1500 for letter in "abcd"]
        await asyncio.gather(*(engine.submit(f"first {each[-1]}", each) for each in histories))
        engine.engine.scheduler.keeps_layout = False
        later = [each + "X" * 60 for each in histories]
        ends = await asyncio.gather(*(engine.submit(f"then {each[-61]}", each) for each in later))
        assert backend.layouts == [False]
        for each, end in zip(later, ends, strict=True):
            assert isinstance(end, Finished)
            assert end.progress.n_prompt_computed <= 61 + n_shared
            cold = FakeBackend(eos_every=10**9, n_ctx=8192)
            assert engine.text(f"then {each[-61]}") == await alone(each, cold)


async def test_long_requests_make_the_next_partition_rarer() -> None:
    backend = Backend()
    async with running(backend, **RAM) as engine:
        layout = engine.engine.scheduler._layout
        for i in range(3):
            await answers(engine, [letter * 40 + "x" * i for letter in "abc"])
            await answers(engine, ["e" * (100 + i)])
        assert backend.layouts == [False, True] * 3
        assert layout._n_changes == 2 * 2**3


@pytest.mark.parametrize(("n_each", "layouts"), [(60, []), (200, [False])])
async def test_replies_that_are_longer_than_expected_partition_the_pool(n_each: int, layouts: list[bool]) -> None:
    """For 64 tokens of each, as many as are expected, a change does not pay; for twice as many it does."""
    backend = Backend(n_ctx=4096)
    backend._eos_every = 10**9
    backend.info = msgspec.structs.replace(backend.info, context_ms=3500.0)
    async with running(backend, **RAM) as engine:
        # At first 3 * 104 tokens meet 208 cells of others, for 90 us each: 5.8 s, less than two changes take.
        async with engine.held():
            ends = [engine.submit(each, each, max_tokens=n_each) for each in PROMPTS]
        for each, end in zip(PROMPTS, ends, strict=True):
            assert isinstance(await end, Finished)
            cold = FakeBackend(eos_every=10**9, n_ctx=4096)
            assert engine.text(each) == await alone(each, cold, max_tokens=n_each)
        assert backend.layouts == layouts


async def test_a_reply_may_outgrow_its_part() -> None:
    backend = Backend()
    backend._eos_every = 10**9
    async with running(backend, **RAM) as engine:
        await answers(engine, PROMPTS, eos_every=10**9)
        assert backend.layouts == [False]
        cold = FakeBackend(eos_every=10**9)
        end = await engine.submit("long", "f" * 50, max_tokens=100)
        assert isinstance(end, Finished)
        assert end.progress.n_generated == 100
        assert engine.text("long") == await alone("f" * 50, cold, max_tokens=100)
        assert backend.info.unified


async def test_the_pool_stays_as_it_is_beside_a_request_whose_context_was_shifted() -> None:
    """What it has left can be neither saved nor loaded."""
    backend = Backend()
    backend.info = msgspec.structs.replace(backend.info, n_ctx_slot=64)
    async with running(backend, **RAM) as engine:
        fields = {"sampling": Sampling(temperature=0.0, ignore_eos=True), "shift": ContextShift(is_on=True)}
        long = engine.submit("long", "f" * 40, max_tokens=1200, **fields)
        while not any(request.n_discarded for request in engine.engine.scheduler.running):
            await asyncio.sleep(0)
        await answers(engine, PROMPTS)
        assert not long.done()
        assert not backend.layouts
        assert isinstance(await long, Finished)
        await answers(engine, [prompt + "h" for prompt in PROMPTS])
        assert backend.layouts == [False]


async def test_forced_tokens_beyond_a_context_that_is_shifted_fit_into_a_part() -> None:
    backend = Backend()
    backend.info = msgspec.structs.replace(backend.info, n_ctx_slot=64)
    properties = {"a": {"const": "0123456789" * 12}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    constraint = json_schema_constraint(schema, "json_schema", compact=True)
    async with running(backend, **RAM) as engine:
        await answers(engine, PROMPTS)
        assert backend.layouts == [False]
        fields = {"shift": ContextShift(is_on=True), "constraint": constraint}
        end = await engine.submit("long", "f" * 40, max_tokens=-1, **fields)
        assert isinstance(end, Finished)
        assert end.truncated
        assert backend.layouts == [False]


async def test_the_pool_stays_as_it_is() -> None:
    """For requests that share most of their tokens, for single ones, and while costs are not known."""
    for prompts, cost in (([f"{'g' * 60}{i}" for i in range(4)], COST), (PROMPTS[:1], COST), (PROMPTS, None)):
        backend = Backend(cost=cost)
        async with running(backend, **RAM) as engine:
            await answers(engine, prompts)
            assert not backend.layouts
    backend = Backend()
    async with running(backend) as engine:
        await answers(engine, PROMPTS)
        assert not backend.layouts, "without RAM everything would be lost"


async def test_a_change_for_which_there_is_no_memory_is_not_tried_again() -> None:
    backend = Backend(lacks_memory=True)
    async with running(backend, **RAM) as engine:
        await answers(engine, PROMPTS)
        await answers(engine, [prompt + "h" for prompt in PROMPTS])
        assert backend.layouts == [False]
        assert backend.info.unified


def test_the_layout_is_fixed_where_slots_are_saved() -> None:
    budgets = Budgets(ram_bytes=10**6)
    assert cache_settings(Backend(), budgets, None, gap_ms=100.0).part_cells == 64
    assert not cache_settings(Backend(), budgets, None, gap_ms=100.0, has_slot_files=True).part_cells
