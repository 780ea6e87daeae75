"""One-shot prompts, until they are used again: evicted earlier from the pool, first from RAM, and written to disk
only at shutdown.
"""

from __future__ import annotations

import pytest

from llamaslot.base.kv_ops import Load, Save
from llamaslot.base.namespaces import PUBLIC_SALT
from llamaslot.kvcache import ghost_list
from llamaslot.kvcache.tiers.disk_io import Job, Write, Written
from llamaslot.kvcache.tiers.pacing import PARTIAL_DELAY_S
from llamaslot.scheduler import admission
from tests.scheduler.test_scheduler import Driver

N_SHORT = 8
"""Tokens that a one-shot request may ask for."""


def driver(**shape: float | None) -> Driver:
    """A scheduler with a pool of 128 cells, and no RAM unless asked for."""
    return Driver(
        **{"n_slots": 2, "n_reserved": 4, "n_ctx": 128, "n_ubatch": 64, "one_shot_tokens": N_SHORT} | shape
    )


def is_one_shot(shared: Driver, prompt: str) -> bool:
    """True if only a one-shot request has used the last of these tokens."""
    match = shared.match(prompt)
    assert match.n_matched == len(prompt)
    return match.matched_end.is_one_shot


def need_cells(shared: Driver, n: int = 60) -> None:
    """Run a prompt that needs `n` cells, and is kept."""
    shared.run(chr(ord("A") + len(shared.plans) % 26) * n, session_id="a session")


def test_a_one_shot_prompt_is_evicted_before_one_that_was_used_longer_ago() -> None:
    shared = driver()
    shared.run("a" * 40, session_id="a session")
    shared.run("t" * 30)
    need_cells(shared, 88)
    assert not shared.match("t" * 30).n_resident
    assert len(shared.holders("a" * 40)) == 1


def test_without_the_setting_the_least_recently_used_goes_first() -> None:
    shared = driver(one_shot_tokens=0)
    shared.run("a" * 40, session_id="a session")
    shared.run("t" * 30)
    need_cells(shared, 80)
    assert shared.holders("t" * 30)
    assert not shared.holders("a" * 40)


def test_while_nothing_needs_its_cells_a_one_shot_prompt_is_found() -> None:
    shared = driver()
    shared.run("t" * 30)
    need_cells(shared, 40)
    assert shared.run("t" * 30 + "!").n_prompt_computed == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"max_tokens": N_SHORT}, True),
        ({"max_tokens": N_SHORT + 1}, False),
        ({"max_tokens": -1}, False),
        ({"max_tokens": 0}, False),
        ({"session_id": "a session"}, False),
        ({"cache_salt": PUBLIC_SALT}, False),
    ],
)
def test_a_prompt_is_one_shot_if_it_asks_for_little_and_names_no_session(
    fields: dict[str, object], expected: bool
) -> None:
    shared = driver()
    request = shared.submit("t" * 30, **fields)
    for _ in range(40):
        shared.step()
    if request in shared.scheduler.running:
        shared.scheduler.end(request, shared.backend.now)
    match = shared.cache.match(request.namespace, request.prefix)
    assert match.matched_end.is_one_shot == expected


def test_only_what_others_do_not_share_is_one_shot() -> None:
    shared = driver()
    shared.run("s" * 30 + "x" * 10)
    assert is_one_shot(shared, "s" * 30)
    shared.run("s" * 30 + "y" * 10)
    assert not is_one_shot(shared, "s" * 30)
    assert is_one_shot(shared, "s" * 30 + "x" * 10)
    assert is_one_shot(shared, "s" * 30 + "y" * 10)
    need_cells(shared, 98)
    assert (shared.match("s" * 30 + "x").n_resident, shared.match("s" * 30 + "y").n_resident) == (30, 30)


def test_the_second_use_ends_it() -> None:
    shared = driver()
    shared.run("t" * 30)
    shared.run("t" * 30)
    assert not is_one_shot(shared, "t" * 29)
    shared.run("u" * 30)
    need_cells(shared, 98)
    assert shared.match("t" * 29).n_resident == 29
    assert not shared.match("u" * 30).n_resident


