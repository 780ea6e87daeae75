"""Offload to RAM and loading back: when, how much per step, and at which cost to streams."""

from __future__ import annotations

import numpy as np
import pytest

from llamaslot.base.kv_ops import Load, Save
from llamaslot.base.model import SegmentSize
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.tokens import packed
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.disk_io import ReadDone, SegmentMeta, Write, Written, path_digest
from llamaslot.kvcache.match import LoadResult, LoadStatus
from llamaslot.kvcache.tiers.budget import CALM_S, MemoryReading
from llamaslot.kvcache.tiers.pacing import PARTIAL_DELAY_S, RETRY_DELAY_S
from llamaslot.scheduler.step import StepPlan
from tests.cache_settings import cache_settings
from tests.scheduler.test_scheduler import Driver, as_tokens, generated


def driver(**shape: float | None) -> Driver:
    """A scheduler with plenty of RAM, where idle prefixes are offloaded after 50 prompt tokens."""
    return Driver(
        **{"n_slots": 4, "n_reserved": 4, "n_ctx": 1024, "n_ubatch": 64, "ram_bytes": 10**6, "offload_after": 50}
        | shape
    )


def test_idle_prefixes_that_would_slow_a_long_prompt_are_offloaded_first() -> None:
    shared = driver()
    shared.run("a" * 30)
    shared.run("b" * 20)
    shared.step()
    assert shared.holders("a" * 30)
    long = shared.submit("c" * 60)
    assert len(saved(shared.step())) == 0, "it was saved while nothing ran"
    assert not shared.holders("a" * 30)
    assert not shared.holders("b" * 20)
    shared.finish(long)
    assert shared.run("a" * 30 + "!").n_prompt_computed == 1


def test_idle_prefixes_are_offloaded_ahead_while_nothing_runs() -> None:
    shared = driver()
    shared.run("a" * 30)
    (save,) = saved(shared.step())
    assert (save.start, save.end) == (0, 30)
    assert shared.holders("a" * 30)
    size = shared.backend.info.segment_size
    assert size is not None
    assert shared.cache.stats().ram.saved_bytes == size.of(30)
    assert not shared.step()


def test_a_prefix_that_a_waiting_request_needs_stays_resident() -> None:
    shared = driver(n_slots=2)
    shared.run("a" * 30)
    stream = shared.submit("s" * 5, max_tokens=400, id_slot=0)
    shared.step()
    waiting = shared.submit("a" * 30 + "!", id_slot=0)
    long = shared.submit("b" * 200, id_slot=1)
    shared.finish(long)
    assert waiting.slot == -1
    assert shared.holders("a" * 30)
    shared.finish(stream, waiting)
    assert waiting.n_loaded == 0


def test_a_recently_used_prefix_stays_resident() -> None:
    shared = driver(offload_after=150)
    shared.run("a" * 30)
    shared.run("b" * 100)
    shared.run("c" * 100)
    assert not shared.holders("a" * 30)
    assert shared.holders("b" * 100)


@pytest.mark.parametrize(
    ("n_old", "n_recent", "offload_after", "stays"),
    [(900, 20, 130, False), (400, 900, 1000, True), (120, 20, 130, True)],
    ids=["large then small", "small then large", "filled again"],
)
def test_a_small_recent_prefix_is_offloaded_with_a_large_old_one(
    n_old: int, n_recent: int, offload_after: int, stays: bool
) -> None:
    """The old one is due when c is computed; the recent one was used 120 prompt tokens before.

    That is more than 130 x 20/(20 + 900 - 120), but less than 1000 x 900/(900 + 400 - 120), and than 130.
    """
    shared = driver(n_ctx=4096, offload_after=offload_after)
    shared.run("a" * n_old)
    shared.run("b" * n_recent)
    assert shared.holders("a" * n_old)
    shared.run("c" * 120)
    assert not shared.holders("a" * n_old)
    assert bool(shared.holders("b" * n_recent)) is stays
    assert shared.run("b" * n_recent + "!").n_prompt_computed == 1


def test_each_prefix_that_leaves_makes_the_rest_due_sooner() -> None:
    """Used 100 prompt tokens before, c is due only after a and b: 420 x 250/(250 + 900 + 100 - 100) is 91."""
    shared = driver(n_ctx=4096, offload_after=420)
    for letter, n_tokens in (("a", 900), ("b", 100), ("c", 250), ("d", 100)):
        shared.run(letter * n_tokens)
    assert not any(shared.holders(letter * 100) for letter in "abc")


