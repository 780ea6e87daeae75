"""The ghost list recognizes evicted prefixes by their first whole block, and predicts hit rates as LRU has them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from llamaslot.base.tokens import packed
from llamaslot.kvcache import ghost_list
from llamaslot.kvcache.ghost_list import BLOCK_TOKENS, GhostList
from tests.conftest import new_seed


def run(*lengths: tuple[int, int]) -> bytes:
    """So many tokens of each kind, one kind after another."""
    return packed(np.concatenate([np.full(n, token, dtype=np.int32) for token, n in lengths]))


def test_a_block_counts_once_all_of_it_was_computed() -> None:
    ghosts = GhostList()
    ghosts.add("", run((1, BLOCK_TOKENS + 10)))
    assert ghosts.continues("", run((1, BLOCK_TOKENS)), 0)
    assert ghosts.continues("", run((1, 3 * BLOCK_TOKENS)), BLOCK_TOKENS - 1)
    assert not ghosts.continues("", run((1, 3 * BLOCK_TOKENS)), BLOCK_TOKENS)
    assert not ghosts.continues("", run((1, BLOCK_TOKENS - 1)), 0), "it does not reach a whole block"


def test_a_block_behind_another_prefix_or_of_another_namespace_is_another_one() -> None:
    ghosts = GhostList()
    ghosts.add("s", run((1, BLOCK_TOKENS), (2, BLOCK_TOKENS)))
    assert ghosts.continues("s", run((1, BLOCK_TOKENS), (2, BLOCK_TOKENS)), BLOCK_TOKENS)
    assert not ghosts.continues("s", run((3, BLOCK_TOKENS), (2, BLOCK_TOKENS)), BLOCK_TOKENS)
    assert not ghosts.continues("", run((1, BLOCK_TOKENS), (2, BLOCK_TOKENS)), BLOCK_TOKENS)


def test_the_oldest_blocks_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_list, "MAX_BLOCKS", 2)
    ghosts = GhostList()
    ghosts.add("", run((1, BLOCK_TOKENS)))
    ghosts.add("", run((2, BLOCK_TOKENS)))
    ghosts.add("", run((1, BLOCK_TOKENS)))
    ghosts.add("", run((3, BLOCK_TOKENS)))
    assert ghosts.continues("", run((1, BLOCK_TOKENS)), 0)
    assert not ghosts.continues("", run((2, BLOCK_TOKENS)), 0)


def test_of_what_was_computed_only_whole_blocks_count() -> None:
    ghosts = GhostList()
    ghosts.add("", packed(np.arange(3 * BLOCK_TOKENS + 5, dtype=np.int32)))
    longer = packed(np.arange(9 * BLOCK_TOKENS, dtype=np.int32))
    for n in (0, 7, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS - 1):
        assert ghosts.continues("", longer, n)
        assert not ghosts.continues("salt", longer, n)
    for n in (3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 4):
        assert not ghosts.continues("", longer, n)


class LruCache:
    """A cache of so many blocks that evicts the least recently used one, of a path the last one first."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.blocks: list[bytes] = []
        self.n_found = 0

    def use(self, path: bytes) -> None:
        blocks = [path[:end] for end in range(4 * BLOCK_TOKENS, len(path) + 1, 4 * BLOCK_TOKENS)]
        self.n_found += len([*itertools.takewhile(self.blocks.__contains__, blocks)]) * BLOCK_TOKENS
        self.blocks = [*blocks, *(each for each in self.blocks if each not in blocks)][: self.n_blocks]


@pytest.mark.parametrize("max_epochs", [4096, 64])
def test_one_pass_gives_the_hit_rates_of_caches_of_all_sizes(
    monkeypatch: pytest.MonkeyPatch, max_epochs: int
) -> None:
    monkeypatch.setattr(ghost_list, "_MAX_EPOCHS", max_epochs)
    chance = random.Random(new_seed())
    ghosts, sizes = GhostList(), (8, 16, 32, 64, 128)
    caches = [LruCache(size) for size in sizes]
    starts = [run((kind, chance.randint(1, 4) * BLOCK_TOKENS)) for kind in range(4)]
    paths = [chance.choice(starts) + run((10 + i, chance.randint(1, 6) * BLOCK_TOKENS)) for i in range(40)]
    n_tokens = 0
    for _ in range(600):
        i = min(int(chance.expovariate(0.1)), len(paths) - 1)
        if chance.random() < 0.2:
            paths[i] = chance.choice(starts) + run(
                (chance.randint(100, 10**6), chance.randint(1, 6) * BLOCK_TOKENS)
            )
        path = paths[i]
        n_tokens += len(path) // 4
        ghosts.count("", path, n_cached=0)
        ghosts.add("", path)
        for cache in caches:
            cache.use(path)
    tolerance = 0.001 if max_epochs > 600 else 0.02
    for cache in caches:
        # A prompt has one token more than is looked up, and a block that is not found may be found in part.
        most = ghosts.n_tokens / n_tokens
        predicted = (ghosts.hit_rate(cache.n_blocks * BLOCK_TOKENS)) * most
        at_most = cache.n_found / n_tokens + BLOCK_TOKENS / 2 * 600 / n_tokens
        assert cache.n_found / n_tokens - tolerance <= predicted <= at_most + tolerance


def test_a_lookup_tells_how_much_was_used_before() -> None:
    ghosts = GhostList()
    ghosts.add("", run((1, 5 * BLOCK_TOKENS)))
    assert ghosts.count("", run((1, 9 * BLOCK_TOKENS)), n_cached=BLOCK_TOKENS) == 4 * BLOCK_TOKENS
    assert ghosts.count("", run((1, 9 * BLOCK_TOKENS)), n_cached=7 * BLOCK_TOKENS) == 0
    assert ghosts.count("salt", run((1, 9 * BLOCK_TOKENS)), n_cached=0) == 0
