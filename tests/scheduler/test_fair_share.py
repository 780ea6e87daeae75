"""Clients take turns: many requests of one delay a single request of another by one request's duration."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from llamaslot.base.callers import MAX_ROUND_TURNS
from llamaslot.scheduler.request import Request, RequestState
from llamaslot.scheduler.step import StepPlan
from tests.conftest import LONG
from tests.scheduler.test_scheduler import Driver

HEAD = "h" * 100
"""A prefix that many prompts share, long enough to be waited for."""


class Clients(Driver):
    """A scheduler that notes how many requests other clients got admitted while a client had none running."""

    def __init__(self, **settings: float) -> None:
        super().__init__(n_reserved=8, **settings)
        self.overtaken_by: dict[str, Counter[str]] = {}
        """By client that waits, since its first request arrived: admissions of each other client."""
        self.waits: list[Counter[str]] = []
        """Those of waits that have ended."""

    def arrive(self, prompt: str, client: str, *, max_tokens: int = 1) -> Request:
        """Queue a request."""
        if all(r.params.client != client for r in (*self.scheduler.queue, *self.scheduler.running)):
            self.overtaken_by[client] = Counter()
        return self.submit(prompt, max_tokens=max_tokens, client=client)

    def step(self) -> StepPlan:
        plan = super().step()
        for admitted in self.scheduler.admitted:
            for client, before in list(self.overtaken_by.items()):
                if client == admitted.params.client:
                    self.waits.append(self.overtaken_by.pop(client))
                else:
                    before[admitted.params.client] += 1
        return plan


@pytest.mark.parametrize("n_slots", [1, 3])
def test_many_requests_of_one_client_delay_another_by_one_request_at_most(n_slots: int) -> None:
    shared = Clients(n_slots=n_slots, n_ctx=512)
    for i in range(100):
        shared.submit(f"{HEAD}{i:03}", max_tokens=4, client="many")
    for i in range(4):
        for _ in range(3):
            shared.step()
        shared.finish(shared.arrive(f"single {i}", "one", max_tokens=4))
    assert shared.waits == [Counter()] * 4, "each got the next free slot"
    assert shared.scheduler.queue


@pytest.mark.parametrize("seed", range(200 if LONG else 6))
def test_each_client_is_admitted_once_at_most_while_one_without_a_running_request_waits(seed: int) -> None:
    rng = random.Random(seed)
    shared = Clients(n_slots=rng.choice([1, 2, 3]), n_ctx=512)
    names = [f"client {i}" for i in range(rng.randint(2, 5))]
    requests = []
    for _ in range(25):
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            client = rng.choice(names)
            prompt = "h" * rng.randint(0, 30) + f"{client} {rng.randrange(1000)}"
            requests.append(shared.arrive(prompt, client, max_tokens=rng.randint(1, 4)))
        shared.step()
    shared.finish(*requests)
    assert shared.waits
    assert all(n <= 1 for before in shared.waits for n in before.values()), shared.waits


def test_a_request_that_does_not_fit_is_not_overtaken_by_clients_that_run_some() -> None:
    shared = Clients(n_ctx=400, n_slots=4, idle_cells=0)
    for i in range(20):
        shared.submit(f"{i:02}" * 20, max_tokens=20, client="many")
    shared.step()
    assert len(shared.scheduler.running) == 4
    shared.finish(shared.arrive("L" * 300, "one", max_tokens=40))
    assert shared.waits == [Counter()]
    assert shared.scheduler.queue


def test_a_client_that_waits_for_a_prefix_holds_up_no_other() -> None:
    shared = Clients(n_slots=3, n_ctx=1024, n_ubatch=16)
    shared.submit("p" * 400, client="many")
    shared.step()
    follower = shared.arrive("p" * 400 + "q", "one")
    others = [shared.submit(f"other {i}", client="many") for i in range(4)]
    shared.finish(*others)
    assert follower.state is RequestState.QUEUED
    shared.finish(follower)


def test_among_clients_that_have_equally_many_the_longest_cached_prefix_goes_first() -> None:
    shared = Clients(n_slots=1, n_ctx=512)
    shared.run("warm" * 20)
    shared.submit("b", max_tokens=8)
    shared.step()
    cold = shared.submit("cold" * 20, client="a")
    shared.finish(shared.submit("warm" * 20 + "!", client="b"))
    assert cold.state is RequestState.QUEUED
    shared.finish(cold)


def test_new_clients_do_not_keep_one_that_had_its_turn_waiting_for_ever() -> None:
    shared = Clients(n_slots=1, n_ctx=256)
    shared.finish(shared.submit("first", client="patient"))
    patient = shared.submit("second", client="patient")
    n_new = 0
    newest = shared.submit("n", client="new")
    while patient.state is RequestState.QUEUED:
        n_new += 1
        newer = shared.submit("n", client=f"new {n_new}")
        shared.finish(newest)
        newest = newer
        assert n_new < MAX_ROUND_TURNS + 10
    assert n_new > MAX_ROUND_TURNS // 2


def test_choices_count_as_requests_of_their_client() -> None:
    shared = Clients(n_slots=2, n_ctx=512)
    choices = [shared.submit("many choices", max_tokens=9, group="g", client="many") for _ in range(12)]
    for _ in range(3):
        shared.step()
    shared.finish(shared.arrive("single", "one", max_tokens=3))
    assert shared.waits == [Counter()]
    shared.finish(*choices)


def test_the_client_with_several_running_requests_is_preempted_first() -> None:
    shared = Clients(n_ctx=256, n_slots=3, n_ubatch=64)
    old, second = (shared.submit(letter * 10, max_tokens=100, client="many") for letter in "ab")
    young = shared.submit("c" * 10, max_tokens=100, client="one")
    shared.finish(old, second, young)
    assert shared.preempted == [second]
