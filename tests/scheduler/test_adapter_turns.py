"""Requests with different LoRA adapters: never in one step, in fair turns, and no prefix of one set for another."""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any

import msgspec
import pytest

from llamaslot.base.adapters import Adapters, applied
from llamaslot.base.cache_ids import MAX_MARKED_FOR_ADAPTERS
from llamaslot.base.commands import GenerateParams
from llamaslot.base.model import StateKind
from llamaslot.base.namespaces import PUBLIC_SALT, key_salt, key_secret, salt_namespace
from llamaslot.scheduler.request import Request, RequestState
from tests.fake_backend import FakeBackend
from tests.scheduler.test_scheduler import DECODE_SECONDS, Driver, TimedBackend, generated

NONE, ONE, TWO, HALF = range(4)
SCALES = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.0))
LOADED = FakeBackend(n_adapters=2).info.adapters
SETS: list[Adapters] = [applied(LOADED, scales) for scales in SCALES]
SWITCH_MS = 1.0
MIN_TURN_S = 20 * SWITCH_MS / 1e3
PROMPT = "a prompt that requests with several adapters have in common " * 2


def driver(switch_ms: float = SWITCH_MS, **shape: Any) -> Driver:
    given = {"n_slots": 4, "n_reserved": 4, "n_ctx": 4096, "n_ubatch": 64, "min_shared": 8}
    backend = TimedBackend(
        **{name: value for name, value in (given | shape).items() if name != "min_shared"}, n_adapters=2
    )
    backend.info = msgspec.structs.replace(backend.info, adapter_switch_ms=switch_ms)
    return Driver(backend=backend, min_shared=8)


def alone(prompt: str, adapters: Adapters, max_tokens: int = 4) -> list[int]:
    return generated(driver().run(prompt, max_tokens=max_tokens, adapters=adapters))


def turns(shared: Driver) -> list[tuple[Adapters, int]]:
    """The sets of adapters of the steps so far, each with how many steps its turn had."""
    for plan in shared.plans:
        assert len({work.request.params.adapters for work in plan.work}) <= 1, "two sets in one step"
    steps = [plan.adapters for plan in shared.plans if plan.work]
    return [(adapters, len([*group])) for adapters, group in groupby(steps)]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("kind", [StateKind.NONE, StateKind.HYBRID_WINDOW])
def test_each_request_gives_what_it_gives_alone_and_shares_no_step_with_others(
    kind: StateKind, unified: bool
) -> None:
    if kind is not StateKind.NONE and not unified:
        pytest.skip("checkpoints need a unified pool")
    shape = {"kind": kind} if kind is not StateKind.NONE else {"unified": unified, "n_reserved": 0}
    shared = driver(**shape)
    requests = [shared.submit(PROMPT + "!", max_tokens=12, adapters=each) for each in SETS]
    shared.finish(*requests)
    assert len(turns(shared)) > len(SETS)
    replies = [generated(request) for request in requests]
    assert len({tuple(reply) for reply in replies}) == len(SETS)
    for adapters, reply in zip(SETS, replies, strict=True):
        fresh = driver(**shape)
        assert generated(fresh.run(PROMPT + "!", max_tokens=12, adapters=adapters)) == reply


def test_a_prefix_is_reused_with_the_same_adapters_only() -> None:
    shared = driver()
    for adapters in SETS:
        first = shared.run(PROMPT + "1", max_tokens=4, adapters=adapters)
        assert (first.n_cached, first.miss) == (0, "cold")
        again = shared.run(PROMPT + "2", max_tokens=4, adapters=adapters)
        assert again.n_cached == len(PROMPT)
        assert generated(again) == alone(PROMPT + "2", adapters)


def test_scales_of_zero_share_what_the_model_alone_has_computed() -> None:
    shared = driver()
    shared.run(PROMPT, adapters=())
    assert shared.run(PROMPT + "!", adapters=applied(LOADED, (0.0, -0.0))).n_cached == len(PROMPT)