def test_streams_alone_offload_nothing() -> None:
    shared = driver(offload_after=1)
    stream = shared.submit("b" * 30, max_tokens=60)
    shared.step()
    shared.run("a")
    shared.run("c")
    shared.finish(stream)
    assert not any(saved(plan) for plan in shared.plans if all(len(work.run.tokens) == 1 for work in plan.work))
    assert shared.holders("a")


def test_a_shared_prefix_is_loaded_once_for_all_requests() -> None:
    shared = driver()
    shared.run("a" * 40)
    shared.run("b" * 200)
    requests = [shared.submit("a" * 40 + tail) for tail in "xyz"]
    shared.finish(*requests)
    assert [request.n_prompt_computed for request in requests] == [1, 1, 1]
    assert sum(request.n_loaded for request in requests) == 40
    assert sum(request.n_copied for request in requests) == 80


def test_streams_go_on_while_a_long_prefix_is_loaded_in_several_steps() -> None:
    shared = driver(n_ctx=4096, load_us=250.0, n_ubatch=512)
    shared.run("a" * 1500)
    shared.run("b" * 1500)
    assert not shared.holders("a" * 1500)
    stream = shared.submit("c" * 5, max_tokens=40)
    shared.step()
    again = shared.submit("a" * 1500)
    plans = []
    while again.n_generated == 0:
        plans.append(shared.step())
    assert [len(loaded(plan)) for plan in plans] == [1, 1, 1]
    assert all(stream in [work.request for work in plan.work] for plan in plans)
    assert [plan.n_extra_steps for plan in plans[:-1]] == [0, 0], "the worker would go on without it"
    assert again.n_prompt_computed == 1


def test_a_request_that_ends_while_its_prefix_is_loaded_keeps_no_segments_in_ram() -> None:
    shared = driver(n_ctx=4096, load_us=250.0, n_ubatch=512)
    shared.run("a" * 1500)
    shared.run("b" * 1500)
    shared.submit("c" * 5, max_tokens=40)
    shared.step()
    again = shared.submit("a" * 1500)
    shared.step()
    tiers = shared.scheduler.cache._tiers
    assert again.slot in tiers.load_pins
    shared.scheduler.end(again, 0.0, cancelled=True)
    assert again.slot not in tiers.load_pins


def test_a_prefix_is_loaded_in_one_step_beside_no_stream() -> None:
    shared = driver(n_ctx=4096, load_us=250.0, n_ubatch=512)
    shared.run("a" * 1500)
    shared.run("b" * 1500)
    again = shared.submit("a" * 1500)
    assert [len(each.parts) for each in loaded(shared.step())] == [3]
    shared.finish(again)


def test_prefixes_that_leave_one_after_the_other_save_no_more_than_fits_the_gap() -> None:
    shared = driver(n_ctx=4096, save_us=250.0, segment_tokens=16, n_reserved=20, n_ubatch=512, idle_delay_ms=1e9,
                    offload_after=700)  # fmt: skip
    for letter, n_tokens in (("a", 480), ("b", 250), ("c", 350)):
        shared.run(letter * n_tokens)
    stream = shared.submit("s" * 5, max_tokens=100)
    shared.step()
    first = len(shared.plans)
    shared.finish(shared.submit("l" * 110), stream)
    n_saved = [sum(each.end - each.start for each in saved(plan)) for plan in shared.plans[first:]]
    assert 480 < max(n_saved) <= 500 + 16
    assert not shared.holders("a" * 480)


def test_a_prefix_that_is_not_due_stays_where_there_is_no_memory_to_save_it() -> None:
    shared = driver(n_ctx=4096, offload_after=250, idle_delay_ms=1e9)
    for letter, n_tokens in (("a", 900), ("b", 100), ("c", 100)):
        shared.run(letter * n_tokens)
    shared.cache.on_save_failed(frozenset({10**6}), shared.backend.now)
    shared.run("d" * 60)
    assert not shared.holders("a" * 900)
    assert shared.holders("b" * 100)
    assert shared.run("c" * 100 + "!").n_prompt_computed == 1


def test_a_prompt_that_is_cached_whole_does_not_wait_for_loads_of_another_one() -> None:
    shared = driver(n_ctx=4096, load_us=250.0, n_ubatch=512)
    shared.run("a" * 1500)
    shared.run("b" * 1500)
    whole, again = shared.submit("b" * 1500), shared.submit("a" * 1500)
    assert len(loaded(shared.step())) == 1
    assert whole.n_generated == 1
    shared.finish(again)
    assert again.n_prompt_computed == 1


