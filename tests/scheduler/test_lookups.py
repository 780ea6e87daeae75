"""Lookups in the radix tree: a waiting request costs at most one per plan, and none while nothing changes."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from unittest import mock

import pytest

from llamaslot.base.kv_ops import Remove
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.scheduler.request import Request, RequestState
from llamaslot.scheduler.step import StepPlan
from tests.scheduler.test_scheduler import Driver

N_WAITING = 40


class Lookups:
    """Counts the calls of `RadixTree.match` by the tokens that were looked up."""

    def __init__(self) -> None:
        self.by_tokens: Counter[bytes] = Counter()

    def counting(self) -> mock._patch[object]:
        match = RadixTree.match

        def counted(tree: RadixTree, namespace: str, tokens: bytes) -> Match:
            self.by_tokens[tokens] += 1
            return match(tree, namespace, tokens)

        return mock.patch.object(RadixTree, "match", counted)

    def of(self, requests: list[Request]) -> list[int]:
        """The number of lookups for each of these requests."""
        return [self.by_tokens[request.prefix] for request in requests]


def step(driver: Driver) -> tuple[StepPlan, Lookups]:
    """A step, and the lookups of its plan."""
    lookups = Lookups()
    with lookups.counting():
        plan = driver.step()
    return plan, lookups


def waiting(driver: Driver, *, id_slot: int = -1) -> list[Request]:
    """Many requests with different prompts, some of whose prefixes are cached."""
    return [driver.submit("abc"[i % 3] * 60 + f"{i:03}!", id_slot=id_slot) for i in range(N_WAITING)]


def driver(ram_bytes: int, **shape: float | None) -> Driver:
    """Two of the cached prefixes are resident, or offloaded where there is RAM."""
    made = Driver(
        **{"n_slots": 2, "n_reserved": 4, "n_ctx": 1024, "n_ubatch": 64, "offload_after": 50} | shape,
        ram_bytes=ram_bytes,
    )
    for letter in "ab":
        made.run(letter * 60)
    return made


@pytest.mark.parametrize("ram_bytes", [0, 10**6], ids=["RAM off", "RAM on"])
def test_requests_that_wait_for_any_slot_are_not_looked_up_while_all_are_taken(ram_bytes: int) -> None:
    busy = driver(ram_bytes)
    streams = [busy.submit(letter * 5, max_tokens=100) for letter in "xy"]
    busy.step()
    requests = waiting(busy)
    for _ in range(10):
        plan, lookups = step(busy)
        assert {work.request for work in plan.work} == set(streams)
        assert lookups.of(requests) == [0] * N_WAITING


@pytest.mark.parametrize("ram_bytes", [0, 10**6], ids=["RAM off", "RAM on"])
def test_a_request_that_cannot_be_admitted_is_looked_up_once_per_plan(ram_bytes: int) -> None:
    """A slot is free, but the pool has no room beside the stream."""
    busy = driver(ram_bytes, n_ctx=130)
    stream = busy.submit("s" * 5, max_tokens=100)
    busy.step()
    requests = waiting(busy)
    for _ in range(10):
        plan, lookups = step(busy)
        assert [work.request for work in plan.work] == [stream]
        assert max(lookups.of(requests)) <= 1
        assert sum(lookups.by_tokens.values()) <= N_WAITING


@pytest.mark.parametrize("ram_bytes", [0, 10**6], ids=["RAM off", "RAM on"])
def test_a_follower_is_looked_up_once_per_plan(ram_bytes: int) -> None:
    busy = driver(ram_bytes, n_ubatch=16, n_slots=4)
    leader = busy.submit("h" * 300 + "!")
    busy.step()
    requests = [busy.submit("h" * 300 + f"{i:03}!") for i in range(N_WAITING)]
    for _ in range(10):
        _, lookups = step(busy)
        assert all(request.state is RequestState.QUEUED for request in requests)
        assert max(lookups.of(requests)) <= 1
    assert leader.state is RequestState.RUNNING


@pytest.mark.parametrize("ram_bytes", [0, 10**6], ids=["RAM off", "RAM on"])
def test_nothing_is_looked_up_while_nothing_changes(ram_bytes: int) -> None:
    """Neither is a request whose lookup is still right when others are added to the queue."""
    busy = driver(ram_bytes)
    for letter in "xy":
        busy.submit(letter * 5, max_tokens=100)
    busy.step()
    requests = waiting(busy)
    cache, admission = busy.cache, busy.scheduler.admission
    found = [admission.match(request) for request in requests]
    lookups = Lookups()
    with lookups.counting():
        again = [admission.match(request) for request in requests]
        cache.touch(again)
        busy.scheduler.plan(busy.backend.now)
    assert all(a is b for a, b in zip(again, found, strict=True))
    assert not lookups.by_tokens


@pytest.mark.parametrize("ram_bytes", [0, 10**6], ids=["RAM off", "RAM on"])
def test_a_plan_that_admits_looks_up_once_and_one_that_offloads_as_well_once_more(ram_bytes: int) -> None:
    """Admissions and loads have changed the tree by the time when idle prefixes are to be offloaded."""
    busy = driver(ram_bytes)
    stream = busy.submit("s" * 5, max_tokens=4)
    busy.step()
    requests = waiting(busy)
    n_admitting = n_offloading = 0
    while busy.scheduler.queue:
        n_before, n_idle = len(busy.admitted), busy.cache.cells.idle
        plan, lookups = step(busy)
        still_waiting = [request for request in requests if request.state is RequestState.QUEUED]
        is_offloading = bool(ram_bytes) and busy.cache.cells.idle != n_idle
        assert max(lookups.of(still_waiting), default=0) <= 1 + is_offloading
        n_admitting += len(busy.admitted) > n_before
        n_offloading += is_offloading and any(isinstance(each, Remove) for each in plan.operations)
    assert n_admitting > 5
    assert n_offloading > 0 or not ram_bytes
    busy.finish(stream, *requests)


def test_a_match_is_looked_up_again_for_more_tokens() -> None:
    busy = driver(0)
    request = busy.submit("a" * 30)
    match = busy.scheduler.admission.match(request)
    assert match.n_resident * WIDTH == len(request.prefix)
    request.add_token(ord("a"), 0.0)
    assert busy.scheduler.admission.match(request).n_resident == 30


@pytest.mark.slow
def test_what_was_compared_of_a_request_is_forgotten_once_it_ends() -> None:
    shared = Driver(n_slots=2, n_ctx=1024)
    leader = shared.submit("a" * 100, max_tokens=50)
    shared.step()
    follower = shared.submit("a" * 99 + "b", id_slot=leader.slot)
    waiting = shared.submit("a" * 200)
    shared.step()
    assert waiting.n_common
    kept = [weakref.ref(request) for request in (leader, follower, waiting)]
    for request in (follower, waiting, leader):
        shared.scheduler.end(request, 0.0, cancelled=True)
    del request, follower, waiting, leader
    shared.plans.clear()
    shared.admitted.clear()
    shared.step()
    gc.collect()
    assert not any(each() for each in kept)
