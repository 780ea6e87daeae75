"""The scheduler step by step on the fake backend: plan, apply, commit, on a clock that only the model advances."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from llamaslot.base.backend import Decoded, Draws, Run, Status
from llamaslot.base.commands import GenerateParams
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Copy, Load, Operation, Remove, Save
from llamaslot.base.model import QUERY_BLOCK, StepCost
from llamaslot.base.namespaces import salt_namespace
from llamaslot.base.tokens import TokenizedPrompt, Tokens, packed
from llamaslot.kvcache.match import Match
from llamaslot.scheduler import admission
from llamaslot.scheduler.admission import MAX_OVERTAKEN
from llamaslot.scheduler.request import Request, RequestState
from llamaslot.scheduler.scheduler import DecodeFailed, Sampled, Scheduler
from llamaslot.scheduler.step import StepPlan, apply
from tests.cache_settings import NO_CHECKPOINTS, cache_settings, checkpoint_settings
from tests.conftest import LONG
from tests.fake_backend import FakeBackend
from tests.pool import check_pool

DECODE_SECONDS = 1 / 64
PROMPT_TOKEN_SECONDS = 1 / 1024


class TimedBackend(FakeBackend):
    """A fake model that takes `PROMPT_TOKEN_SECONDS` a prompt token and `DECODE_SECONDS` for all streams."""

    now = 0.0

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        self.now += step_seconds(runs)
        return super().decode(runs, draws)


def step_seconds(runs: Sequence[Run]) -> float:
    """The time that a step takes on the tests' clock."""
    prompt_tokens = sum(len(run.tokens) for run in runs if len(run.tokens) > 1)
    streams = any(len(run.tokens) == 1 for run in runs)
    return prompt_tokens * PROMPT_TOKEN_SECONDS + streams * DECODE_SECONDS


