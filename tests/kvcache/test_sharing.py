"""What waiting requests share with running ones: who waits on whom, and what happens when a leader ends."""

from __future__ import annotations

import pytest

from llamaslot.base.backend import Status
from llamaslot.base.kv_ops import Copy, CopyStream, Share
from llamaslot.scheduler.request import Request, RequestState
from tests.scheduler.test_scheduler import PROMPT_TOKEN_SECONDS, Driver, generated

HEAD = "h" * 40
MIN_SHARED = 16


def driver(**shape: int | bool | None) -> Driver:
    """A pool in which a prefix of 40 tokens takes five steps and is worth waiting for."""
    return Driver(**{"n_slots": 4, "n_reserved": 4, "n_ctx": 1024, "n_ubatch": 8, "min_shared": MIN_SHARED} | shape)


def computed(shared: Driver) -> int:
    """Tokens that were sent to the backend."""
    return sum(len(work.run.tokens) for plan in shared.plans for work in plan.work)


def fan_out(shared: Driver, n: int = 4, **fields: object) -> list[Request]:
    """Requests for the same head and tails of their own."""
    return [shared.submit(HEAD + chr(97 + i) * 3, **fields) for i in range(n)]


def test_what_a_leader_computes_is_waited_for_and_copied() -> None:
    shared = driver()
    leader, *waiters = fan_out(shared, max_tokens=9)
    for _ in range(5):
        shared.step()
        assert all(waiter.state is RequestState.QUEUED for waiter in waiters)
    assert shared.held(leader) == 40
    shared.step()
    assert all(waiter.state is RequestState.RUNNING for waiter in waiters)
    shared.finish(leader, *waiters)
    assert computed(shared) == 40 + 4 * (3 + 8)
    assert [waiter.n_prompt_computed for waiter in waiters] == [3, 3, 3]
    for waiter in waiters:
        prompt = "".join(map(chr, waiter.known.view()[:43]))
        assert generated(waiter) == generated(driver().run(prompt, max_tokens=9))


@pytest.mark.parametrize(("n_shared", "waits"), [(MIN_SHARED, False), (MIN_SHARED + 1, True)])
def test_little_is_not_waited_for(n_shared: int, waits: bool) -> None:
    shared = driver()
    shared.submit("h" * n_shared + "a" * 30)
    other = shared.submit("h" * n_shared + "b" * 30)
    shared.step()
    assert (other.state is RequestState.QUEUED) == waits


def test_what_is_left_of_a_long_prefix_is_waited_for_however_little_it_is() -> None:
    shared = driver()
    leader, *waiters = fan_out(shared)
    for _ in range(4):
        shared.step()
    assert shared.held(leader) == 32
    assert all(waiter.state is RequestState.QUEUED for waiter in waiters)


@pytest.mark.parametrize(
    "other", [{"cache_prompt": False}, {"cache_salt": "other"}], ids=["cache_prompt off", "another salt"]
)
def test_nobody_waits_across_namespaces(other: dict[str, object]) -> None:
    shared = driver()
    shared.submit(HEAD + "a")
    apart = shared.submit(HEAD + "b", **other)
    shared.step()
    assert apart.state is RequestState.RUNNING
    shared.finish(apart)
    assert apart.n_prompt_computed == 41


@pytest.mark.parametrize("how", ["cancelled", "failed", "preempted"])
def test_when_a_leader_ends_the_oldest_waiter_leads(how: str) -> None:
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
        shared.scheduler._preempt(leader, shared.backend.now)
        shared.scheduler.admission.withdraw(leader)
    shared.step()
    assert first.state is RequestState.RUNNING
    assert first.n_reused == n_shared
    assert all(other.state is RequestState.QUEUED for other in others)
    shared.finish(first, *others)
    assert sum(request.n_prompt_computed for request in (first, *others)) == 40 - n_shared + 3 * 3


def test_a_leader_may_be_bound_to_a_slot_and_so_may_a_waiter() -> None:
    shared = driver()
    leader = shared.submit(HEAD + "a", id_slot=2)
    waiter = shared.submit(HEAD + "b", id_slot=2)
    other = shared.submit(HEAD + "c", id_slot=1)
    shared.finish(leader, waiter, other)
    assert [request.slot_id for request in (leader, waiter, other)] == [2, 2, 1]
    assert computed(shared) == 40 + 3


