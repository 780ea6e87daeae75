"""The scheduler with models that have a partial state, on the fake backend."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from llamaslot.base.adapters import applied
from llamaslot.base.backend import Status
from llamaslot.base.kv_ops import Copy, Load, Take
from llamaslot.base.model import StateKind
from llamaslot.base.namespaces import key_salt, key_secret, salt_namespace, tenant_of
from llamaslot.base.tokens import packed
from llamaslot.kvcache.disk_io import Write, Written
from llamaslot.kvcache.nodes import SegmentState, checkpoints_on
from llamaslot.scheduler.checkpoint_taker import CheckpointTaker
from llamaslot.scheduler.request import Request, RequestState
from llamaslot.scheduler.step import StepPlan
from llamaslot.scheduler.turns import RunTurns
from tests.fake_backend import WINDOW, FakeBackend
from tests.scheduler.test_scheduler import Driver, generated


def rest(driver: Driver, n_steps: int) -> None:
    """Run steps of an idle server, a second apart, which offload prefixes and take checkpoints ahead of time."""
    for _ in range(n_steps):
        driver.backend.now += 1
        driver.step()


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
def test_an_idle_sequence_that_keeps_one_cell_of_a_window_never_stops_the_only_request(ram_bytes: int) -> None:
    """The window is about as long as the context, so one request needs all cells of windows."""
    few = {"n_window_cells": WINDOW + 2}
    driver = Driver(
        kind=StateKind.WINDOW, n_slots=2, n_ctx=64, n_ubatch=16, ram_bytes=ram_bytes, idle_cells=20, checkpoints=few
    )
    # Slot 0 keeps only the cells before the checkpoint, which the other one shares.
    driver.run("a" * 20 + "b" * 4, id_slot=0)
    driver.step()
    assert driver.cache.length(0) == 20
    assert not driver.cache._sequences.states.is_live(0)
    request = driver.run("a" * 20 + "z" * 34, max_tokens=10, id_slot=1)
    assert request.n_cached == 20
    assert request.state is RequestState.DONE
    assert len(generated(request)) == 10


def test_a_tenant_keeps_its_share_of_the_checkpoints_however_many_another_one_takes() -> None:
    ann, bob = (key_salt(key_secret(key), "") for key in ("ann", "bob"))
    driver = Driver(
        kind=StateKind.RECURRENT, n_slots=2, n_reserved=2, checkpoints={"step": 16, "ram_bytes": 8 * 64}
    )
    driver.run("a" * 60, cache_salt=ann)
    for letter in "bcdefghijk":
        driver.run(letter * 60, cache_salt=bob)
    n_used = {name: driver.cache._tiers.checkpoints.used[tenant_of(salt_namespace(name))] for name in (ann, bob)}
    assert n_used == {ann: 4 * 64, bob: 4 * 64}


@pytest.mark.parametrize("kind", [StateKind.RECURRENT, StateKind.WINDOW])
@pytest.mark.parametrize("segment_tokens", [16, 512])
def test_what_is_dropped_of_a_path_takes_its_checkpoints_along(kind: StateKind, segment_tokens: int) -> None:
    driver = Driver(
        kind=kind,
        n_slots=2,
        n_reserved=2,
        ram_bytes=10**6,
        segment_tokens=segment_tokens,
        offload_after=10**6,
        checkpoints={"step": 16},
    )
    dropped, other = driver.run("a" * 30 + "b" * 30, max_tokens=4), driver.run("a" * 30 + "c" * 20)
    rest(driver, 4)

    def positions(request: Request) -> list[int]:
        end = driver.cache._tree.match(request.namespace, packed(request.tokens.view())).matched_end
        return [each.end for each in checkpoints_on(end)]

    kept = positions(other)
    assert {32, 48, 56} <= {*positions(dropped)} - {*kept}
    driver.cache.dropper.drop_paths([(dropped.namespace, packed(dropped.tokens.view()))])
    driver.step()
    assert max(positions(dropped)) <= 30
    assert positions(other) == kept


@pytest.mark.parametrize("kind", [StateKind.RECURRENT, StateKind.HYBRID])
def test_a_fork_is_copied_from_the_sequence_that_has_the_state(kind: StateKind) -> None:
    """The first holder of the prefix goes on after it, so its state is another one."""
    driver = Driver(kind=kind, n_slots=3, checkpoints={"ram_bytes": 0})
    driver.run("a" * 20, id_slot=1)
    driver.run("a" * 20 + "b" * 10, id_slot=0)
    request = driver.submit("a" * 20 + "c" * 5, id_slot=2)
    plan = driver.step()
    assert [each.src for each in plan.operations if isinstance(each, Copy)] == [1]
    assert [work.run.start for work in plan.work] == [20]
    driver.finish(request)


@pytest.mark.parametrize("kind", [StateKind.RECURRENT, StateKind.WINDOW])
def test_an_end_that_two_idle_sequences_lose_at_once_gets_a_checkpoint(kind: StateKind) -> None:
    driver = Driver(kind=kind, n_slots=3, n_ctx=128, ram_bytes=10**6)
    for slot in (0, 1):
        last = driver.run("a" * 30, max_tokens=10, id_slot=slot)
    turn = "a" * 30 + bytes(generated(last)[:9]).decode()
    driver.run("z" * 115, max_tokens=5, id_slot=2)
    assert max(driver.cache.length(0), driver.cache.length(1)) < len(turn)
    assert driver.run(turn + "and what else").n_cached == len(turn)


@pytest.mark.parametrize("kind", [StateKind.RECURRENT, StateKind.WINDOW])
@pytest.mark.parametrize("disk_bytes", [0, 10**7])
@pytest.mark.parametrize("ends", ["apart", "on one path"])
def test_an_idle_server_comes_to_rest_even_if_its_states_exceed_the_budget(
    kind: StateKind, disk_bytes: int, ends: str
) -> None:
    size = FakeBackend(kind=kind).info.checkpoint_size
    assert size is not None
    driver = Driver(
        kind=kind,
        n_slots=4,
        n_ctx=1024,
        ram_bytes=10**6,
        disk_bytes=disk_bytes,
        offload_after=10**6,
        checkpoints={"step": 1000, "ram_bytes": 3 * size.of(200)},
    )
    for slots in ((0, 1), (2, 3)):
        prompts = [letter * 60 for letter in "abcd"]
        for slot in slots:
            request = driver.run(prompts[slot], max_tokens=30, id_slot=slot)
            if ends == "on one path":
                prompts[slots[1]] = prompts[slot] + bytes(generated(request)[:29]).decode() + "and what else"
    assert all(map(driver.cache._sequences.states.is_live, range(4)))
    taken = []
    for _ in range(200):
        driver.backend.now += 0.1
        plan = driver.step()
        taken.append(sum(isinstance(each, Take) for each in plan.operations))
        for job in plan.jobs:
            if isinstance(job, Write):
                driver.cache.on_io(Written(job.meta.number, ok=True), driver.backend.now)
    assert sum(taken) <= 4
    assert not any(taken[100:])


def with_two_paths() -> Driver:
    """A driver with one checkpoint on the path of slot 1, and then several on that of slot 0."""
    driver = Driver(kind=StateKind.RECURRENT, n_slots=2, n_ctx=2048, ram_bytes=10**6, checkpoints={"step": 999})
    driver.run("d" * 40, id_slot=1)
    for text in ("a" * 40, "a" * 40 + "b" * 30):
        driver.run(text, id_slot=0)
    return driver


def test_the_deepest_checkpoint_of_a_path_outlasts_those_above_deeper_ones() -> None:
    """Although those were used later."""
    driver = with_two_paths()
    checkpoints = driver.cache.checkpoints
    tiers = checkpoints._tiers
    [only] = checkpoints_on(driver.cache._sequences.end(1))
    *_, above = checkpoints_on(driver.cache._sequences.end(0))
    assert only.last_used < above.last_used
    n_left = len(tiers.checkpoints) - 1
    tiers.checkpoints.capacity = tiers.checkpoints.n_bytes - 1
    assert checkpoints.evict_for(0)
    assert (only.state.uses_ram, above.state.uses_ram, len(tiers.checkpoints)) == (True, False, n_left)


def test_a_checkpoint_above_one_that_only_the_disk_has_is_not_the_deepest() -> None:
    driver = with_two_paths()
    checkpoints = driver.cache.checkpoints
    lru = checkpoints._tiers.checkpoints
    [only] = checkpoints_on(driver.cache._sequences.end(1))
    deepest, *_, above = checkpoints_on(driver.cache._sequences.end(0))
    for each in checkpoints_on(deepest.node)[:-1]:
        lru.remove(each)
        each.state = SegmentState.DISK
    assert set(lru) == {only, above}
    lru.capacity = lru.n_bytes - 1
    assert checkpoints.evict_for(0)
    assert set(lru) == {only}


@pytest.mark.parametrize("is_cached_first", [False, True])
def test_a_checkpoint_at_the_end_of_the_first_message_is_known_however_it_was_taken(is_cached_first: bool) -> None:
    driver = Driver(kind=StateKind.RECURRENT, n_slots=2, n_ctx=2048, checkpoints={"step": 999})
    driver.scheduler._taker = CheckpointTaker(driver.cache, [ord("|")], 2048)
    if is_cached_first:
        driver.run("s" * 40, max_tokens=0, id_slot=0)
        driver.cache.checkpoints.take_at_end(0)
    driver.run("s" * 40 + "|user question|", max_tokens=20, id_slot=1)
    found = {each.end: each.ends_first_message for each in checkpoints_on(driver.cache._sequences.end(1))}
    assert found.pop(40)
    assert not any(found.values())


def test_a_checkpoint_that_is_loaded_with_its_path_is_known_to_end_the_first_message() -> None:
    """No cells have its path when the request is admitted. Others that go on differently do not change that."""
    driver = Driver(kind=StateKind.RECURRENT, n_slots=2, n_ctx=2048, ram_bytes=10**6, checkpoints={"step": 999})
    driver.scheduler._taker = CheckpointTaker(driver.cache, [ord("|")], 2048)
    driver.run("s" * 40, max_tokens=0, id_slot=0)
    driver.cache.evict(driver.cache.cells.total)
    assert driver.cache.cells.used == 0
    request = driver.run("s" * 40 + "|user question|", max_tokens=20, id_slot=1)
    assert request.n_loaded == 40

    def first_ends() -> list[int]:
        on_path = checkpoints_on(driver.cache._sequences.end(1))
        return [each.end for each in on_path if each.ends_first_message]

    assert first_ends() == [40]
    driver.run("s" * 40 + "other text", id_slot=0)
    assert first_ends() == [40]


def test_streams_and_prompts_take_turns_where_they_may_not_share_a_step() -> None:
    """Neither waits for the end of the other, and a prompt's step is no longer than a stream's gap allows."""
    driver = Driver(kind=StateKind.HYBRID_WINDOW, n_slots=4, n_ctx=2000, n_ubatch=256, checkpoints={"step": 999})
    stream = driver.submit("s" * 5, max_tokens=300)
    while not stream.n_generated:
        driver.step()
    prompts = [driver.submit(letter * 300, max_tokens=2) for letter in "abc"]
    driver.plans.clear()
    driver.finish(*prompts)
    assert stream.state is RequestState.RUNNING
    plans = [plan for plan in driver.plans if plan.work]
    assert all(plan.n_extra_steps == 0 for plan in plans[:-4])
    sizes = [[len(work.run.tokens) for work in plan.work] for plan in plans]
    assert all(len(each) == 1 or {*each} == {1} for each in sizes)
    assert max(max(each) for each in sizes[:-4]) < 256
    served = [plan.work[0].request for plan, each in zip(plans, sizes, strict=True) if max(each) > 1]
    assert {*served[:3]} == {*prompts}
    # As long as a prompt has more than a token left, every second step is the stream's.
    is_stream = [max(each) == 1 for each in sizes[: 1 + max(i for i, each in enumerate(sizes) if max(each) > 1)]]
    assert not any(first == second for first, second in pairwise(is_stream))


def test_a_plan_that_is_not_carried_out_takes_no_turn() -> None:
    driver = Driver(kind=StateKind.HYBRID_WINDOW, n_slots=4)
    stream, first, second = (driver.submit(letter * 20) for letter in "sab")
    turns = RunTurns()

    def carry_out(chosen: Request, single: list[Request], longer: list[Request]) -> None:
        pending = dict.fromkeys(single, 1) | dict.fromkeys(longer, 20)
        turn = turns.next(pending, 0.0)
        assert turn == turns.next(pending, 0.0)
        assert [*turn.requests] == [chosen]
        assert turn.long_runs[:1] == (() if chosen is stream else (chosen,))
        turns.commit(turn)

    for chosen in (first, stream, second, stream, first):
        carry_out(chosen, [stream], [first, second])
    carry_out(second, [], [first, second])
    carry_out(first, [], [first])
    carry_out(stream, [stream], [])


def run_in_turns(turns: RunTurns, n_pending: dict[Request, int], forced: Request | None = None) -> list[Request]:
    """Carry out the next turn of requests with so many pending tokens, and return those that it is for."""
    if forced is not None:
        forced.n_generated, forced.n_forced = 1, n_pending[forced] - 1
    turn = turns.next(n_pending, 0.0)
    turns.commit(turn)
    return list(turn.requests)


def test_a_new_prompt_comes_before_the_one_that_was_computed_last() -> None:
    """It waits longer: since it came, not only since the last step."""
    driver = Driver(kind=StateKind.HYBRID_WINDOW, n_slots=4)
    first, second, third = (driver.submit(letter * 20) for letter in "abc")
    turns = RunTurns()
    assert run_in_turns(turns, {first: 20}) == [first]
    assert run_in_turns(turns, {first: 20, second: 20}) == [second]
    assert run_in_turns(turns, {first: 20, second: 20, third: 20}) == [first]
    assert [run_in_turns(turns, {first: 20, second: 20, third: 20}) for _ in range(2)] == [[third], [second]]


def test_prompts_and_streams_with_forced_tokens_alternate_beside_single_tokens() -> None:
    """Steps of single tokens lie between the longer runs, and change nothing about whose turn is next."""
    driver = Driver(kind=StateKind.HYBRID_WINDOW, n_slots=4)
    stream, forced, prompt = (driver.submit(letter * 20) for letter in "sfp")
    turns = RunTurns()
    served = [run_in_turns(turns, {stream: 1, forced: 4, prompt: 20}, forced) for _ in range(8)]
    assert served == 2 * [[forced], [stream], [prompt], [stream]]


def test_a_stream_with_forced_tokens_waits_for_one_prompt_however_many_there_are() -> None:
    driver = Driver(kind=StateKind.HYBRID_WINDOW, n_slots=6, n_ctx=2000, n_ubatch=64, checkpoints={"step": 999})
    stream = driver.submit("s" * 5, max_tokens=300)
    while stream.n_generated < 3:
        driver.step()
    prompts = [driver.submit(letter * 150, max_tokens=1) for letter in "abcde"]
    served: list[Request] = []
    while not all(prompt.n_generated for prompt in prompts):
        if driver.scheduler.cache.length(stream.slot) == len(stream.tokens) - 1:
            for token in b"forced":
                stream.add_token(token, driver.backend.now, forced=True)
        [work] = driver.step().work
        served.append(work.request)
    assert all((first is stream) != (second is stream) for first, second in pairwise(served))
    of_prompts = [request.id for request in served if request is not stream]
    assert {*of_prompts[:5]} == {prompt.id for prompt in prompts}, "prompts take turns among themselves"


def test_short_prompts_that_keep_coming_do_not_overtake_a_long_one_where_they_may_not_share_a_step() -> None:
    """Each is computed in one step, and comes before the second request of another client."""
    driver = Driver(kind=StateKind.HYBRID_WINDOW, n_slots=4, n_ctx=2000, n_ubatch=64, checkpoints={"step": 999})
    stream = driver.submit("s" * 5, max_tokens=300, client="one")
    while not stream.n_generated:
        driver.step()
    long = driver.submit("b" * 200, client="one")
    shorts = iter(driver.submit(f"{a}{b}!", client="other") for a in "ABCDEFGH" for b in "ABCDEFGH")
    short = next(shorts)
    for _ in range(100):
        if short.state is RequestState.DONE:
            short = next(shorts)
        driver.step()
    assert long.state is RequestState.DONE
    assert stream.state is RequestState.RUNNING


def test_streams_with_forced_tokens_bound_the_steps_of_prompts_that_they_may_not_share() -> None:
    """What a constraint forces is a longer run, but the next token of that stream waits for the prompt's step."""
    driver = Driver(kind=StateKind.HYBRID_WINDOW, n_slots=2, n_ctx=2000, n_ubatch=256, checkpoints={"step": 999})
    stream = driver.submit("s" * 5, max_tokens=300)
    while stream.n_generated < 3:
        driver.step()
    prompt = driver.submit("p" * 900, max_tokens=1)
    sizes = []
    while not prompt.n_generated:
        if driver.scheduler.cache.length(stream.slot) == len(stream.tokens) - 1:
            for token in b"forced":
                stream.add_token(token, driver.backend.now, forced=True)
        [work] = driver.step().work
        if work.request is prompt:
            sizes.append(len(work.run.tokens))
    assert max(sizes) < 256