class Driver:
    """A scheduler on a backend, one step a call, with a record of every step."""

    def __init__(
        self,
        *,
        gap_ms: float = 125.0,
        idle_cells: int | None = None,
        offload_after: int | None = None,
        ram_bytes: int = 0,
        ram_is_fixed: bool = True,
        disk_bytes: int = 0,
        segment_tokens: int = 512,
        save_us: float = 0.0,
        load_us: float = 0.0,
        prefill_us: float = 0.0,
        idle_delay_ms: float = 0.0,
        min_shared: int = 64,
        step_cost: StepCost | None = None,
        checkpoints: Mapping[str, float] | None = None,
        backend: Any = None,
        **shape: float,
    ) -> None:
        self.backend = backend or TimedBackend(**shape)
        info = self.backend.info
        chosen = NO_CHECKPOINTS
        if info.checkpoint_size is not None:
            fields = {"n_swa": info.state.n_swa, "ram_bytes": 10**6, "min_gap": 4, "min_end_gap": 4}
            chosen = checkpoint_settings(
                kind=info.state.kind, size=info.checkpoint_size, **fields | dict(checkpoints or {})
            )
        self.scheduler = Scheduler(
            msgspec.structs.replace(info, step_cost=step_cost),
            cache_settings(
                n_slots=info.n_slots,
                n_cells=info.n_ctx,
                n_seqs=self.backend.n_seqs,
                unified=info.unified,
                can_trim=info.can_trim,
                checkpoints=chosen,
                idle_cells=idle_cells,
                offload_after=offload_after,
                ram_bytes=ram_bytes,
                ram_is_fixed=ram_is_fixed,
                disk_bytes=disk_bytes,
                segment_size=info.segment_size,
                segment_tokens=segment_tokens,
                save_us=save_us,
                load_us=load_us,
                prefill_us=prefill_us,
                min_shared=min_shared,
                gap_ms=gap_ms,
                idle_delay_ms=idle_delay_ms,
            ),
            eog=self.backend.vocab.eog,
        )
        self.cache = self.scheduler.cache
        self.plans: list[StepPlan] = []
        self.preempted: list[Request] = []
        self.admitted: list[Request] = []
        self.outcomes: list[Sampled | DecodeFailed] = []
        self.n_submitted = 0

    def submit(self, prompt: str, *, max_tokens: int = 1, **fields: object) -> Request:
        """Queue a request for a prompt of one token a letter; it generates all of its tokens."""
        self.n_submitted += 1
        params = GenerateParams(
            f"request {self.n_submitted}",
            sampling=Sampling(temperature=0.0, ignore_eos=True),
            max_tokens=max_tokens,
            **fields,
        )
        now, can_reuse = self.backend.now, self.backend.info.can_reuse
        request = Request(params, tokenized(prompt), arrival=self.n_submitted, now=now, can_reuse=can_reuse)
        self.scheduler.submit(request)
        return request

    def step(self) -> StepPlan:
        """Plan, apply and commit one step."""
        running, queued = set(self.scheduler.running), list(self.scheduler.queue)
        plan = self.scheduler.plan(self.backend.now)
        self.preempted += [request for request in self.scheduler.queue if request in running]
        self.admitted += [request for request in self.scheduler.running if request in queued]
        result = apply(plan, self.backend, lambda: self.backend.now)
        self.outcomes = self.scheduler.commit(plan, result, self.backend.now)
        self.plans.append(plan)
        self.check()
        return plan

    def check(self) -> None:
        """Verify that the backend holds what the cache says."""
        check_pool(self.scheduler, self.backend)

    def finish(self, *requests: Request, steps: int = 2000) -> None:
        """Step until these requests are done."""
        for _ in range(steps):
            if all(request.state is RequestState.DONE for request in requests):
                return
            self.step()
        raise AssertionError([f"{request.id}: {request.state}" for request in requests])

    def run(self, prompt: str, *, max_tokens: int = 1, id_slot: int = -1, **fields: object) -> Request:
        """A request from its submission to its end."""
        request = self.submit(prompt, max_tokens=max_tokens, id_slot=id_slot, **fields)
        self.finish(request)
        return request

    def match(self, prompt: str) -> Match:
        """The lookup of a prompt."""
        return self.cache.match(salt_namespace(""), packed(as_tokens(prompt)))

    def holders(self, prompt: str) -> list[int]:
        """The sequences that hold all tokens of a prompt."""
        match = self.match(prompt)
        return list(match.resident_end.holders()) if match.n_resident == len(prompt) else []

    def held(self, request: Request) -> int:
        """Tokens that the slot holds in which a request runs or ran last."""
        return self.cache.length(request.slot)


def tokenized(prompt: str) -> TokenizedPrompt:
    return TokenizedPrompt(packed(as_tokens(prompt)))


def as_tokens(prompt: str) -> Tokens:
    return np.array([ord(letter) for letter in prompt], dtype=np.int32)


def as_letters(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def trims(plan: StepPlan) -> dict[int, int]:
    """Tokens that the truncated sequences of a plan keep."""
    return {each.seq: each.keep for each in plan.operations if isinstance(each, Remove)}


def prefill(plan: StepPlan) -> int:
    """The prompt tokens of a plan."""
    return sum(len(work.run.tokens) for work in plan.work if len(work.run.tokens) > 1)


def generated(request: Request) -> list[int]:
    """The tokens that a request sampled."""
    return request.tokens.view()[request.n_prompt :].tolist()


def test_idle_cells_are_evicted_from_the_least_recently_used_path_first() -> None:
    driver = Driver(n_slots=4, n_ctx=64, n_ubatch=64)
    a, b, c = (driver.run(letter * 15) for letter in "abc")
    driver.run("a" * 15)  # which makes b the least recently used
    driver.submit("d" * 39)
    plan = driver.step()
    assert {b.slot: 0, c.slot: 10}.items() <= trims(plan).items()
    assert driver.holders("a" * 15)
    assert plan.work[0].request.slot not in {b.slot, c.slot}
    assert a.slot == 0


def test_a_decode_without_room_evicts_idle_cells_before_it_ends_a_request() -> None:
    driver = Driver(n_slots=3, n_ctx=128)
    idle = driver.run("a" * 20)
    request = driver.submit("c" * 20, max_tokens=4)
    driver.backend.failures.append((Status.NO_CELLS, 0))
    driver.step()
    assert driver.outcomes == []
    assert request.state is RequestState.RUNNING
    assert trims(driver.step())[idle.slot] == 0
    driver.finish(request)
    assert generated(request) == generated(Driver(n_slots=3, n_ctx=128).run("c" * 20, max_tokens=4))


@pytest.mark.parametrize(("max_tokens", "fits"), [(6, True), (7, False)])
def test_a_new_request_waits_until_it_fits_beside_what_the_running_ones_still_need(
    max_tokens: int, fits: bool
) -> None:
    driver = Driver(n_slots=3, n_ctx=100, n_ubatch=64)
    running = driver.submit("a" * 60, max_tokens=5)
    driver.step()
    later = driver.submit("b" * 29, max_tokens=max_tokens)
    driver.step()
    assert (later.state is RequestState.RUNNING) == fits
    driver.finish(running, later)
    assert driver.preempted == []


def test_a_request_without_a_limit_does_not_reserve_its_whole_context() -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=64)
    first, second = (driver.submit(letter * 40, max_tokens=-1) for letter in "ab")
    driver.step()
    assert driver.admitted == [first, second]


