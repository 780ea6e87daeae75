"""Prefixes shared between requests: in flight, where one waits for another, and between idle and running ones."""

from __future__ import annotations

import pytest

from llamaslot.base.backend import Status
from llamaslot.base.kv_ops import Copy, Share
from llamaslot.scheduler.request import Request, RequestState
from tests.conftest import LONG
from tests.scheduler.test_scheduler import PROMPT_TOKEN_SECONDS, Driver, generated

PREFIX = "h" * 40
MIN_SHARED = 16


def driver(**shape: int | bool | None) -> Driver:
    """A scheduler on a pool in which a prefix of 40 tokens takes five steps and is worth waiting for."""
    return Driver(**{"n_slots": 4, "n_reserved": 4, "n_ctx": 1024, "n_ubatch": 8, "min_shared": MIN_SHARED} | shape)


def computed(shared: Driver) -> int:
    """Tokens that were sent to the backend."""
    return sum(len(work.run.tokens) for plan in shared.plans for work in plan.work)


def fan_out(shared: Driver, n: int = 4, **fields: object) -> list[Request]:
    """Requests with the same prefix and different ends."""
    return [shared.submit(PREFIX + chr(97 + i) * 3, **fields) for i in range(n)]


def test_followers_wait_for_the_prefix_that_their_leader_computes_and_copy_it() -> None:
    shared = driver()
    leader, *followers = fan_out(shared, max_tokens=9)
    for _ in range(5):
        shared.step()
        assert all(follower.state is RequestState.QUEUED for follower in followers)
    assert shared.held(leader) == 40
    shared.step()
    assert all(follower.state is RequestState.RUNNING for follower in followers)
    shared.finish(leader, *followers)
    assert computed(shared) == 40 + 4 * (3 + 8)
    assert [follower.n_prompt_computed for follower in followers] == [3, 3, 3]
    for follower in followers:
        prompt = "".join(map(chr, follower.tokens.view()[:43]))
        assert generated(follower) == generated(driver().run(prompt, max_tokens=9))


@pytest.mark.parametrize(("n_shared", "waits"), [(MIN_SHARED, False), (MIN_SHARED + 1, True)])
def test_a_short_prefix_is_not_waited_for(n_shared: int, waits: bool) -> None:
    shared = driver()
    shared.submit("h" * n_shared + "a" * 30)
    other = shared.submit("h" * n_shared + "b" * 30)
    shared.step()
    assert (other.state is RequestState.QUEUED) == waits


def test_the_rest_of_a_long_prefix_is_waited_for_however_short_it_is() -> None:
    shared = driver()
    leader, *followers = fan_out(shared)
    for _ in range(4):
        shared.step()
    assert shared.held(leader) == 32
    assert all(follower.state is RequestState.QUEUED for follower in followers)


@pytest.mark.parametrize(
    "other", [{"cache_prompt": False}, {"cache_salt": "other"}], ids=["cache_prompt off", "another salt"]
)
def test_no_request_waits_for_one_of_another_namespace(other: dict[str, object]) -> None:
    shared = driver()
    shared.submit(PREFIX + "a")
    other_request = shared.submit(PREFIX + "b", **other)
    shared.step()
    assert other_request.state is RequestState.RUNNING
    shared.finish(other_request)
    assert other_request.n_prompt_computed == 41


@pytest.mark.parametrize("how", ["cancelled", "failed", "preempted"])
def test_when_a_leader_ends_its_oldest_follower_leads(how: str) -> None:
    shared = driver()
    leader, first, *others = fan_out(shared)
    for _ in range(3):
        shared.step()
    n_shared = shared.held(leader)
    if how == "cancelled":
        shared.scheduler.end(leader, shared.backend.now)
    elif how == "failed":
        shared.backend.failures.append((Status.FATAL, 0))
        shared.step()
        assert leader.state is RequestState.DONE
        n_shared = 0
    else:
        shared.scheduler.admission.preempt(leader, shared.backend.now)
        shared.scheduler.admission.remove(leader)
    shared.step()
    assert first.state is RequestState.RUNNING
    assert first.n_reused == n_shared
    assert all(other.state is RequestState.QUEUED for other in others)
    shared.finish(first, *others)
    assert sum(request.n_prompt_computed for request in (first, *others)) == 40 - n_shared + 3 * 3


def test_leaders_and_followers_may_ask_for_a_certain_slot() -> None:
    shared = driver()
    leader = shared.submit(PREFIX + "a", id_slot=2)
    follower = shared.submit(PREFIX + "b", id_slot=2)
    other = shared.submit(PREFIX + "c", id_slot=1)
    shared.finish(leader, follower, other)
    assert [request.slot for request in (leader, follower, other)] == [2, 2, 1]
    assert computed(shared) == 40 + 3


def test_a_preempted_leader_does_not_wait_for_itself() -> None:
    shared = driver()
    leader, *followers = fan_out(shared)
    for _ in range(3):
        shared.step()
    shared.scheduler.admission.preempt(leader, shared.backend.now)
    shared.finish(leader, *followers)
    assert computed(shared) == 40 + 4 * 3