def loads_in_gaps() -> tuple[Driver, Request]:
    """A stream, and a request whose 99 cached tokens are loaded in four segments before its state is restored.

    A gap of the stream has time for about one of them.
    """
    driver = Driver(
        kind=StateKind.RECURRENT,
        n_slots=2,
        n_ctx=300,
        n_ubatch=64,
        ram_bytes=10**6,
        segment_tokens=32,
        load_us=1000.0,
        prefill_us=10_000.0,
        gap_ms=30.0,
        offload_after=10**5,
        checkpoints={"step": 33},
    )

    shared = "a" * 99
    driver.run(shared + "bcdefg" * 6, max_tokens=4, id_slot=0)
    rest(driver, 20)
    driver.run("z" * 250, max_tokens=4, id_slot=1)
    driver.run("y" * 250, max_tokens=4, id_slot=0)
    rest(driver, 20)
    stream = driver.submit("s", max_tokens=60, id_slot=1)
    while not stream.n_generated:
        driver.step()
    return driver, driver.submit(shared + "q" * 20, max_tokens=3, id_slot=0)


def test_a_state_is_restored_even_if_the_last_segment_before_it_alone_is_not_worth_loading() -> None:
    driver, request = loads_in_gaps()
    driver.plans.clear()
    driver.finish(request)
    assert sum(any(isinstance(each, Load) for each in plan.operations) for plan in driver.plans) >= 3
    assert (request.n_cached, request.n_prompt_computed) == (99, 20)


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FATAL])
def test_a_failed_step_leaves_a_request_that_waits_for_its_checkpoint_as_it_is(status: Status) -> None:
    driver, request = loads_in_gaps()
    driver.step()
    n_loaded = driver.held(request)
    assert 0 < n_loaded < 99
    assert driver.cache._restorer.is_waiting(request.slot)
    driver.backend.failures.append((status, 0))
    driver.step()
    assert not driver.backend.failures
    assert driver.held(request) >= n_loaded
    driver.finish(request)
    assert (request.n_cached, request.n_prompt_computed) == (99, 20)


