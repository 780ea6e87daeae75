"""Shared prefixes are computed once, whichever request asks first: counted at llama_decode.

The figure to reach is the number of distinct prompt prefixes: the nodes of the plain trie of all prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.commands import TokensPart
from llamaslot.base.events import Cancelled, Finished
from llamaslot.base.generation.sampling import Sampling
from tests.engine.harness import Harness, running
from tests.prompt_threads import text_request

Prompt = tuple[int, ...]
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
N_SLOTS = 8

chance = np.random.default_rng(7)


def words(n: int) -> Prompt:
    """Tokens that nothing else shares."""
    return tuple(chance.integers(300, 500, n).tolist())


class Counted:
    """An engine, and how many prompt tokens its requests really sent to llama_decode."""

    def __init__(self, engine: Harness) -> None:
        self.engine = engine
        self.prompts: dict[str, Prompt] = {}
        self.sent: list[tuple[int, int]] = []
        """Sequence and position of every token that llama_decode was given."""

    def ask(self, prompt: Prompt, *, max_tokens: int = 2, **fields: object) -> asyncio.Future[object]:
        """Send a request."""
        name = str(len(self.prompts))
        self.prompts[name] = prompt
        end = self.engine.ends[name] = asyncio.get_running_loop().create_future()
        params = text_request(name, (TokensPart(prompt),), sampling=GREEDY, max_tokens=max_tokens, **fields)
        self.engine.local.send(params)
        return end

    async def ask_all(self, prompts: Sequence[Prompt], **fields: object) -> list[Finished]:
        """Send requests at once and wait for all."""
        ends = await asyncio.gather(*(self.ask(prompt, **fields) for prompt in prompts))
        assert all(isinstance(end, Finished) for end in ends)
        return ends

    @property
    def n_computed(self) -> int:
        """Prompt tokens sent to llama_decode: everything but the generated tokens."""
        ends = [end.result() for end in self.engine.ends.values()]
        generated = sum(max(0, end.progress.n_generated - 1) for end in ends if end.progress)
        computed = sum(end.progress.n_prompt_computed for end in ends if end.progress)
        assert len(self.sent) - generated == computed, "the figures that users see are not those of llama_decode"
        return computed

    @property
    def n_distinct(self) -> int:
        """Nodes of the plain trie of all prompts, and one more for each prompt that was cached whole."""
        trie: dict[tuple[int, int], int] = {}
        whole = 0
        for prompt in self.prompts.values():
            n_before, node = len(trie), 0
            for token in prompt:
                node = trie.setdefault((node, token), len(trie) + 1)
            whole += len(trie) == n_before
        return len(trie) + whole


IN_THE_POOL: dict[str, int] = {}
IN_RAM = {"ram_bytes": 2**30, "offload_after": 1}


@asynccontextmanager
async def counted(
    model: Path, monkeypatch: pytest.MonkeyPatch, storing: dict[str, int] = IN_THE_POOL, **settings: int
) -> AsyncIterator[Counted]:
    """An engine whose idle prefixes stay in the pool, or are in RAM while prompts are computed."""
    chosen = {"n_ctx": 16384, "n_slots": N_SLOTS, "n_ubatch": 512, "n_threads": 1} | settings
    backend = LlamaBackend(LlamaSettings(model, **chosen))
    decode = llama_cpp.llama_decode
    async with running(backend, **storing) as engine:
        counting = Counted(engine)

        def spy(context: object, batch: llama_cpp.llama_batch) -> int:
            counting.sent += [(batch.seq_id[i][0], batch.pos[i]) for i in range(batch.n_tokens)]
            return decode(context, batch)

        monkeypatch.setattr(llama_cpp, "llama_decode", spy)
        yield counting


async def fan_out(asking: Counted) -> None:
    """16 users at once on one long system prompt, cold."""
    system = words(1600)
    await asking.ask_all([system + words(20) for _ in range(16)])


async def branching(asking: Counted) -> None:
    """A conversation that is continued in several ways, each of them again."""
    trunk = words(700)
    await asking.ask_all([trunk])
    branches = [trunk + words(150) for _ in range(4)]
    await asking.ask_all(branches)
    await asking.ask_all([branch + words(40) for branch in branches for _ in range(3)])


async def groups(asking: Counted) -> None:
    """Four groups of users, each with a prompt of its own, all at once."""
    heads = [words(500) for _ in range(4)]
    await asking.ask_all([head + words(20) for _ in range(5) for head in heads])


async def agents(asking: Counted) -> None:
    """A main agent turn by turn, sub-agents that share half of its prompt, and short title requests between."""
    main = words(1500)
    shared = main[:750]
    for _ in range(4):
        await asking.ask_all([main, *(shared + words(60) for _ in range(3)), words(40)])
        main += words(100)


async def conversations(asking: Counted) -> None:
    """Twenty conversations of three turns each on one system prompt, in turn over eight slots."""
    system = words(600)
    talks = [system + words(50) for _ in range(20)]
    for _ in range(3):
        for talk in talks:
            await asking.ask_all([talk])
        talks = [talk + words(30) for talk in talks]


@pytest.mark.slow
@pytest.mark.parametrize("storing", [IN_THE_POOL, IN_RAM], ids=["in the pool", "in RAM"])
@pytest.mark.parametrize("workload", [fan_out, branching, groups, agents, conversations])
async def test_no_prefix_is_computed_twice(
    workload: Callable[[Counted], object],
    storing: dict[str, int],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with counted(tiny_model, monkeypatch, storing) as asking:
        await workload(asking)
        print(f"{workload.__name__}: {asking.n_computed} computed, {asking.n_distinct} distinct")
        assert asking.n_computed <= 1.05 * asking.n_distinct


@pytest.mark.parametrize("n_cancelled", [1, 3])
async def test_a_leader_that_is_cancelled_is_followed_by_another(
    n_cancelled: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with counted(tiny_model, monkeypatch, n_ubatch=128) as asking:
        system = words(1600)
        ends = [asking.ask(system + words(20)) for _ in range(16)]
        for name in map(str, range(n_cancelled)):
            while not any(pos > 300 for _, pos in asking.sent):
                await asyncio.sleep(0)
            asking.engine.cancel(name)
        ends = await asyncio.gather(*ends)
        assert [isinstance(end, Cancelled) for end in ends] == [i < n_cancelled for i in range(16)]
        assert asking.n_computed <= 1.05 * asking.n_distinct


def about_equal(computed: list[int], expected: list[int]) -> bool:
    """True if no more was computed, and no less than random words explain, which may happen to agree."""
    return all(e - 1 <= c <= e for c, e in zip(computed, expected, strict=True))


@pytest.mark.slow
async def test_a_pool_for_two_of_eight_prefixes_loses_none_of_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storing = {"ram_bytes": 2**30}
    async with counted(tiny_model, monkeypatch, storing, n_ctx=3328, n_slots=1) as asking:
        prefixes = [words(1500) for _ in range(8)]
        ends = [(await asking.ask_all([prefix + words(20)]))[0] for _ in range(3) for prefix in prefixes]
        computed = [end.progress.n_prompt_computed for end in ends]
        print(f"pressure: {asking.n_computed} computed, {asking.n_distinct} distinct")
        assert about_equal(computed, [1520] * 8 + [20] * 16)


async def test_fifty_conversations_on_one_prefix_are_stored_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with counted(tiny_model, monkeypatch, IN_RAM, n_ctx=8192, n_slots=2) as asking:
        system = words(1750)
        for _ in range(50):
            await asking.ask_all([system + words(40)])
        await asking.ask_all([words(100)])
        segments = asking.engine.engine.scheduler.cache._tiers
        each = asking.engine.backend.info.segment_size.per_token
        print(f"{segments.ram.n_bytes:,} bytes for {each * segments.ram.n_tokens:,} of distinct tokens")
        assert segments.ram.n_tokens >= 1750 + 50 * 40
        assert segments.ram.n_bytes <= 1.05 * each * asking.n_distinct


@pytest.mark.slow
async def test_twenty_conversations_over_four_slots_and_sixteen_ids_find_their_whole_history(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with counted(tiny_model, monkeypatch, n_slots=4, n_cache_seqs=16) as asking:
        talks = [(300 + i, *words(99)) for i in range(20)]
        for turn in range(4):
            ends = [(await asking.ask_all([talk]))[0] for talk in talks]
            computed = [end.progress.n_prompt_computed for end in ends]
            assert about_equal(computed, [100 if turn == 0 else 30] * 20)
            talks = [talk + words(30) for talk in talks]