def test_choices_of_one_prompt_share_one_row_of_logits_however_short_it_is() -> None:
    shared = driver(n_slots=2)
    group = [shared.submit("hello", max_tokens=5, group="g") for _ in range(4)]
    shared.step()
    assert [request.n_generated for request in group] == [1, 1, 1, 1]
    assert [request.state for request in group] == [RequestState.RUNNING] + [RequestState.QUEUED] * 3
    shared.finish(*group)
    assert computed(shared) == 5 + 4 * 4
    alone = generated(driver().run("hello", max_tokens=5))
    assert all(generated(request) == alone for request in group)
    assert [request.progress(shared.backend.now).n_cached for request in group] == [0, 5, 5, 5]


@pytest.mark.parametrize(("unified", "can_trim"), [(False, True), (True, False)])
def test_choices_get_their_answers_where_no_cells_can_be_shared(unified: bool, can_trim: bool) -> None:
    shared = driver(n_slots=2, unified=unified, can_trim=can_trim)
    group = [shared.submit(PREFIX, max_tokens=5, group="g") for _ in range(4)]
    shared.finish(*group)
    alone = generated(driver().run(PREFIX, max_tokens=5))
    assert all(generated(request) == alone for request in group)
    assert shared.cache.cells.used == (0 if not can_trim else shared.backend.cells_used)


def test_private_choices_share_among_themselves_and_leave_nothing_behind() -> None:
    shared = driver(n_slots=1)
    group = [shared.submit(PREFIX, max_tokens=5, group="g", cache_prompt=False) for _ in range(3)]
    shared.finish(*group)
    assert computed(shared) == 40 + 3 * 4
    shared.step()
    assert shared.backend.cells_used == 0


def test_a_choice_may_end_with_its_first_token_without_ever_having_a_slot() -> None:
    shared = driver(n_slots=1)
    group = [shared.submit("hello", max_tokens=n, group="g") for n in (3, 1, 3)]
    shared.step()
    assert group[1].state is RequestState.DONE
    assert {outcome.request: outcome.reason for outcome in shared.outcomes}[group[1]] == "limit"
    assert group[1].progress(shared.backend.now).n_cached == 5
    shared.finish(*group)
    assert computed(shared) == 5 + 2 * 2


def test_identical_prompts_of_separate_requests_are_computed_once_too() -> None:
    shared = driver()
    requests = [shared.submit(PREFIX, max_tokens=3) for _ in range(3)]
    shared.finish(*requests)
    assert [request.n_prompt_computed for request in requests] == [40, 1, 1]
    assert generated(requests[0]) == generated(requests[1]) == generated(requests[2])


def test_tokens_computed_side_by_side_are_kept_once() -> None:
    shared = driver(n_ubatch=128, min_shared=64)
    first, second = (shared.submit(PREFIX + letter * 3, max_tokens=20) for letter in "ab")
    shared.step()
    assert computed(shared) == 2 * 43
    assert shared.cache.cells.used == 2 * 43
    (share,) = [each for each in shared.step().operations if isinstance(each, Share)]
    assert (share.start, share.end) == (0, 40)
    assert shared.backend.cells_used == 40 + 2 * 3 + 2
    shared.finish(first, second)


def test_a_repeated_greedy_answer_takes_no_further_cells() -> None:
    shared = driver()
    once = shared.run("hello", max_tokens=30)
    again = shared.run("hello", max_tokens=30)
    shared.step()
    assert generated(once) == generated(again)
    assert shared.backend.cells_used == 5 + 29


def test_each_of_twenty_alternating_conversations_finds_its_whole_history() -> None:
    shared = driver(n_slots=4, n_reserved=16, n_ubatch=64)
    talks = [chr(65 + i) * 9 for i in range(20)]
    for turn in range(4):
        for i, talk in enumerate(talks):
            request = shared.run(talk)
            assert request.n_prompt_computed == (9 if turn == 0 else 5), (turn, i)
            talks[i] = talk + "12345"


def test_the_path_of_a_reused_slot_moves_to_a_spare_sequence() -> None:
    shared = driver(n_slots=1)
    shared.run("a" * 30)
    shared.run("b" * 30)
    assert any(isinstance(each, Copy) for plan in shared.plans for each in plan.operations)
    assert shared.run("a" * 30 + "!").n_prompt_computed == 1
    assert shared.run("b" * 30 + "!").n_prompt_computed == 1


def test_a_path_with_few_tokens_of_its_own_loses_its_id_first() -> None:
    shared = driver(n_slots=1, n_reserved=1, n_ubatch=64)
    shared.run("long " * 10)
    shared.run("short")
    shared.run("another " * 10)
    assert shared.holders("long " * 10)
    assert not shared.holders("short")