@pytest.mark.slow
def test_the_expected_length_follows_the_lengths_of_earlier_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_NEWEST_WEIGHT", 0.5)
    driver = Driver(n_slots=2, n_ctx=512, n_ubatch=64)
    for _ in range(6):
        driver.run("x", max_tokens=200)
    first, second = (driver.submit(letter * 70, max_tokens=-1) for letter in "ab")
    driver.step()
    assert driver.admitted[-1] is first
    driver.finish(first, second)
    assert driver.preempted == []


def test_a_request_that_does_not_fit_is_overtaken_a_limited_number_of_times() -> None:
    driver = Driver(n_slots=3, n_ctx=256, n_ubatch=128)
    running = driver.submit("r" * 60, max_tokens=60)
    driver.step()
    big = driver.submit("b" * 150, max_tokens=4)
    small = [driver.submit(f"{i:02} small", max_tokens=3) for i in range(MAX_OVERTAKEN + 5)]
    driver.finish(running)
    assert driver.admitted[1:] == small[:MAX_OVERTAKEN]
    driver.step()
    assert driver.admitted[1 + MAX_OVERTAKEN] is big
    assert big.n_overtaken == MAX_OVERTAKEN
    driver.finish(big, *small)


def test_the_longest_cached_prefix_is_admitted_first() -> None:
    driver = Driver(n_slots=1, n_reserved=4, n_ctx=512, n_ubatch=128)
    driver.run("h" * 50)
    blocking = driver.submit("x" * 5, max_tokens=5)
    driver.step()
    waiting = [driver.submit("n" * 60), driver.submit("h" * 20 + "a" * 9), driver.submit("h" * 50 + "b")]
    driver.finish(blocking, *waiting)
    assert driver.admitted[2:] == waiting[::-1]


def test_better_matches_do_not_keep_another_request_waiting_for_ever() -> None:
    driver = Driver(n_slots=1, n_reserved=4, n_ctx=512, n_ubatch=128)
    driver.run("h" * 50)
    blocking = driver.submit("x" * 5, max_tokens=2)
    driver.step()
    other = driver.submit("n" * 60)
    better = [driver.submit("h" * 50 + chr(97 + i)) for i in range(MAX_OVERTAKEN + 3)]
    driver.finish(blocking, other, *better)
    assert driver.admitted.index(other) == 2 + MAX_OVERTAKEN


def test_a_request_for_a_certain_slot_is_overtaken_a_limited_number_of_times() -> None:
    driver = Driver(n_slots=1, n_reserved=4, n_ctx=512, n_ubatch=128)
    driver.run("h" * 50)
    blocking = driver.submit("x" * 5, max_tokens=2)
    driver.step()
    pinned = driver.submit("n" * 60, id_slot=0)
    better = [driver.submit("h" * 50 + chr(97 + i)) for i in range(MAX_OVERTAKEN + 3)]
    driver.finish(blocking, pinned, *better)
    assert driver.admitted.index(pinned) == 2 + MAX_OVERTAKEN