def test_a_namespace_without_adapters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: what this file checks would not hold."""
    monkeypatch.setattr(GenerateParams, "namespace_with", lambda params, _key: salt_namespace(params.cache_salt))
    shared = driver()
    shared.run(PROMPT, adapters=SETS[ONE])
    with pytest.raises(AssertionError, match="KV of other adapters"):
        shared.run(PROMPT + "!", max_tokens=4, adapters=SETS[TWO])


def test_tenants_read_what_is_public_of_the_same_adapters_only() -> None:
    shared = Driver(
        backend=TimedBackend(n_slots=2, n_reserved=4, n_ctx=512, n_ubatch=64, n_adapters=2),
        ram_bytes=10**6,
        segment_tokens=16,
        min_shared=8,
    )
    shared.run(PROMPT, cache_salt=PUBLIC_SALT, adapters=SETS[ONE])
    salt = key_salt(key_secret("ann"), "")
    for adapters, n in ((SETS[NONE], 0), (SETS[TWO], 0), (SETS[ONE], len(PROMPT))):
        request = shared.run(PROMPT + "!", max_tokens=4, cache_salt=salt, adapters=adapters)
        assert request.n_cached == n
        assert generated(request) == alone(PROMPT + "!", adapters)


def test_a_tenant_reads_what_is_public_up_to_the_marks_before_an_invocation() -> None:
    def fresh() -> Driver:
        shape: dict[str, Any] = {"n_slots": 2, "n_reserved": 4, "n_ctx": 512, "n_ubatch": 64, "n_adapters": 2}
        backend = TimedBackend(**shape, invocation=b"!")
        return Driver(backend=backend, ram_bytes=10**6, segment_tokens=16, min_shared=8)

    shared, salt = fresh(), key_salt(key_secret("ann"), "")
    invoked = applied(shared.backend.info.adapters, SCALES[ONE])
    shared.run(PROMPT, cache_salt=PUBLIC_SALT)
    for adapters, n_marked in ((invoked, MAX_MARKED_FOR_ADAPTERS), (SETS[NONE], 0)):
        request = shared.run(PROMPT + "!", max_tokens=4, cache_salt=salt, adapters=adapters)
        assert request.n_cached == len(PROMPT) - n_marked
        assert generated(request) == generated(fresh().run(PROMPT + "!", max_tokens=4, adapters=adapters))
    # What it has computed with the adapter is not public.
    other = shared.run(PROMPT + "!", max_tokens=4, cache_salt=key_salt(key_secret("bob"), ""), adapters=invoked)
    assert other.n_cached == len(PROMPT) - MAX_MARKED_FOR_ADAPTERS


def test_streams_of_two_sets_take_turns_of_many_steps() -> None:
    shared = driver(switch_ms=10.0)
    streams = [
        shared.submit(letter * 9, max_tokens=200, adapters=SETS[1 + i % 2]) for i, letter in enumerate("abcd")
    ]
    shared.finish(*streams)
    in_a_turn = round(20 * 10e-3 / DECODE_SECONDS)
    whole = [n for _, n in turns(shared)[1:-2]]
    assert whole
    assert all(in_a_turn <= n <= in_a_turn + 1 for n in whole)


def test_a_single_set_never_waits_and_is_never_changed() -> None:
    shared = driver(switch_ms=1000.0)
    shared.run("a" * 9, max_tokens=20, adapters=SETS[ONE])
    shared.run("b" * 9, max_tokens=20, adapters=SETS[ONE])
    assert shared.backend.n_switches == 1
    assert [n for _, n in turns(shared)] == [len([plan for plan in shared.plans if plan.work])]


def test_a_long_prompt_delays_streams_with_other_adapters_by_a_turn_and_a_step() -> None:
    gap_s = 0.125
    shared = driver(switch_ms=1.0)
    stream = shared.submit("s" * 9, max_tokens=-1, adapters=SETS[ONE])
    for _ in range(20):
        shared.step()
    prompt = shared.submit("p" * 3000, adapters=SETS[TWO])
    times = []
    n, started = stream.n_generated, shared.backend.now
    while prompt.state is not RequestState.DONE:
        shared.step()
        if stream.n_generated > n:
            n = stream.n_generated
            times.append(shared.backend.now)
    waits = [b - a for a, b in zip([started, *times], times, strict=False)]
    assert max(waits) <= MIN_TURN_S + 2 * gap_s
    # Nor does the prompt wait for the streams for longer than their turns.
    assert shared.backend.now - started < 3 * 3000 / 1024


def test_new_sets_do_not_overtake_those_that_wait() -> None:
    shared = driver(switch_ms=0.1)
    waiting = shared.submit("w" * 9, max_tokens=30, adapters=SETS[ONE])
    n_others = 0
    others: list[Request] = []
    while waiting.state is not RequestState.DONE:
        if len(shared.scheduler.running) + len(shared.scheduler.queue) < 4:
            n_others += 1
            scales = (1.0 + n_others, 0.0)
            others.append(shared.submit(f"{n_others}" * 9, max_tokens=1, adapters=applied(LOADED, scales)))
        shared.step()
        assert n_others < 200
    shared.finish(*others)


@pytest.mark.parametrize("shape", [{}, {"unified": False, "n_reserved": 0}, {"kind": StateKind.HYBRID_WINDOW}])
def test_random_requests_give_what_they_give_alone(shape: dict[str, Any]) -> None:
    chance = random.Random(5)
    shared = driver(switch_ms=chance.choice([0.0, 0.5, 5.0]), **shape)
    asked: list[tuple[str, int, Adapters, Request]] = []
    for _ in range(40):
        prompt = PROMPT[: chance.randrange(1, len(PROMPT))] + chance.choice("abc") * chance.randrange(1, 60)
        adapters, n = chance.choice(SETS), chance.randrange(1, 9)
        asked.append((prompt, n, adapters, shared.submit(prompt, max_tokens=n, adapters=adapters)))
        for _ in range(chance.randrange(4)):
            shared.step()
    shared.finish(*(request for *_, request in asked))
    turns(shared)
    for prompt, n, adapters, request in asked:
        fresh = driver(**shape)
        assert generated(request) == generated(fresh.run(prompt, max_tokens=n, adapters=adapters))