def test_tokens_that_are_still_to_be_loaded_do_not_count_as_prefill() -> None:
    shared = driver(n_ctx=4096, load_us=250.0, n_ubatch=512, offload_after=300)
    shared.run("a" * 1500)
    shared.run("b" * 1500)
    shared.run("c" * 20)
    stream = shared.submit("s" * 5, max_tokens=40)
    shared.step()
    again = shared.submit("a" * 1500)
    shared.finish(again, stream)
    assert shared.holders("c" * 20)


def test_a_step_beside_streams_saves_no_more_than_fits_the_gap() -> None:
    shared = driver(n_ctx=4096, save_us=250.0, n_ubatch=512, idle_delay_ms=1e9)
    shared.run("a" * 1500)
    stream = shared.submit("s" * 5, max_tokens=100)
    shared.step()
    first = len(shared.plans)
    shared.finish(shared.submit("b" * 1500), stream)
    n_saved = [sum(each.end - each.start for each in saved(plan)) for plan in shared.plans[first:]]
    assert sum(n_saved) >= 1500
    assert max(n_saved) <= 500 + 512


def test_a_preempted_request_resumes_from_its_offloaded_cells() -> None:
    shared = driver(n_slots=2, n_ctx=220, offload_after=None)
    old, young = (shared.submit(letter * 40, max_tokens=100) for letter in "ab")
    shared.finish(old, young)
    assert young in shared.preempted
    assert sum(len(work.run.tokens) for plan in shared.plans for work in plan.work) == 2 * (40 + 99)
    alone = driver()
    assert [generated(old), generated(young)] == [generated(alone.run(x * 40, max_tokens=100)) for x in "ab"]


def test_a_prefix_larger_than_ram_does_not_evict_all_others() -> None:
    shared = driver(ram_bytes=driver().backend.info.segment_size.of(900), offload_after=1, n_ctx=4096)
    shared.run("a" * 50)
    shared.run("b" * 2000)
    shared.run("c" * 50)
    assert shared.run("a" * 50).n_prompt_computed == 1
    assert not shared.holders("b" * 2000)
    assert shared.run("b" * 2000).n_prompt_computed == 2000


@pytest.mark.slow
def test_a_prefix_larger_than_ram_is_not_offloaded_in_parts() -> None:
    """The end of a prefix whose start has no room could never be loaded."""
    shared = driver(ram_bytes=driver().backend.info.segment_size.of(900), offload_after=None, n_slots=1, n_ctx=2048)
    shared.run("a" * 50)
    shared.run("b" * 1500)
    shared.run("c" * 100, max_tokens=900)
    assert shared.cache.stats().evicted_tokens > 0
    assert sum(map(len, shared.backend.segments.values())) <= 50


def test_all_loads_of_a_step_share_what_fits_the_gap() -> None:
    shared = driver(n_ctx=8192, load_us=250.0, n_ubatch=512)
    for letter in "abcd":
        shared.run(letter * 1500)
    stream = shared.submit("s" * 5, max_tokens=100)
    shared.step()
    first = len(shared.plans)
    shared.finish(*(shared.submit(letter * 1500) for letter in "abc"), stream)
    n_loaded = [sum(each.end - each.start for each in loaded(plan)) for plan in shared.plans[first:]]
    assert sum(n_loaded) == 3 * 1499
    assert max(n_loaded) <= 500 + 512


def test_cells_over_the_idle_budget_are_saved_in_several_steps_beside_streams() -> None:
    shared = driver(n_ctx=4096, save_us=250.0, n_ubatch=512, idle_cells=0, offload_after=None)
    stream = shared.submit("s" * 5, max_tokens=100)
    shared.run("a" * 1500)
    shared.finish(stream)
    n_saved = [sum(each.end - each.start for each in saved(plan)) for plan in shared.plans]
    assert sum(n_saved) >= 1500
    assert max(n_saved) <= 500 + 512


def test_the_request_with_the_longest_prefix_in_ram_goes_first() -> None:
    shared = driver(n_slots=1)
    shared.run("a" * 200)
    shared.run("b" * 200)
    assert not shared.holders("a" * 200)
    stream = shared.submit("s" * 5, max_tokens=5)
    shared.step()
    new, cached = shared.submit("y" * 30), shared.submit("a" * 200 + "!")
    shared.finish(stream, new, cached)
    assert shared.admitted[-2:] == [cached, new]