def test_a_preempted_request_resumes_before_any_that_came_after_it() -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=64)
    oldest = driver.submit("a" * 60, max_tokens=100)
    preempted = driver.submit("b" * 60, max_tokens=100)
    younger = [driver.submit(letter * 3, max_tokens=3) for letter in "cd"]
    while not driver.preempted:
        driver.step()
    assert driver.preempted == [preempted]
    assert driver.scheduler.queue == [preempted, *younger]
    driver.admitted.clear()
    driver.finish(oldest, preempted, *younger)
    assert driver.admitted == [preempted, *younger]


def test_prompts_of_a_partitioned_pool_take_turns_the_shortest_and_every_fourth_time_the_first() -> None:
    driver = Driver(n_slots=4, n_ctx=4 * 2048, n_ubatch=64, unified=False)
    stream = driver.submit("s" * 4, max_tokens=-1)
    driver.step()
    first = driver.submit("f" * 1500)
    others = [driver.submit(letter * 1000) for letter in "ab"]
    chunks = []
    while any(request.state is not RequestState.DONE for request in others):
        work = driver.step().work
        assert [each.request for each in work] == [stream] or len(work) == 1
        chunks += [each.request for each in work if each.request is not stream]
    assert chunks.count(first) * 4 == pytest.approx(len(chunks), abs=4)
    assert all(first in chunks[i : i + 4] for i in range(0, len(chunks) - 4, 4))
    assert chunks.index(others[1]) > max(i for i, each in enumerate(chunks) if each is others[0])


def test_short_prompts_of_a_partitioned_pool_come_before_streams_as_far_as_the_gap_allows() -> None:
    driver = Driver(n_slots=8, n_ctx=8 * 1024, n_ubatch=256, unified=False)
    stream = driver.submit("s" * 4, max_tokens=-1)
    for _ in range(3):
        driver.step()
    prompts = [driver.submit(letter * 20, max_tokens=2) for letter in "abcdefg"]
    last, gaps = driver.backend.now, []
    while any(request.state is not RequestState.DONE for request in prompts):
        if stream in [each.request for each in driver.step().work]:
            gaps.append(driver.backend.now - last)
            last = driver.backend.now
    assert max(gaps) <= 0.125
    n_steps = sum(any(each.request is stream for each in plan.work) for plan in driver.plans[4:])
    assert n_steps < len(prompts), "several prompts come between two steps of streams"


def test_a_slow_stream_of_a_partitioned_pool_waits_for_one_step_of_a_prompt() -> None:
    """Its steps take longer than the gap already."""
    driver = Driver(n_slots=2, n_ctx=8192, n_ubatch=256, unified=False, gap_ms=0.001)
    stream = driver.submit("s" * 4, max_tokens=-1)
    for _ in range(3):
        driver.step()
    prompt = driver.submit("p" * 500)
    driver.plans.clear()
    driver.finish(prompt)
    served = [[each.request for each in plan.work] for plan in driver.plans]
    assert all(a != b for a, b in pairwise(served))
    assert {*map(tuple, served)} == {(stream,), (prompt,)}


def test_a_cached_prompt_of_a_partitioned_pool_has_its_first_token_after_one_chunk_of_another() -> None:
    """However long the gap is; and one chunk lies between each two of such prompts."""
    driver = Driver(n_slots=4, n_ctx=4 * 1024, n_ubatch=64, unified=False, gap_ms=1e6)
    stream = driver.submit("s" * 4, max_tokens=-1)
    driver.step()
    driver.run("h" * 300)
    long = driver.submit("l" * 900)
    driver.step()
    for _ in range(3):
        cached = driver.submit("h" * 300)
        served = [[each.request for each in driver.step().work] for _ in range(2)]
        assert served in ([[stream, cached], [long]], [[long], [stream, cached]])
        assert cached.state is RequestState.DONE


