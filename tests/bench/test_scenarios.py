"""The six scenarios at the article's lengths on a tiny model: what is cached, and what llama_decode computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from bench.flat import BLOCK, BlockCache
from bench.scenarios import SCENARIOS, Bench, Cache, Scenario
from llamaslot.backend.llama import LlamaBackend, LlamaSettings
from llamaslot.base.tokens import packed
from llamaslot.engine.worker import model_thread

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
FIGURES = {
    "shared_prefix_basic": (192, 7 / 8, 112),
    "high_reuse_many_requests": (672, 23 / 24, 552),
    "branching_conversation": (256, 7 / 8, 168),
    "multi_prefix_groups": (576, 20 / 24, 320),
    "low_reuse_control": (192, 0, 0),
    "eviction_pressure": (576, 18 / 24, 288),
    "eviction_pressure, in turn": (576, 0, 0),
}
"""Prompt tokens, requests that hit, and tokens cached: the article's, where six groups can reach them."""


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Iterator[Bench]:
    thread = model_thread()
    settings = LlamaSettings(tiny_model, n_ctx=4096, n_slots=4, n_cache_seqs=48, n_ubatch=64, n_threads=1)
    backend = thread.submit(LlamaBackend, settings).result()
    yield Bench(backend, thread)
    thread.submit(backend.close).result()
    thread.shutdown()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all batches that llama_decode is given."""
    sizes: list[int] = []
    decode = llama_cpp.llama_decode

    def spy(context: object, batch: llama_cpp.llama_batch) -> int:
        sizes.append(batch.n_tokens)
        return decode(context, batch)

    monkeypatch.setattr(llama_cpp, "llama_decode", spy)
    return sizes


@pytest.mark.parametrize("cache", Cache)
@pytest.mark.parametrize("name", FIGURES)
async def test_a_scenario_reaches_its_figures(name: str, cache: Cache, bench: Bench, sent: list[int]) -> None:
    n_prompt, hit_rate, n_cached = FIGURES[name]
    got = await bench.measure(BY_NAME[name], cache)
    if cache is Cache.NONE:
        hit_rate, n_cached = 0, 0
    assert (got.n_prompt, got.n_hits / got.n_requests, got.n_cached) == (n_prompt, hit_rate, n_cached)
    assert got.n_prefilled == sum(sent) == n_prompt - n_cached


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.idle_cells is None], ids=lambda s: s.name)
async def test_flat_and_tree_cache_the_same_where_nothing_is_evicted(scenario: Scenario, bench: Bench) -> None:
    for length in (3, 10):
        flat, tree = [await bench.measure(scenario, cache, length=length) for cache in (Cache.FLAT, Cache.TREE)]
        assert flat.n_cached == tree.n_cached
        assert flat.n_evicted == tree.n_evicted == 0
        assert flat.n_entries * BLOCK == flat.n_prefilled == tree.n_prefilled


@pytest.mark.parametrize("cache", [Cache.FLAT, Cache.TREE])
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_hit_where_nothing_is_shared(cache: Cache, seed: int, bench: Bench) -> None:
    unique = BY_NAME["low_reuse_control"]
    got = await bench.measure(unique, cache, length=4, repeat=seed)
    assert (got.n_hits, got.n_cached, got.n_prefilled) == (0, 0, 4 * unique.n_prompt)


async def test_a_flat_cache_never_shares_a_part_of_a_block(bench: Bench) -> None:
    """Prompts that share all but the last token of a block: the tree is ahead by what lies in that block."""
    scenario = Scenario("askew", 1, 4, 4 * BLOCK - 1, 9)
    flat, tree = [await bench.measure(scenario, cache) for cache in (Cache.FLAT, Cache.TREE)]
    assert flat.n_cached == 3 * 3 * BLOCK
    assert tree.n_cached == 3 * (4 * BLOCK - 1)


async def test_in_turn_the_flat_cache_evicts_as_much_as_the_article_says(bench: Bench) -> None:
    got = await bench.measure(BY_NAME["eviction_pressure, in turn"], Cache.FLAT)
    assert (got.n_evicted // BLOCK, got.n_entries) == (136, 8)


def test_requests_differ_in_the_first_token_that_they_do_not_share() -> None:
    for scenario in SCENARIOS:
        prompts = scenario.prompts(512)
        assert len(set(prompts)) == scenario.n_groups * scenario.n_requests
        assert sum(map(len, prompts)) == scenario.n_prompt
        heads = {prompt[: scenario.n_shared] for prompt in prompts}
        assert len(heads) == scenario.n_groups
        assert len({head[:1] for head in heads}) == scenario.n_groups
        for head in heads:
            own = [prompt[scenario.n_shared] for prompt in prompts if prompt[: scenario.n_shared] == head]
            assert len(set(own)) == scenario.n_requests


def blocks(cache: BlockCache, *tokens: int) -> int:
    """A request goes through these tokens and ends; the blocks that it found."""
    run = packed(np.array(tokens, dtype=np.int32))
    found = cache.match("", run)
    used = []
    for at in range(0, len(run) - 15, 16):
        used.append(cache.put("", used[-1] if used else None, run[at : at + 16]))
    cache.let_go(used)
    return len(found)


def test_the_same_block_behind_another_one_is_another_block() -> None:
    cache = BlockCache()
    assert blocks(cache, 1, 1, 1, 1, 2, 2, 2, 2) == 0
    assert blocks(cache, 3, 3, 3, 3, 2, 2, 2, 2) == 0
    assert len(cache) == 4
    assert blocks(cache, 3, 3, 3, 3, 2, 2, 2, 2, 4, 4) == 2
    assert cache.match("other", packed(np.array([3, 3, 3, 3], dtype=np.int32))) == []


def test_blocks_go_by_last_use_and_the_last_of_a_prompt_first() -> None:
    cache = BlockCache()
    blocks(cache, 1, 1, 1, 1, 2, 2, 2, 2)
    blocks(cache, 5, 5, 5, 5)
    blocks(cache, 1, 1, 1, 1)
    assert [block.path()[0] * 10 + block.path()[-4] for block in cache.evict(2)] == [12, 55]
    assert blocks(cache, 1, 1, 1, 1, 2, 2, 2, 2) == 1


def test_what_a_request_goes_through_is_not_given_up() -> None:
    cache = BlockCache()
    blocks(cache, 1, 1, 1, 1, 2, 2, 2, 2)
    (first,) = cache.match("", packed(np.array([1, 1, 1, 1], dtype=np.int32)))
    cache.use(first)
    assert [block.start for block in cache.evict(5)] == [BLOCK]
    assert cache.evict(1) == []