def test_a_preempted_leader_is_not_waited_for_by_itself() -> None:
    shared = driver()
    leader, *waiters = fan_out(shared)
    for _ in range(3):
        shared.step()
    shared.scheduler._preempt(leader, shared.backend.now)
    shared.finish(leader, *waiters)
    assert computed(shared) == 40 + 4 * 3


def test_choices_of_one_prompt_wait_however_short_it_is_and_share_one_row_of_logits() -> None:
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


@pytest.mark.parametrize(("unified", "reuse"), [(False, True), (True, False)])
def test_where_nothing_can_be_shared_choices_still_get_their_answers(unified: bool, reuse: bool) -> None:
    shared = driver(n_slots=2, unified=unified, reuse=reuse)
    group = [shared.submit(HEAD, max_tokens=5, group="g") for _ in range(4)]
    shared.finish(*group)
    alone = generated(driver().run(HEAD, max_tokens=5))
    assert all(generated(request) == alone for request in group)
    assert shared.scheduler.ledger.n_used == (0 if not reuse else shared.backend.cells_used)


def test_private_choices_share_among_themselves_and_leave_nothing_behind() -> None:
    shared = driver(n_slots=1)
    group = [shared.submit(HEAD, max_tokens=5, group="g", cache_prompt=False) for _ in range(3)]
    shared.finish(*group)
    assert computed(shared) == 40 + 3 * 4
    shared.step()
    assert shared.backend.cells_used == 0


def test_a_choice_may_end_with_its_first_token_before_it_ever_had_a_slot() -> None:
    shared = driver(n_slots=1)
    group = [shared.submit("hello", max_tokens=n, group="g") for n in (3, 1, 3)]
    shared.step()
    assert group[1].state is RequestState.DONE
    assert {outcome.request: outcome.reason for outcome in shared.outcomes}[group[1]] == "limit"
    assert group[1].progress(shared.backend.now).n_cached == 5
    shared.finish(*group)
    assert computed(shared) == 5 + 2 * 2


def test_identical_prompts_of_strangers_are_computed_once_too() -> None:
    shared = driver()
    requests = [shared.submit(HEAD, max_tokens=3) for _ in range(3)]
    shared.finish(*requests)
    assert [request.n_prompt_computed for request in requests] == [40, 1, 1]
    assert generated(requests[0]) == generated(requests[1]) == generated(requests[2])


def test_tokens_computed_side_by_side_are_kept_once() -> None:
    shared = driver(n_ubatch=128, min_shared=64)
    first, second = (shared.submit(HEAD + letter * 3, max_tokens=20) for letter in "ab")
    shared.step()
    assert computed(shared) == 2 * 43
    assert shared.scheduler.ledger.n_used == 2 * 43
    (share,) = [each for each in shared.step().operations if isinstance(each, Share)]
    assert (share.start, share.end) == (0, 40)
    assert shared.backend.cells_used == 40 + 2 * 3 + 2
    shared.finish(first, second)


def test_a_repeated_greedy_answer_takes_no_cells_twice() -> None:
    shared = driver()
    once = shared.run("hello", max_tokens=30)
    again = shared.run("hello", max_tokens=30)
    shared.step()
    assert generated(once) == generated(again)
    assert shared.backend.cells_used == 5 + 29


def test_twenty_conversations_in_turn_find_their_whole_history() -> None:
    shared = driver(n_slots=4, n_reserved=16, n_ubatch=64)
    talks = [chr(65 + i) * 9 for i in range(20)]
    for turn in range(4):
        for i, talk in enumerate(talks):
            request = shared.run(talk)
            assert request.n_prompt_computed == (9 if turn == 0 else 5), (turn, i)
            talks[i] = talk + "12345"


def test_a_slot_gives_way_without_losing_what_it_holds() -> None:
    shared = driver(n_slots=1)
    shared.run("a" * 30)
    shared.run("b" * 30)
    assert any(isinstance(each, Copy) for plan in shared.plans for each in plan.operations)
    assert shared.run("a" * 30 + "!").n_prompt_computed == 1
    assert shared.run("b" * 30 + "!").n_prompt_computed == 1


def test_a_short_tail_is_given_up_for_its_id_before_a_long_one() -> None:
    shared = driver(n_slots=1, n_reserved=1, n_ubatch=64)
    shared.run("long " * 10)
    shared.run("short")
    shared.run("another " * 10)
    assert shared.holders("long " * 10)
    assert not shared.holders("short")