def test_what_is_loaded_for_prompts_counts_for_the_gap_of_streams_that_wait() -> None:
    """Each prompt has 60 ms of loading and 20 ms of computing, in a gap of 125 ms."""
    driver = Driver(
        n_slots=6, n_ctx=6 * 1024, n_ubatch=256, unified=False, ram_bytes=10**6, prefill_us=1e3, load_us=1.0
    )
    heads = [letter * 200 for letter in "abcde"]
    for head in heads:
        driver.run(head)
    driver.cache.evict(10**6)
    stream = driver.submit("s" * 4, max_tokens=-1, id_slot=5)
    for _ in range(3):
        driver.step()
    change = driver.backend.change

    def slow(operation: Operation) -> None:
        driver.backend.now += 0.06 * isinstance(operation, Load | Copy)
        change(operation)

    driver.backend.change = slow  # type: ignore[method-assign]
    last, gaps = driver.backend.now, []
    # They come one after the other: those that come at once are loaded at once.
    prompts = []
    for head in heads:
        prompts.append(driver.submit(head + "x" * 20, max_tokens=2))
        if stream in [each.request for each in driver.step().work]:
            gaps.append(driver.backend.now - last)
            last = driver.backend.now
    assert gaps
    assert max(gaps) < 0.125 + 2 * 0.06, "the gap, and a load in the step that exceeds it and in the streams' own"
    driver.finish(*prompts)
    assert sum(prompt.n_loaded + prompt.n_copied for prompt in prompts) >= 5 * 190


@pytest.mark.parametrize("gap_ms", [20, 60, 200])
def test_forced_tokens_of_a_partitioned_pool_fit_the_micro_batch_and_what_is_left_of_the_gap(gap_ms: float) -> None:
    cost = StepCost(step_us=1e6, token_us=1e3, token_cell_us=1e3, block_us=0.0, block_cell_us=0.0)
    driver = Driver(n_slots=4, n_ctx=4 * 1024, n_ubatch=64, unified=False, step_cost=cost, gap_ms=gap_ms)
    streams = [driver.submit(letter * 4, max_tokens=-1) for letter in "abc"]
    while not all(stream.n_generated > 2 for stream in streams):
        driver.step()
    prompt = driver.submit("p" * 900, max_tokens=3)
    last, gaps = driver.backend.now, []
    while prompt.state is not RequestState.DONE:
        if driver.held(streams[0]) == len(streams[0].tokens) - 1:
            for token in b"forced" * 15:
                streams[0].add_token(token, driver.backend.now, forced=True)
        if prompt not in [work.request for work in driver.step().work]:
            gaps.append(driver.backend.now - last)
            last = driver.backend.now
    assert all(plan.n_tokens <= 64 for plan in driver.plans)
    # Its first block may take half as long again, and it may take as long as the streams' own steps.
    assert max(gaps) < 1.5 * max(gap_ms / 1e3, 64 * PROMPT_TOKEN_SECONDS + DECODE_SECONDS)


def test_forced_tokens_after_the_last_prompt_of_a_partitioned_pool_share_its_gap() -> None:
    driver = Driver(n_slots=2, n_ctx=2 * 1024, n_ubatch=256, unified=False, gap_ms=125.0)
    stream = driver.submit("s" * 4, max_tokens=-1)
    while stream.n_generated < 3:
        driver.step()
    prompt = driver.submit("p" * 90, max_tokens=1)
    started = driver.backend.now
    while prompt.state is not RequestState.DONE:
        if prompt not in [work.request for work in driver.step().work]:
            started = driver.backend.now
    assert driver.backend.now - started > 0.05
    for token in b"forced" * 15:
        stream.add_token(token, driver.backend.now, forced=True)
    driver.step()
    assert driver.backend.now - started < 1.2 * 0.125


def test_a_partitioned_layout_gives_each_slot_its_own_cells() -> None:
    driver = Driver(n_slots=2, n_ctx=64, n_ubatch=64, unified=False)
    requests = [driver.submit(letter * 24, max_tokens=-1) for letter in "ab"]
    driver.step()
    assert driver.admitted == requests
    driver.finish(*requests)
    assert driver.preempted == []
    assert driver.cache.cells.used == 62
    third = driver.run("a" * 24 + "more", id_slot=requests[0].slot)
    assert third.slot == requests[0].slot
    other = driver.scheduler.slots[requests[1].slot]
    assert driver.cache.length(other.id) == 31


