"""Decisions about the disk: what a prompt waits for, and what is read without anybody waiting."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.base.model import SegmentSize
from llamaslot.base.tokens import WIDTH, packed
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.disk_io import Read, ReadDone, ReadStarted, SegmentMeta, path_digest
from llamaslot.kvcache.match import LoadStatus
from llamaslot.kvcache.tiers.pacing import MIN_READ_BYTES, RETRY_DELAY_S
from tests.cache_settings import cache_settings

N_TOKENS = 1266
N_SEGMENTS = 3
N_BYTES = 1000
"""Of a token: a segment of 512 exceeds the smallest read."""
PROMPT = packed(np.arange(N_TOKENS, dtype=np.int32))


def restarted(n_paths: int = 1) -> KVCache:
    """A cache that finds paths of 1,266 tokens on its disk. Computing a segment of 512 tokens takes a second."""
    metas = []
    for i in range(N_SEGMENTS * n_paths):
        path, at = divmod(i, N_SEGMENTS)
        tokens = packed(np.arange(N_TOKENS, dtype=np.int32) + 10_000 * path)
        start, end = 512 * at, min(512 * (at + 1), N_TOKENS)
        digest = path_digest("", tokens[: end * WIDTH])
        own = tokens[start * WIDTH : end * WIDTH]
        metas.append(SegmentMeta(i, i - 1 if at else None, "", start, own, N_BYTES * (end - start), digest))
    settings = cache_settings(
        n_slots=2,
        n_cells=4096,
        n_seqs=4,
        ram_bytes=10**8,
        disk_bytes=10**9,
        segment_size=SegmentSize(0, N_BYTES),
        gap_ms=100.0,
        prefill_us=1e6 / 512,
    )
    return KVCache(settings, on_disk=metas, first_number=len(metas))


def reads(cache: KVCache) -> list[int]:
    """Numbers of the segments that are to be read now."""
    return [job.number for job in cache.take_jobs() if isinstance(job, Read)]


def done(cache: KVCache, number: int, seconds: float, now: float) -> None:
    assert cache.on_io(ReadDone(number, seconds), now) is not None


def n_cached(cache: KVCache) -> int:
    return cache.match("", PROMPT).n_cached


def test_at_the_start_segments_are_read_that_the_next_request_is_likely_to_need() -> None:
    cache = restarted(n_paths=2)
    assert reads(cache) == [3, 4, 5], "the path that was used last"
    done(cache, 3, 0.1, 1.0)
    assert cache.stats().ram.tokens == N_TOKENS
    assert not reads(restarted(n_paths=0))


def test_one_slow_read_does_not_end_the_reading_of_a_prompt() -> None:
    cache = restarted(n_paths=2)
    reads(cache)
    for number in (3, 4, 5):
        done(cache, number, 0.1, 1.0)
    match = cache.match("", PROMPT)
    assert match.n_cached == N_TOKENS
    slot = cache.acquire([0], match).slot
    assert cache.load(slot, PROMPT).status is LoadStatus.READING
    assert reads(cache) == [0, 1, 2]
    done(cache, 0, 5.0, 6.0)
    loaded = cache.load(slot, PROMPT)
    assert (loaded.status, cache.length(slot)) == (LoadStatus.READING, 512), "loaded while the next one is read"
    for number in (1, 2):
        done(cache, number, 0.1, 6.1)
    assert cache.load(slot, PROMPT).status is LoadStatus.DONE
    assert cache.length(slot) == N_TOKENS


def test_where_computing_is_faster_no_request_waits_and_the_disk_is_tried_again_beside_it() -> None:
    cache = restarted(n_paths=3)
    reads(cache)
    for number in (6, 7, 8):
        done(cache, number, 2.0, 1.0)
    slot = cache.acquire([0], cache.match("", PROMPT)).slot
    assert cache.load(slot, PROMPT).status is LoadStatus.DONE
    assert not reads(cache), "three reads agree"
    for seconds, number in ((0.2, 0), (0.2, 1), (0.2, 2)):
        cache.tick(cache._tiers.now + RETRY_DELAY_S)
        assert cache.load(slot, PROMPT).status is LoadStatus.DONE
        assert reads(cache) == [number], "nobody waits for it"
        assert cache.load(slot, PROMPT).status is LoadStatus.DONE
        assert not reads(cache), "one at a time"
        done(cache, number, seconds, cache._tiers.now)
        cache.load(slot, PROMPT)
        assert cache.length(slot) == min(512 * (number + 1), N_TOKENS), "what is in RAM is loaded all the same"
    other = packed(np.arange(N_TOKENS, dtype=np.int32) + 10_000)
    assert cache.match("", other).n_cached == N_TOKENS, "most of the newest reads were fast"


def test_the_time_that_a_read_has_taken_is_not_expected_again() -> None:
    cache = restarted()
    assert reads(cache) == [0, 1, 2]
    done(cache, 0, 0.5, 1.0)
    match = cache.match("", PROMPT)
    for now, expected in ((1.0, 0.5), (1.4, 0.1), (1.5, 0.0), (1.9, 0.4)):
        cache.tick(now)
        assert cache._disk.read_us(match.parts[1].segment) == pytest.approx(1e6 * expected)
        rest = cache._disk.read_us(match.parts[2].segment)
        assert rest == pytest.approx(1e6 * 0.5 * MIN_READ_BYTES / (512 * N_BYTES)), "it waits for the other one"


@pytest.mark.parametrize("is_known", [True, False], ids=["speed known", "speed unknown"])
def test_a_request_waits_for_a_late_read_about_as_long_as_computing_takes(is_known: bool) -> None:
    cache = restarted(n_paths=2)
    assert reads(cache) == [3, 4, 5]
    if is_known:
        for number in (3, 4, 5):
            done(cache, number, 0.1, 1.0)
    else:
        assert cache.on_io(ReadStarted(), 1.0) is None
    wanted = PROMPT if is_known else packed(np.arange(N_TOKENS, dtype=np.int32) + 10_000)
    cache.tick(1.0)
    slot = cache.acquire([0], cache.match("", wanted)).slot
    assert cache.load(slot, wanted).status is LoadStatus.READING
    if is_known:
        assert reads(cache) == [0, 1, 2]
        assert cache.on_io(ReadStarted(), 1.0) is None
    now = 1.0
    while cache.load(slot, wanted).status is LoadStatus.READING:
        # When the engine idles, it wakes at this time.
        due_at = cache._policy.deadlines().idle
        assert due_at is not None
        assert now < due_at < now + 0.2
        now = due_at
        assert now < 5.0
        cache.tick(now)
    assert 2.5 < now < 4.0, "computing all of it takes 2.5 seconds"