def test_a_single_slot_with_a_single_spare_id_moves_no_path() -> None:
    shared = driver(n_slots=1, n_reserved=0, n_ubatch=64)
    for letter in "abc":
        shared.run(letter * 30)
    stats = shared.cache.stats()
    assert (stats.moved_prefixes, stats.dropped_prefixes, stats.evicted_tokens) == (0, 0, 60)
    assert shared.holders("c" * 30) == [0]


def test_a_request_for_a_certain_slot_moves_its_path_to_an_empty_slot() -> None:
    shared = driver(n_slots=2, n_reserved=0, n_ubatch=64)
    shared.run("a" * 30, id_slot=0)
    shared.run("b" * 30, id_slot=0)
    assert shared.holders("a" * 30) == [1]


def test_the_idle_budget_is_kept_and_spares_prefixes_that_are_about_to_be_used() -> None:
    shared = driver(n_slots=1, idle_cells=0)
    requests = fan_out(shared)
    shared.finish(*requests)
    assert computed(shared) == 40 + 4 * 3
    shared.step()
    assert shared.backend.cells_used == 0
    bounded = driver(idle_cells=50, n_ubatch=64)
    for letter in "abc":
        bounded.run(letter * 30)
    bounded.step()
    assert bounded.backend.cells_used == 50
    assert bounded.holders("c" * 30)


def partitioned(**shape: int | float | None) -> Driver:
    """A scheduler on a partitioned pool where saving or loading a token takes a tenth of the time to compute it."""
    us = 1e5 * PROMPT_TOKEN_SECONDS
    costs = {"save_us": us, "load_us": us, "prefill_us": 10 * us}
    sizes = {"n_slots": 4, "n_ctx": 512, "n_ubatch": 64, "unified": False, "min_shared": MIN_SHARED}
    return Driver(**(sizes | costs | shape))


def copies(copying: Driver) -> list[Copy]:
    return [each for plan in copying.plans for each in plan.operations if isinstance(each, Copy)]


@pytest.mark.parametrize(("n_shared", "pays"), [(5, False), (6, True)])
def test_a_prefix_is_copied_between_partitions_where_that_beats_computing(n_shared: int, pays: bool) -> None:
    """The source is saved whole, and the target is loaded."""
    copying = partitioned()
    copying.run("h" * n_shared + "a" * (50 - n_shared), id_slot=0)
    other = copying.run("h" * n_shared + "b" * 9, id_slot=1)
    assert copies(copying) == ([Copy(0, 1, 0, n_shared)] if pays else [])
    assert other.n_prompt_computed == (9 if pays else n_shared + 9)
    assert other.n_matched == (n_shared if pays else 0)
    assert copying.backend.cells_used == copying.cache.cells.used


def test_what_follows_a_prefix_that_is_not_worth_copying_is_computed_too() -> None:
    """Its end is in RAM, its beginning in another partition, which takes long to copy."""
    copying = partitioned(n_slots=2, n_ctx=1024, ram_bytes=2**20, segment_tokens=8)
    copying.run("h" * 8 + "a" * 16, id_slot=0)
    copying.run("h" * 8 + "b" * 480, id_slot=0)
    again = copying.run("h" * 8 + "a" * 16 + "more", id_slot=1)
    assert not copies(copying)
    assert again.n_prompt_computed == 28
    assert generated(again) == generated(driver().run("h" * 8 + "a" * 16 + "more"))


def test_requests_that_come_together_share_a_prefix_between_partitions() -> None:
    copying = partitioned()
    requests = [copying.submit(PREFIX + letter * 3, max_tokens=9) for letter in "abcd"]
    copying.finish(*requests)
    assert [request.n_prompt_computed for request in requests] == [43, 3, 3, 3]
    for request in requests:
        prompt = "".join(map(chr, request.tokens.view()[:43]))
        assert generated(request) == generated(driver().run(prompt, max_tokens=9))


def test_a_partition_does_not_copy_tokens_that_it_holds() -> None:
    copying = partitioned()
    first = copying.run(PREFIX + "a")
    again = copying.run(PREFIX + "a" + "more")
    assert again.slot == first.slot
    assert not copies(copying)


def test_what_a_partition_drops_is_loaded_again_from_ram() -> None:
    copying = partitioned(n_slots=1, ram_bytes=2**20)
    for letter in "ab":
        copying.run(letter * 60)
    again = copying.run("a" * 60 + "more")
    assert again.n_prompt_computed == 4
    assert generated(again) == generated(driver().run("a" * 60 + "more"))


@pytest.mark.parametrize("n_slots", [254, 255, 256] if LONG else [256])
def test_every_sequence_id_may_be_a_slot(n_slots: int) -> None:
    shared = Driver(n_slots=n_slots, n_seqs=256, n_ctx=2048, n_ubatch=512)
    requests = [shared.submit(f"{i:03}") for i in range(n_slots + 20)]
    shared.finish(*requests)
    for i in range(20):
        shared.run(f"{i:03} again", id_slot=0)