def test_a_long_prompt_takes_its_chunk_beside_a_stream_that_never_waits() -> None:
    driver = Driver(n_slots=3, n_ctx=1024, n_ubatch=256)
    stream = driver.submit("s" * 4, max_tokens=200)
    driver.step()
    later = [driver.submit(letter * 300) for letter in "ab"]
    n_beside = 0
    while any(request.state is not RequestState.DONE for request in later):
        limit = driver.scheduler.chunks.limit(1)
        n_generated = stream.n_generated
        plan = driver.step()
        n_beside += prefill(plan) > 0
        assert prefill(plan) <= limit < 300
        assert stream.n_generated == n_generated + 1
        assert stream in [outcome.request for outcome in driver.outcomes if isinstance(outcome, Sampled)]
    assert n_beside > 5


def shares(plan: StepPlan) -> dict[str, int]:
    return {work.request.id: len(work.run.tokens) for work in plan.work}


def test_the_prompt_with_least_left_goes_first_and_the_oldest_always_gets_a_share() -> None:
    driver = Driver(n_slots=4, n_ctx=2048, n_ubatch=128)
    oldest = driver.submit("o" * 1000)
    driver.step()
    longer, short, shortest = (driver.submit(letter * n) for letter, n in (("l", 300), ("s", 70), ("t", 20)))
    assert shares(driver.step()) == {oldest.id: 32, short.id: 70, shortest.id: 20, longer.id: 6}
    assert shares(driver.step()) == {oldest.id: 32, longer.id: 96}


def test_the_oldest_prompt_gets_no_more_than_it_has_left() -> None:
    driver = Driver(n_slots=2, n_ctx=1024, n_ubatch=128)
    oldest, other = driver.submit("o" * 10), driver.submit("l" * 300)
    assert shares(driver.step()) == {oldest.id: 10, other.id: 118}


def test_chunks_grow_to_what_fits_the_gap_by_the_measured_cost() -> None:
    driver = Driver(gap_ms=125.0, n_slots=2, n_ctx=1024, n_ubatch=256)
    assert driver.scheduler.chunks.limit(1) == 16
    stream = driver.submit("s" * 128, max_tokens=50)
    driver.step()
    driver.step()
    allowed = round((0.125 - DECODE_SECONDS) / PROMPT_TOKEN_SECONDS)
    whole_blocks = 2 * QUERY_BLOCK - 1
    assert abs(allowed - whole_blocks) < QUERY_BLOCK / 2
    driver.submit("n" * 500)
    assert prefill(driver.step()) == whole_blocks
    assert stream.state is RequestState.RUNNING


def test_two_requests_that_need_60_percent_of_the_pool_each_both_end() -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=128)
    old = driver.submit("o" * 54, max_tokens=100)
    young = driver.submit("y" * 54, max_tokens=100)
    driver.finish(old, young)
    assert driver.preempted == [young]
    assert len(generated(old)) == len(generated(young)) == 100
    apart = Driver(n_slots=2, n_ctx=256, n_ubatch=128)
    assert generated(young) == generated(apart.run("y" * 54, max_tokens=100))


@pytest.mark.slow
def test_the_oldest_is_never_preempted() -> None:
    n_preempted: Counter[int] = Counter()
    for seed in range(100 if LONG else 5):
        chance = random.Random(seed)
        driver = Driver(n_slots=4, n_ctx=160, n_ubatch=32)
        requests: list[Request] = []
        while len(requests) < 12 or any(request.state is not RequestState.DONE for request in requests):
            if len(requests) < 12 and chance.random() < 0.2:
                prompt = chance.choice("abcd") * chance.randint(1, 20)
                client = chance.choice(["", "another"])
                requests.append(driver.submit(prompt, max_tokens=chance.randint(80, 130), client=client))
            running = driver.scheduler.running
            plan = driver.step()
            n_preempted[seed] += len(plan.preempted)
            assert not running or running[0] not in plan.preempted
            assert driver.cache.cells.used <= 160
            assert len(driver.plans) < 3000
    assert sum(n_preempted.values()) > 10