def test_nothing_is_offloaded_ahead_before_the_idle_delay() -> None:
    shared = driver(idle_delay_ms=1e9)
    shared.run("a" * 30)
    assert not shared.step()
    assert not shared.backend.segments


def test_the_last_segment_is_not_loaded_if_little_of_it_is_wanted() -> None:
    shared = driver(load_us=1.0, prefill_us=10.0, segment_tokens=64)
    shared.run("a" * 128)
    shared.run("b" * 200)
    request = shared.run("a" * 67 + "z")
    assert (request.n_loaded, request.n_prompt_computed) == (64, 4)


def test_a_segment_is_not_loaded_if_computing_is_faster() -> None:
    shared = driver(load_us=1.0, prefill_us=10.0)
    shared.run("a" * 200)
    shared.run("b" * 200)
    little, more = shared.run("a" * 20 + "x"), shared.run("a" * 21 + "y")
    assert (little.n_loaded, little.n_prompt_computed) == (0, 21)
    assert more.n_cached == 20, "copied from the other one, which is resident now"
    shared.run("c" * 200)
    assert shared.run("a" * 25 + "z").n_loaded == 25


def test_a_little_of_a_segment_is_loaded_for_the_segments_behind_it() -> None:
    shared = driver(load_us=1.0, prefill_us=10.0, n_slots=2, n_ctx=700, segment_tokens=64, offload_after=None)
    shared.run("a" * 600)
    shared.run("b" * 194)
    assert 512 - 6 <= shared.match("a" * 600).n_resident < 512
    more = shared.run("a" * 600)
    assert more.n_prompt_computed == 1


def test_offloading_ahead_ends_where_ram_holds_less_than_the_pool() -> None:
    size = driver().backend.info.segment_size
    shared = driver(ram_bytes=size.of(300), offload_after=10**6)
    shared.finish(*(shared.submit(letter * 200) for letter in "abc"))
    assert shared.cache.cells.idle == 600
    for _ in range(20):
        if not shared.step():
            return
    raise AssertionError("it never ends")


def test_offloading_ahead_saves_a_path_that_continues_a_partial_segment_to_its_end() -> None:
    shared = driver(segment_tokens=8)
    shared.run("a" * 22, id_slot=0)
    shared.run("a" * 22 + "b" * 31, id_slot=1)
    assert shared.held(shared.admitted[0]) == 22
    while shared.step():
        pass
    segments = shared.match("a" * 22 + "b" * 31).segments
    assert [each.end for each in segments] == [8, 16, 24, 32, 40, 48, 53]


@pytest.mark.parametrize("shortage", ["before it is saved", "after it was saved", "while it is saved"])
def test_what_lacked_memory_while_the_server_was_idle_is_saved_when_it_stops(shortage: str) -> None:
    shared = driver(ram_is_fixed=False)
    shared.run("a" * 40)
    if shortage == "before it is saved":
        set_free_memory(shared, 0)
    (*saves,) = saved(shared.step())
    assert bool(saves) == (shortage != "before it is saved")
    if shortage == "after it was saved":
        set_free_memory(shared, 0)
    elif shortage == "while it is saved":
        shared.cache.on_save_failed(frozenset({saves[0].segment}), shared.backend.now)
    for _ in range(3):
        assert not saved(shared.step())
    assert not list(shared.cache._tiers.ram)
    set_free_memory(shared, 10**9)
    shared.backend.now += RETRY_DELAY_S
    shared.scheduler.stop(shared.backend.now)
    (save,) = saved(shared.step())
    assert (save.start, save.end) == (0, 40)
    assert not shared.step(), "it never ends"


def test_what_had_no_room_beside_a_segment_that_is_being_written_is_saved_after_it() -> None:
    size = driver().backend.info.segment_size
    shared = driver(ram_bytes=size.of(60), disk_bytes=10**6)
    for letter, n_tokens in (("a", 7), ("b", 50)):
        shared.run(letter * n_tokens)
        shared.step()
        shared.backend.now += PARTIAL_DELAY_S
        shared.step()
    assert shared.cache._tiers.ram.n_tokens == 7
    shared.scheduler.stop(shared.backend.now)
    assert not saved(shared.step())
    (write,) = [job for plan in shared.plans for job in plan.jobs if isinstance(job, Write)]
    shared.cache.on_io(Written(write.meta.number, ok=True), shared.backend.now)
    (save,) = saved(shared.step())
    assert save.end == 50