def test_only_checkpoints_that_are_taken_use_up_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for which there is no memory costs a stream nothing, so the next request goes on too."""
    driver = Driver(kind=StateKind.RECURRENT, n_slots=2, checkpoints={"take_ms": 100.0, "step": 16})
    assert driver.cache.settings.max_takes_in_gap == 1
    requests = [driver.submit(letter * 20, max_tokens=8) for letter in "ab"]
    driver.step()
    driver.cache.has_decodes = True
    for request in requests:
        request.stops.add(driver.held(request))
    monkeypatch.setattr(driver.cache.checkpoints, "take", lambda seq: None)
    assert driver.scheduler._taker.take_due(requests, []) == requests
    monkeypatch.undo()
    assert driver.scheduler._taker.take_due(requests, []) == requests[:1]
    # What is to be taken before the next step counts, whoever wanted it.
    assert driver.scheduler._taker.take_due(requests, []) == requests[:1]


def test_a_checkpoint_that_is_not_trusted_is_dropped_even_if_a_request_runs_there() -> None:
    driver = Driver(kind=StateKind.RECURRENT, n_slots=2, ram_bytes=10**6, checkpoints={"step": 16})
    prompt = "a" * 40
    running = driver.submit(prompt, max_tokens=8)
    while not running.n_generated:
        driver.step()
    [checkpoint, *_] = [each for each in checkpoints_on(driver.match(prompt).matched_end) if each.node.n_pins]
    path = packed(running.tokens.view()[: checkpoint.end])
    driver.cache.dropper.invalidate_path(running.namespace, path, with_public=False)
    assert checkpoint.state is SegmentState.DROPPED
    driver.finish(running)
    assert running.n_generated == 8


def test_a_checkpoint_ends_a_message_if_the_next_token_is_a_control_token() -> None:
    """Not if the one before it is, or if it was taken within a message or at the end of a prompt of text."""
    driver = Driver(kind=StateKind.RECURRENT, n_slots=1, checkpoints={"step": 999})
    driver.scheduler._taker._control = np.array([ord("<"), ord(">")], dtype=np.int32)
    request = driver.submit("<" + "s" * 9 + ">" + "u" * 9 + "<" + "a" * 9, max_tokens=4)
    driver.step()
    for position in (10, 11, 15, 20, 21, 30):
        request.stops.add(position)
    driver.finish(request)
    found = {each.end: each.ends_message for each in checkpoints_on(driver.cache._sequences.end(0))}
    expected = {10: True, 11: False, 15: False, 20: True, 21: False, 30: False}
    assert {position: found[position] for position in expected} == expected


def test_a_control_token_that_is_marked_begins_a_message_too() -> None:
    """As `<|im_start|>` of a message that begins with an image."""
    driver = Driver(kind=StateKind.RECURRENT, n_slots=1, n_adapters=1, invocation=b"!", checkpoints={"step": 999})
    driver.scheduler._taker._control = np.array([ord("<")], dtype=np.int32)
    prompt = "<" + "s" * 19 + "<" + "u" * 7 + "!" + "u" * 20 + "<" + "a" * 9
    request = driver.submit(prompt, max_tokens=4, adapters=applied(driver.backend.info.adapters, (1.0,)))
    assert request.marked_from == (20,)
    driver.finish(request)
    found = checkpoints_on(driver.cache._sequences.end(0))
    # The end of the system prompt, and no later message instead of it.
    assert [each.end for each in found if each.ends_message] == [20]


def test_what_waits_for_the_next_gap_has_had_its_turn() -> None:
    """Else others would wait for as long as checkpoints keep it from being computed."""
    driver = Driver(
        kind=StateKind.HYBRID_WINDOW,
        n_slots=4,
        n_ctx=2000,
        n_ubatch=64,
        checkpoints={"take_ms": 100.0, "step": 999},
    )
    idle = [driver.run(letter * 30, id_slot=slot) for slot, letter in ((2, "i"), (3, "j"))]
    stream = driver.submit("s" * 5, max_tokens=300, id_slot=0)
    while not stream.n_generated:
        driver.step()
    long = driver.submit("p" * 300, id_slot=1)
    while driver.step().turn.long_runs != (long,):
        pass

    def step() -> list[Request]:
        return [work.request for work in driver.step().work]

    def step_while_it_waits(request: Request) -> StepPlan:
        request.stops.add(driver.held(request))
        assert driver.cache.checkpoints.take(idle.pop().slot) is not None
        return driver.step()

    assert step() == [stream]
    plan = step_while_it_waits(long)
    assert (plan.work, plan.turn.long_runs) == ([], (long,))
    assert [step(), step()] == [[stream], [long]]
    plan = step_while_it_waits(stream)
    assert (plan.work, plan.turn.long_runs) == ([], ())
    assert [step(), step()] == [[long], [stream]]


def test_no_more_duplicate_cells_are_evicted_than_are_needed() -> None:
    """Two idle sequences with cells of their own for the same tokens free twice as many cells as these tokens."""
    driver = Driver(kind=StateKind.RECURRENT, n_slots=4, n_ctx=1000, n_ubatch=512)
    running = driver.submit("z" * 40 + "r" * 9, max_tokens=300)
    beside = driver.submit("z" * 40, max_tokens=1)
    twins = [driver.submit("w" * 40 + letter, max_tokens=1) for letter in "xy"]
    driver.finish(beside, *twins)
    assert running.state is RequestState.RUNNING
    n_free, n_idle = driver.cache.cells.free, driver.cache.cells.idle
    assert (n_idle, driver.cache._sequences.n_idle_duplicates) == (42, 40 + 40)
    driver.cache.evict(n_idle + 20)
    assert driver.cache.cells.free == n_free + 42 + 40
    assert driver.held(beside) == 40, "it has cells of its own for what the running one holds"
    driver.cache.evict(1)
    assert driver.held(beside) == 0
    driver.finish(running)
