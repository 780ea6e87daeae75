"""The remote tier's decisions: when the store is asked, and what is fetched from it."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.base.model import SegmentSize
from llamaslot.base.tokens import packed
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.tiers.pacing import RETRY_DELAY_S
from llamaslot.kvcache.tiers.remote_tier import Found, Lookup, Portion, RemoteObject
from tests.cache_settings import cache_settings

N_BYTES = 512_000
OBJECT = RemoteObject(0, 512, b"x" * 16, N_BYTES)
FOUND = Found((Portion(OBJECT, 0, 512),), seconds=0.01)
PROMPT = packed(np.arange(600, dtype=np.int32))


@pytest.fixture
def cache() -> KVCache:
    """A cache of a model that takes a second to compute an object."""
    settings = cache_settings(
        n_slots=2,
        n_cells=2048,
        n_seqs=4,
        ram_bytes=10**7,
        segment_size=SegmentSize(0, 1000),
        gap_ms=100.0,
        prefill_us=1e6 / 512,
        has_remote=True,
    )
    return KVCache(settings)


def lookup(cache: KVCache, now: float) -> Lookup | None:
    return cache.remote.wanted("r", cache.match("", PROMPT), PROMPT, now)


def n_chosen(cache: KVCache, now: float) -> int:
    """Portions that are chosen of what is found."""
    cache.tick(now)
    asked = lookup(cache, now)
    assert asked is not None
    return len(cache.remote.choose(asked, FOUND).portions)


def test_what_was_not_measured_is_tried_and_what_is_slow_not_for_a_while(cache: KVCache) -> None:
    assert n_chosen(cache, 1.0) == 1
    cache.remote.on_fetched(N_BYTES, 2.0, 1.0)
    assert n_chosen(cache, 2.0) == 0
    assert n_chosen(cache, RETRY_DELAY_S) == 0
    # One slow fetch, such as on a machine that was busy, must not turn it off for good.
    assert n_chosen(cache, 1.0 + RETRY_DELAY_S) == 1
    cache.remote.on_fetched(N_BYTES, 0.5, 1.0 + RETRY_DELAY_S)
    assert n_chosen(cache, 2.0 + RETRY_DELAY_S) == 1


def test_after_a_fetch_that_is_late_nothing_of_its_size_is_fetched_for_a_while(cache: KVCache) -> None:
    for _ in range(10):
        cache.remote.on_fetched(N_BYTES, 0.01, 1.0)
    asked = lookup(cache, 1.0)
    assert asked is not None
    cache.remote.on_late(cache.remote.choose(asked, FOUND), 1.0)
    assert n_chosen(cache, 2.0) == 0
    assert n_chosen(cache, 1.0 + RETRY_DELAY_S) == 1
    assert cache.stats().remote.failures == 1


def test_a_long_prompt_whose_fetch_is_late_is_not_fetched_again_for_a_while(cache: KVCache) -> None:
    """Computing it takes longer than a request waits at most."""
    prompt = packed(np.arange(20 * 512, dtype=np.int32))
    blocks = [RemoteObject(512 * i, 512 * (i + 1), bytes([i]) * 16, N_BYTES) for i in range(19)]
    found = Found(tuple(Portion(each, each.start, each.end) for each in blocks), seconds=0.01)
    asked = cache.remote.wanted("r", cache.match("", prompt), prompt, 1.0)
    assert asked is not None
    choice = cache.remote.choose(asked, found)
    assert (len(choice.portions), choice.seconds) == (19, 10.0)
    cache.remote.on_late(choice, 11.0)
    assert cache.remote.choose(asked, found).portions == ()


def test_the_store_is_asked_again_after_a_pause_in_which_nothing_ran(cache: KVCache) -> None:
    cache.remote.on_unavailable(1.0)
    assert lookup(cache, RETRY_DELAY_S) is None
    # No plan has told the cache what time it is.
    assert lookup(cache, 1.0 + RETRY_DELAY_S) is not None