@pytest.mark.parametrize(
    ("other", "slot", "n_copied"), [("b" * 20, 0, 0), ("h" * 4, 1, 6), ("h" * 8, 1, 2), ("", 1, 10)]
)
def test_a_request_takes_the_partition_that_loses_nothing_then_the_one_with_the_longest_match(
    other: str, slot: int, n_copied: int
) -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=64, unified=False)
    if other:
        driver.run(other, id_slot=1)
    driver.run("h" * 10 + "a" * 40, id_slot=0)  # the most recently used one
    request = driver.submit("h" * 10 + "c" * 10)
    plan = driver.step()
    assert request.slot == slot
    assert trims(plan) == ({0: 10} if slot == 0 else {})
    assert sum(each.end - each.start for each in plan.operations if isinstance(each, Copy)) == n_copied
    assert plan.work[0].run.start == 10


@pytest.mark.parametrize(("n_tail", "slot"), [(4, 0), (60, 1)])
def test_a_short_tail_of_a_partition_is_dropped_where_that_takes_less_time_than_a_copy(
    n_tail: int, slot: int
) -> None:
    costs = {"prefill_us": 100.0, "save_us": 4.0, "load_us": 4.0}
    driver = Driver(n_slots=2, n_ctx=512, n_ubatch=64, unified=False, ram_bytes=10**6, **costs)
    driver.finish(driver.submit("h" * 100 + "a" * n_tail, id_slot=0))
    request = driver.submit("h" * 100 + "c" * 10)
    plan = driver.step()
    assert request.slot == slot
    assert plan.work[0].run.start == 100
    assert not any(isinstance(each, Save) for each in plan.operations)


def test_a_new_request_takes_a_partition_beside_those_that_run() -> None:
    driver = Driver(n_slots=6, n_ctx=6 * 64, n_ubatch=64, unified=False)
    running = [driver.submit(letter * 8, max_tokens=20, id_slot=slot) for letter, slot in (("a", 2), ("b", 4))]
    driver.step()
    between, beside, first = (driver.submit(letter * 8, max_tokens=20) for letter in "cde")
    driver.finish(*running, between, beside, first)
    assert (between.slot, beside.slot, first.slot) == (3, 1, 0)


def test_queue_time_ends_with_the_first_admission() -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=128)
    old = driver.submit("o" * 54, max_tokens=100)
    young = driver.submit("y" * 54, max_tokens=100)
    driver.backend.now += 3.0
    driver.finish(old, young)
    assert driver.preempted == [young]
    progress = young.progress(driver.backend.now)
    assert progress.queue_ms == old.progress(driver.backend.now).queue_ms == 3000
    # Both prompts went into one step; the time of the first token counts from there.
    assert progress.prompt_ms == pytest.approx(108 * PROMPT_TOKEN_SECONDS * 1e3)


def test_waiting_for_a_slot_counts_as_queue_time() -> None:
    driver = Driver(n_slots=1, n_ctx=128, n_ubatch=64)
    first = driver.submit("a" * 27, max_tokens=11)
    second = driver.submit("b" * 27)
    driver.finish(first, second)
    waited = 27 * PROMPT_TOKEN_SECONDS + 10 * DECODE_SECONDS
    assert second.progress(driver.backend.now).queue_ms == pytest.approx(waited * 1e3)


def test_prompt_tokens_computed_again_after_a_preemption_are_counted() -> None:
    driver = Driver(n_slots=2, n_ctx=256, n_ubatch=128)
    old = driver.submit("o" * 20, max_tokens=220)
    young = driver.submit("y" * 100, max_tokens=80)
    driver.finish(old, young)
    assert young in driver.preempted
    runs = [work.run for plan in driver.plans for work in plan.work if work.request is young]
    computed = sum(max(0, min(run.start + len(run.tokens), 100) - run.start) for run in runs)
    assert young.n_prompt_computed == computed > 100
    assert young.progress(driver.backend.now).n_cached == 0
    assert old.n_prompt_computed == 20