def set_free_memory(shared: Driver, free: int) -> None:
    for now in range(int(CALM_S) + 40):
        shared.cache.ram_budget.observe(MemoryReading(free, 10**9), shared.cache._tiers.ram.n_bytes, now)


def test_private_prefixes_are_not_offloaded() -> None:
    shared = driver()
    shared.finish(shared.submit("a" * 40, cache_prompt=False))
    shared.run("b" * 200)
    shared.step()
    assert sum(map(len, shared.backend.segments.values())) == 200
    assert shared.cache.stats().offloaded_tokens == 0


def test_dropping_everything_drops_the_segments() -> None:
    shared = driver()
    shared.run("a" * 40)
    shared.run("b" * 200)
    shared.cache.dropper.drop()
    shared.step()
    assert not shared.backend.segments
    assert shared.run("a" * 40).n_prompt_computed == 40


def saved(plan: StepPlan) -> list[Save]:
    return [each for each in plan.operations if isinstance(each, Save)]


def loaded(plan: StepPlan) -> list[Load]:
    return [each for each in plan.operations if isinstance(each, Load)]


def test_a_segment_that_a_plan_saves_is_loaded_by_the_next_one_only() -> None:
    settings = cache_settings(
        n_slots=2,
        n_cells=256,
        n_seqs=4,
        min_shared=8,
        gap_ms=100.0,
        ram_bytes=10**6,
        segment_size=SegmentSize(0, 1),
    )
    cache = KVCache(settings)
    tokens = np.arange(50, dtype=np.int32)
    cache.acquire([0], cache.match("", packed(tokens)))
    cache.append(0, tokens)
    cache.release(0)
    cache.take_operations()
    assert cache.evict(30) == 30
    acquired = cache.acquire([0, 1], cache.match("", packed(tokens)))
    assert (acquired.n_resident, acquired.n_cached) == (20, 50)
    assert cache.load(acquired.slot, packed(tokens)).status is LoadStatus.MORE
    assert [type(each) for each in cache.take_operations() if isinstance(each, Save | Load)] == [Save]
    assert cache.load(acquired.slot, packed(tokens)) == LoadResult(LoadStatus.DONE, n_loaded=30)
    assert [type(each) for each in cache.take_operations()] == [Load]
    assert cache.length(acquired.slot) == 50


def test_a_waiting_request_matches_what_only_the_disk_has_as_soon_as_ram_has_room_to_read_it() -> None:
    tokens = packed(np.arange(50, dtype=np.int32))
    settings = cache_settings(
        n_slots=2,
        n_cells=256,
        n_seqs=4,
        min_shared=8,
        gap_ms=100.0,
        ram_bytes=100,
        ram_is_fixed=False,
        segment_size=SegmentSize(0, 1),
        disk_bytes=10**6,
    )
    on_disk = [SegmentMeta(0, None, "", 0, tokens, 50, path_digest("", tokens))]
    cache = KVCache(settings, on_disk=on_disk, first_number=1)
    # It is read at the start.
    cache.on_io(ReadDone(0, 1e-3), 0.0)
    match = cache.match("", tokens)
    assert match.n_cached == 50
    for reading, n_cached in ((MemoryReading(0, 1000), 0), (MemoryReading(900, 1000), 50)):
        for now in range(int(CALM_S) + 20):
            cache.ram_budget.observe(reading, 0, now)
            cache.tick(now)
        match = cache.match("", tokens, match)
        assert match.n_cached == n_cached


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pinned_prefix_is_the_last_to_leave_ram(is_pinned: bool) -> None:
    """RAM has room for two of three prefixes, of which two are offloaded at once."""
    shared = Driver(n_slots=2, n_ctx=1024, ram_bytes=2 * SegmentSize(100, 10).of(310))
    shared.run("p" * 300)
    if is_pinned:
        shared.cache.pins.add(salt_namespace(""), packed(as_tokens("p" * 300)))
    shared.run("z" * 1000)
    for letter in "xy":
        shared.run(letter * 300)
    shared.run("z" * 1000)
    cached = [letter for letter in "pxy" if shared.match(letter * 300).n_cached == 300]
    assert cached == (["p", "y"] if is_pinned else ["x", "y"])
    shared.check()