def test_a_single_slot_with_a_single_spare_id_parks_nothing_in_vain() -> None:
    shared = driver(n_slots=1, n_reserved=0, n_ubatch=64)
    for letter in "abc":
        shared.run(letter * 30)
    counts = shared.scheduler.ledger.counts
    assert (counts.n_parked, counts.n_lost_paths, counts.n_lost_tokens) == (0, 0, 60)
    assert shared.holders("c" * 30) == [0]


def test_a_bound_request_does_not_cost_what_its_slot_holds_while_another_is_empty() -> None:
    shared = driver(n_slots=2, n_reserved=0, n_ubatch=64)
    shared.run("a" * 30, id_slot=0)
    shared.run("b" * 30, id_slot=0)
    assert shared.holders("a" * 30) == [1]


def test_the_idle_budget_is_kept_and_does_not_cut_what_is_about_to_be_used() -> None:
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


def apart(**shape: int | float | None) -> Driver:
    """Slots with cells of their own, where copying all of a slot's takes as long as computing 16 tokens."""
    cost = 1e3 * 16 * PROMPT_TOKEN_SECONDS
    copying = Driver(
        **{
            "n_slots": 4,
            "n_ctx": 512,
            "n_ubatch": 64,
            "unified": False,
            "stream_copy_ms": cost,
            "min_shared": MIN_SHARED,
        }
        | shape
    )
    copying.run("to learn what a token costs")
    return copying


def copies(copying: Driver) -> list[CopyStream]:
    return [each for plan in copying.plans for each in plan.operations if isinstance(each, CopyStream)]


@pytest.mark.parametrize(("n_shared", "pays"), [(16, False), (17, True)])
def test_apart_a_whole_slot_is_copied_where_that_beats_computing(n_shared: int, pays: bool) -> None:
    copying = apart()
    copying.run("h" * n_shared + "a" * 30, id_slot=0)
    other = copying.run("h" * n_shared + "b" * 9, id_slot=1)
    assert copies(copying) == ([CopyStream(0, 1, n_shared)] if pays else [])
    assert other.n_prompt_computed == (9 if pays else n_shared + 9)


def test_apart_a_prefix_spreads_from_slot_to_slot_each_copied_once_a_step() -> None:
    copying = apart()
    requests = [copying.submit(HEAD + letter * 3, max_tokens=9) for letter in "abcd"]
    copying.finish(*requests)
    assert [request.n_prompt_computed for request in requests] == [43, 3, 3, 3]
    for plan in copying.plans:
        taking_part = [
            seq for each in plan.operations if isinstance(each, CopyStream) for seq in (each.src, each.dst)
        ]
        assert len(taking_part) == len(set(taking_part))
    for request in requests:
        prompt = "".join(map(chr, request.known.view()[:43]))
        assert generated(request) == generated(driver().run(prompt, max_tokens=9))


def test_apart_what_a_slot_has_itself_is_not_copied() -> None:
    copying = apart()
    first = copying.run(HEAD + "a")
    again = copying.run(HEAD + "a" + "more")
    assert again.slot_id == first.slot_id
    assert not copies(copying)


def test_apart_a_path_moves_to_a_reserved_sequence_where_that_beats_computing_it_again() -> None:
    copying = apart(n_slots=1, n_reserved=2)
    for letter in "ab":
        copying.run(letter * 60)
    again = copying.run("a" * 60 + "more")
    assert again.n_prompt_computed == 4
    assert generated(again) == generated(driver().run("a" * 60 + "more"))
    short = apart(n_slots=1, n_reserved=2)
    for letter in "ab":
        short.run(letter * 9)
    assert all(each.keep > 16 for each in copies(short))


@pytest.mark.parametrize("n_slots", [254, 255, 256])
def test_every_sequence_id_may_be_a_slot(n_slots: int) -> None:
    shared = Driver(n_slots=n_slots, n_seqs=256, n_ctx=2048, n_ubatch=512)
    requests = [shared.submit(f"{i:03}") for i in range(n_slots + 20)]
    shared.finish(*requests)
    for i in range(20):
        shared.run(f"{i:03} again", id_slot=0)


def test_apart_a_slot_can_be_copied_again_after_the_next_decode() -> None:
    copying = apart()
    copying.run("h" * 60 + "a", id_slot=0)
    for slot in (1, 2):
        copying.run("h" * 60 + chr(97 + slot), id_slot=slot)
    assert [each.dst for each in copies(copying)] == [1, 2]
    copying.run("x" * 60, id_slot=1)
    copying.run("h" * 60 + "z", id_slot=1)
    assert [each.dst for each in copies(copying)] == [1, 2, 1]