@pytest.mark.parametrize("status", [Status.FATAL, Status.ABORTED])
@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_a_request_for_no_tokens_ends_after_a_failed_step_that_computed_it(
    status: Status, others: int, first: bool
) -> None:
    driver = Driver(n_slots=3, n_ctx=128, n_ubatch=64)
    beside = [driver.submit(letter * 5, max_tokens=3) for letter in "ab"[:others] if not first]
    warming = driver.submit("w" * 10, max_tokens=0)
    beside += [driver.submit(letter * 5, max_tokens=3) for letter in "ab"[:others] if first]
    driver.backend.failures.append((status, others + 1))
    driver.finish(warming, *beside, steps=50)
    if others:
        assert [len(generated(request)) for request in beside] == [3] * others
    assert driver.run("next one", max_tokens=2).n_generated == 2


@pytest.mark.parametrize(("can_trim", "n_lost"), [(True, 0), (False, 2)])
def test_a_failed_step_costs_others_their_state_where_it_cannot_be_trimmed(*, can_trim: bool, n_lost: int) -> None:
    driver = Driver(n_slots=3, n_ctx=128, n_ubatch=64, can_trim=can_trim)
    requests = [driver.submit(letter * 5, max_tokens=4) for letter in "abc"]
    driver.step()
    driver.backend.failures += [(Status.FATAL, 0), (Status.FATAL, 0)]
    assert len(driver.step().work) == 3
    [alone] = driver.step().work
    others = [request for request in requests if request is not alone.request]
    assert [driver.cache.length(request.slot) for request in others].count(0) == n_lost
    driver.finish(*requests)
    assert [len(generated(request)) for request in others] == [4, 4]


@pytest.mark.parametrize("unified", [True, False])
def test_a_prompt_of_one_token_runs_again_after_a_failed_step_that_computed_it(unified: bool) -> None:
    driver = Driver(n_slots=2, n_ctx=128, n_ubatch=64, unified=unified)
    # In a partitioned pool, a longer prompt would have a step of its own.
    requests = [driver.submit("a", max_tokens=3), driver.submit("bc" if unified else "b", max_tokens=3)]
    driver.backend.failures.append((Status.ABORTED, 2))
    driver.finish(*requests)
    assert [len(generated(request)) for request in requests] == [3, 3]


def test_choices_that_have_their_first_token_do_not_keep_an_older_request_waiting_for_ever() -> None:
    driver = Driver(n_slots=1, n_reserved=4, n_ctx=512, n_ubatch=128)
    driver.run("h" * 50)
    blocking = driver.submit("x" * 5, max_tokens=3)
    driver.step()
    older = driver.submit("n" * 60)
    choices = [driver.submit("h" * 50 + "!", max_tokens=3, group="g") for _ in range(MAX_OVERTAKEN + 20)]
    driver.finish(blocking, older, *choices)
    assert driver.admitted.index(older) - driver.admitted.index(choices[0]) == MAX_OVERTAKEN


@pytest.mark.parametrize("why", ["a busy slot", "a leader"])
def test_many_requests_that_cannot_run_yet_do_not_hide_one_that_can(why: str) -> None:
    driver = Driver(n_slots=4, n_reserved=4, n_ctx=1024, n_ubatch=16)
    head = "h" * 300
    running = driver.submit(head + "r", max_tokens=60, id_slot=0)
    driver.step()
    if why == "a leader":
        waiting = [driver.submit(head + chr(97 + i % 26)) for i in range(70)]
    else:
        waiting = [driver.submit(f"{i:04}", id_slot=0) for i in range(70)]
    able = driver.submit("able")
    driver.step()
    assert able.state is not RequestState.QUEUED
    assert all(each.state is RequestState.QUEUED for each in waiting)
    assert running.state is RequestState.RUNNING


@pytest.mark.slow
def test_cancelled_requests_do_not_change_the_expected_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_NEWEST_WEIGHT", 0.5)
    driver = Driver(n_slots=2, n_ctx=512, n_ubatch=64)
    for _ in range(6):
        driver.run("x", max_tokens=200)
    for _ in range(40):
        driver.scheduler.end(driver.submit("y"), driver.backend.now, cancelled=True)
    first, second = (driver.submit(letter * 70, max_tokens=-1) for letter in "ab")
    driver.step()
    assert driver.admitted[-1] is first
    driver.finish(first, second)
    assert driver.preempted == []