def test_a_request_that_goes_on_from_a_reply_is_a_conversation() -> None:
    shared = driver()
    first = shared.run("t" * 30, max_tokens=4, id_slot=0)
    answered = bytes(first.tokens.view().tolist()).decode()
    assert is_one_shot(shared, answered[:-1])
    shared.run(answered + "?" * 5, max_tokens=4, id_slot=1)
    assert not is_one_shot(shared, answered + "?" * 5)


def test_a_queued_request_keeps_what_it_wants() -> None:
    shared = driver(n_slots=1)
    shared.run("t" * 30 + "x" * 10)
    stream = shared.submit("r" * 5, max_tokens=20, session_id="a session")
    shared.step()
    shared.submit("t" * 30 + "y" * 10)
    assert not is_one_shot(shared, "t" * 30)
    assert is_one_shot(shared, "t" * 30 + "x" * 10)
    shared.finish(stream)


def test_what_was_evicted_and_comes_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_list, "BLOCK_TOKENS", 10)
    shared = driver()
    shared.run("t" * 30 + "x" * 5)
    need_cells(shared, 127)
    need_cells(shared, 2)
    assert shared.match("t" * 30).n_matched == 0
    shared.run("t" * 30 + "y" * 5)
    assert not is_one_shot(shared, "t" * 30)
    assert is_one_shot(shared, "t" * 30 + "y" * 5)


def test_a_preempted_request_goes_on_from_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MIN_EXPECTED_TOKENS", 1)
    shared = driver(n_ctx=74)
    older = shared.submit("a" * 40, max_tokens=12, session_id="a session")
    younger = shared.submit("t" * 30, max_tokens=N_SHORT)
    shared.finish(older, younger)
    assert shared.preempted == [younger]
    assert younger.n_prompt_computed < 40, "most of it was still there"


def test_an_id_is_taken_from_a_one_shot_prompt_first() -> None:
    shared = driver(n_slots=1, n_reserved=2, min_shared=4)
    shared.run("a" * 10, session_id="a session")
    shared.run("t" * 30)
    shared.run("b" * 10, session_id="a session")
    shared.run("c" * 10, session_id="a session")
    assert shared.holders("a" * 10)
    assert not shared.holders("t" * 30)


def test_ram_keeps_a_one_shot_prompt_in_free_room_only() -> None:
    size = driver().backend.info.segment_size
    assert size is not None
    for ram, n_left in ((40, 0), (100, 30)):
        shared = driver(ram_bytes=size.of(ram), offload_after=1000)
        shared.run("a" * 40, session_id="a session")
        shared.step()
        assert shared.cache.stats().ram.tokens == 40, "it was copied while nothing ran"
        shared.run("t" * 30)
        shared.step()
        need_cells(shared, 88)
        assert shared.match("t" * 30).n_matched == n_left
        assert shared.match("a" * 40).n_matched == 40


def test_ram_evicts_a_one_shot_prompt_first_and_loads_it_otherwise() -> None:
    size = driver().backend.info.segment_size
    assert size is not None
    shared = driver(ram_bytes=size.of(60) + size.of(30))
    shared.run("a" * 60, session_id="a session")
    shared.run("t" * 30)
    shared.run("A" * 127, session_id="a session", max_tokens=1, id_slot=0)
    assert shared.cache.stats().ram.tokens == 90
    again = shared.run("t" * 30 + "!")
    assert again.n_prompt_computed == 1
    assert any(isinstance(each, Load) for plan in shared.plans for each in plan.operations)


def finish_writes(shared: Driver) -> list[Write]:
    """Step until nothing is to be written; returns what was written."""
    written: list[Write] = []
    for _ in range(20):
        shared.backend.now += PARTIAL_DELAY_S
        plan = shared.step()
        jobs: list[Job] = list(plan.jobs)
        for job in jobs:
            if isinstance(job, Write):
                written.append(job)
                shared.cache.on_io(Written(job.meta.number, ok=True), shared.backend.now)
    return written


def disk_driver() -> Driver:
    return driver(n_ctx=512, ram_bytes=10**6, disk_bytes=10**6, offload_after=50)


