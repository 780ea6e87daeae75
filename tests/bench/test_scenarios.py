"""The scenarios at the article's lengths on a tiny model: cached tokens of the tree and of flat blocks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.flat import BLOCK, BlockCache
from bench.scenarios import CACHE_SEQS, SCENARIOS, Cache, Outcome, Scenario, measure_all, summarize, table
from bench.server import llamaslot
from tests.bench.forked_servers import forked_servers

pytestmark = pytest.mark.slow

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
EXPECTED = {
    "shared_prefix_basic": (192, 7, 112),
    "high_reuse_many_requests": (672, 23, 552),
    "branching_conversation": (256, 7, 168),
    "multi_prefix_groups": (576, 20, 320),
    "low_reuse_control": (192, 0, 0),
    "eviction_pressure": (576, 18, 288),
    "eviction_pressure, in turn": (576, 0, 0),
}
"""Prompt tokens, requests that hit, and tokens cached: the article's, where six groups can reach them."""


@pytest.fixture(scope="module")
def outcomes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    command = llamaslot(tiny_model, "-c", "4096", "--cache-seqs", str(CACHE_SEQS), "--cache-ram", "0", "-t", "1")
    folder = tmp_path_factory.mktemp("logs")
    with forked_servers():
        return asyncio.run(measure_all(command, SCENARIOS, length=1, repeats=1, n_vocab=512, folder=folder))


@pytest.mark.parametrize("name", EXPECTED)
def test_tree_and_flat_blocks_reach_the_articles_counts(name: str, outcomes: list[Outcome]) -> None:
    counts = {each.cache: (each.n_prompt, each.n_hits, each.n_cached) for each in outcomes if each.scenario == name}
    assert counts[Cache.TREE] == counts[Cache.FLAT] == EXPECTED[name]
    assert counts[Cache.NONE] == (EXPECTED[name][0], 0, 0)


def test_rates_are_compared_with_those_without_a_cache(outcomes: list[Outcome]) -> None:
    rows = [row for row in summarize(outcomes) if row["scenario"] == "shared_prefix_basic"]
    assert [row["cache"] for row in rows] == ["none", "tree", "flat"]
    assert rows[0]["ratio"]["median"] == 1.0
    assert rows[1]["ratio"]["median"] == pytest.approx(rows[1]["rate"]["median"] / rows[0]["rate"]["median"])
    assert "rate" not in rows[2]
    assert table(outcomes, "tiny").row_count == 3 * len(SCENARIOS)


def test_in_turn_the_flat_cache_evicts_as_much_as_the_article_says() -> None:
    scenario = BY_NAME["eviction_pressure, in turn"]
    cache = BlockCache(scenario.idle_cells)
    assert sum(map(cache.request, scenario.prompts(512))) == 0
    assert (cache.n_evicted, len(cache)) == (136, 8)


def test_flat_blocks_lose_what_is_in_a_block_that_is_not_shared_whole() -> None:
    scenario = Scenario("uneven", 1, 4, 4 * BLOCK - 1, 8)
    cache = BlockCache()
    assert sum(map(cache.request, scenario.prompts(512))) == 3 * 3 * BLOCK


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


def test_the_same_block_after_another_one_is_another_block() -> None:
    cache = BlockCache()
    assert cache.request([1, 1, 1, 1, 2, 2, 2, 2]) == 0
    assert cache.request([3, 3, 3, 3, 2, 2, 2, 2]) == 0
    assert len(cache) == 4
    assert cache.request([3, 3, 3, 3, 2, 2, 2, 2, 4, 4]) == 2 * BLOCK
    assert cache.request([3, 3, 3, 3, 2, 2, 2, 2]) == BLOCK


def test_the_least_recently_used_block_is_evicted_first_and_of_a_prompt_the_last() -> None:
    cache = BlockCache(3 * BLOCK)
    cache.request([1, 1, 1, 1, 2, 2, 2, 2])
    cache.request([5, 5, 5, 5])
    cache.request([1, 1, 1, 1])
    cache.request([6, 6, 6, 6])
    assert cache.n_evicted == 1
    assert cache.request([1, 1, 1, 1, 2, 2, 2, 2, 9]) == BLOCK