def test_a_one_shot_prompt_is_written_once_it_is_used_again() -> None:
    shared = disk_driver()
    shared.run("a" * 40, session_id="a session")
    shared.run("t" * 30)
    [conversation] = finish_writes(shared)
    assert len(conversation.meta.tokens) // 4 == 40
    assert not any(
        isinstance(each, Save) and each.end - each.start == 30 for plan in shared.plans for each in plan.operations
    ), "it was copied to RAM although nothing needed its cells"
    shared.run("t" * 29 + "!")
    again = finish_writes(shared)
    assert [len(each.meta.tokens) // 4 for each in again] == [29], "what is new is not"


def test_a_one_shot_prompt_in_ram_is_written_once_it_is_used_again() -> None:
    shared = driver(ram_bytes=10**6, disk_bytes=10**6)
    shared.run("t" * 30)
    need_cells(shared, 127)
    need_cells(shared, 2)
    assert not shared.match("t" * 30).n_resident
    assert shared.match("t" * 30).n_cached == 30
    assert 30 not in [len(each.meta.tokens) // 4 for each in finish_writes(shared)]
    assert shared.run("t" * 29 + "!").n_prompt_computed == 1
    assert [len(each.meta.tokens) // 4 for each in finish_writes(shared)] == [30], "segments are not cut"


@pytest.mark.parametrize("session_id", ["", "a session"])
def test_a_long_one_shot_prompt_is_not_written_while_it_runs_either(session_id: str) -> None:
    shared = driver(n_ctx=2048, ram_bytes=10**6, disk_bytes=10**6, segment_tokens=64)
    long = shared.submit("t" * 700, max_tokens=N_SHORT, session_id=session_id)
    while long in (*shared.scheduler.queue, *shared.scheduler.running):
        shared.step()
        shared.backend.now += 0.3
    n_saved = shared.cache.stats().ram.tokens
    assert n_saved == 0 if not session_id else n_saved > 300
    jobs = [job for plan in shared.plans for job in plan.jobs]
    assert any(isinstance(job, Write) for job in jobs) == bool(session_id)


@pytest.mark.parametrize("is_in_ram", [False, True])
def test_what_is_left_at_the_end_is_written(is_in_ram: bool) -> None:
    shared = disk_driver()
    shared.run("t" * 30)
    if is_in_ram:
        need_cells(shared, 500)
        need_cells(shared, 2)
        assert not shared.match("t" * 30).n_resident
    assert 30 not in [len(each.meta.tokens) // 4 for each in finish_writes(shared)]
    shared.scheduler.stop(shared.backend.now)
    assert 30 in [len(each.meta.tokens) // 4 for each in finish_writes(shared)]


def test_one_shot_prompts_are_written_last() -> None:
    shared = driver(n_ctx=128, ram_bytes=10**5, disk_bytes=10**6)
    size = shared.backend.info.segment_size
    assert size is not None
    for letter in "tuvwx":
        shared.run(letter * 60)
    shared.run("a" * 40, session_id="a session")
    shared.step()
    one_shots = shared.cache.stats().ram.tokens
    assert one_shots >= 180, "they left the pool"
    shared.scheduler.stop(shared.backend.now)
    written = [len(each.meta.tokens) // 4 for each in finish_writes(shared)]
    assert written[0] == 40
    assert written.count(60) >= 3


def test_what_is_left_at_the_end_takes_no_room_of_what_is_kept() -> None:
    size = driver().backend.info.segment_size
    assert size is not None
    shared = driver(ram_bytes=10**6, disk_bytes=size.of(60))
    shared.run("a" * 40, session_id="a session")
    shared.run("t" * 30)
    shared.scheduler.stop(shared.backend.now)
    assert [len(each.meta.tokens) // 4 for each in finish_writes(shared)] == [40]
    assert shared.cache.stats().disk.tokens == 40


def test_a_one_shot_prompt_outlives_what_was_not_used_while_a_pool_of_tokens_was_computed() -> None:
    shared = driver()
    shared.run("a" * 30, session_id="a session")
    for letter in "tuvwx":
        shared.run(letter * 30)
    assert shared.holders("a" * 30), "one-shot prompts were evicted before it"
    need_cells(shared, 90)
    assert shared.holders("x" * 30)
    assert not shared.holders("a" * 30)
