"""Models with a partial state against the oracle of `test_cache_machine.py`: every token is that of a cold run.

Of such a model only that is cached from which a sequence can be continued: the machine works out these *restore
points* by itself, from the checkpoints and the live sequences that `Recorder` knows of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from llamaslot.base.backend import Backend, Status
from llamaslot.base.kv_ops import Copy, Free, Load, Restore, Save, Take
from llamaslot.base.model import SegmentSize, StateKind
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.tiers import pacing
from llamaslot.scheduler.admission import MAX_OVERTAKEN
from llamaslot.scheduler.step import StepPlan, StepResult
from tests.cache_settings import checkpoint_settings
from tests.conftest import LONG
from tests.kvcache.test_cache_machine import (
    COUNTS,
    LETTERS,
    MIN_SHARED,
    Asked,
    FakeMachine,
    Shape,
    TinyFake,
    common,
)

KINDS = StateKind.WINDOW, StateKind.RECURRENT, StateKind.HYBRID, StateKind.HYBRID_WINDOW
PREFILL_US = 4e4
"""Microseconds to compute a token; loading one takes half of that, or nothing."""

OFTEN = (
    *("tokens", "ended", "cancelled", "broke", "extra steps", "saves", "loads", "reused tokens"),
    *("takes", "restores", "forks", "evicted checkpoints", "failed takes", "failed restores"),
    *("waited for a leader", "resumed", "kept duplicates", "continued a sequence"),
    "started from a checkpoint",
)
"""Events that must come up in any run, for else a check is vacuous."""
SELDOM = (
    *("written", "read", "lost windows", "loaded up to a checkpoint", "fall backs"),
    *("dropped: everything", "dropped: namespace", "slots saved", "slots restored"),
)
"""Events that must come up in a long run."""


@dataclass(frozen=True)
class States:
    """Prefixes from which sequences can be continued, before a plan or after it."""

    held: list[list[int]]
    """The prefixes of each sequence."""
    live: list[bool]
    checkpoints: frozenset[int]
    """The prefixes after which there is a checkpoint."""
    in_ram: frozenset[int]
    """Prefixes whose last token can be loaded."""


class CheckpointMachine(FakeMachine):
    """Any kind of partial state, with any budget of checkpoints."""

    layouts = ("shared",)
    kinds_of_state: ClassVar[tuple[StateKind, ...]] = KINDS

    @initialize(
        kind=st.integers(0, len(KINDS) - 1),
        has_control=st.booleans(),
        budget=st.sampled_from([0, 2, 5, 5, 1000, 1000]),
        max_on_path=st.integers(2, 8),
        step_tokens=st.integers(6, 20),
        min_gap=st.integers(2, 4),
        take_ms=st.sampled_from([0, 0, 60, 200]),
        n_restored=st.sampled_from([0, 0, 3]),
        fields=st.fixed_dictionaries(
            {
                "layout": st.just(0),
                "n_slots": st.integers(1, 3),
                "n_spare": st.sampled_from([0, 0, 0, 1, 2]),
                "share": st.floats(0, 1),
                "batch": st.floats(0, 1),
                "idle_cells": st.sampled_from([None, None, None, 0, 16]),
                "offload_after": st.sampled_from([None, None, 1, 12, 40]),
                "ram": st.sampled_from([0, 0, 0.4, 1, 10, 10]),
                "disk": st.sampled_from([0, 0, 1, 10]),
                "load_us": st.sampled_from([0, 0, PREFILL_US / 2]),
                "eos_every": st.sampled_from([6, 12, 10**9]),
                "n_expected": st.sampled_from([1, 1, 2, 64]),
                "query_block": st.sampled_from([None, None, 4, 12]),
            }
        ),
    )
    def start(
        self,
        *,
        kind: int,
        has_control: bool,
        budget: int,
        max_on_path: int,
        step_tokens: int,
        min_gap: int,
        take_ms: float,
        n_restored: int,
        fields: dict[str, Any],
    ) -> None:
        self.kind = self.kinds_of_state[kind % len(self.kinds_of_state)]
        self.control = LETTERS[1:] if has_control else ()
        self.budget = budget
        self.chosen: dict[str, Any] = {
            "on_path": max_on_path,
            "step": step_tokens * self.stretch,
            "min_gap": min_gap * self.stretch,
            "min_end_gap": min_gap * self.stretch,
            "take_ms": take_ms,
            "restore_ms": n_restored * PREFILL_US / 1e3,
        }
        self.lacking: Counter[str] = Counter()
        """Plans for which there still is no memory, by what it is needed for."""
        self.starts_by: dict[Asked, int] = {}
        """Position at which an admitted request begins to compute at the latest."""
        self.preempted: set[Asked] = set()
        self.held_up: set[Asked] = set()
        """Streams that the last step left out."""
        super().start(**fields)
        self.patches.append(mock.patch.object(pacing, "RETRY_DELAY_S", 0.02))
        self.patches[-1].start()

    def new_backend(self, shape: Shape) -> Backend:
        self.cold = TinyFake(n_slots=1, n_ctx=128, n_ubatch=128, eos_every=shape.eos_every, kind=self.kind)
        return TinyFake(
            n_slots=shape.n_slots,
            n_seqs=shape.n_slots + 1 + shape.n_spare,
            n_ctx=shape.n_ctx,
            n_ubatch=shape.n_ubatch,
            eos_every=shape.eos_every,
            segment_size=SegmentSize(20, 10),
            kind=self.kind,
            n_rollback=6 * (self.kind is StateKind.HYBRID),
        )

    def cache_settings(self, **fields: Any) -> CacheSettings:
        info = self.backend.info
        size = info.checkpoint_size
        assert size is not None
        return super().cache_settings(
            **fields,
            prefill_us=PREFILL_US,
            checkpoints=checkpoint_settings(
                kind=self.kind,
                n_swa=info.state.n_swa,
                size=size,
                ram_bytes=self.budget * size.of(info.state.n_swa),
                **self.chosen,
            ),
        )

    # --- events ---

    @rule(what=st.sampled_from(["take", "restore", "restore", "window", "window"]), n=st.integers(1, 2))
    def lack_memory(self, what: str, n: int) -> None:
        """The next plans can take or restore no checkpoint, or not remove the window of some sequences."""
        self.lacking[what] = n

    def refused(self, plan: StepPlan) -> set[int]:
        takes = {each.checkpoint for each in plan.operations if isinstance(each, Take)}
        return super().refused(plan) | (takes if self.lacking["take"] else set())

    def carry_out(self, plan: StepPlan) -> None:
        operations = plan.operations
        restores = {each.checkpoint for each in operations if isinstance(each, Restore)}
        self.backend.unloadable = restores if self.lacking["restore"] else set()
        has_window = self.kind in (StateKind.WINDOW, StateKind.HYBRID_WINDOW)
        seqs = {each.dst for each in operations if isinstance(each, Copy | Load)}
        self.backend.unstripped = seqs if self.lacking["window"] and has_window else set()
        self.count_operations(plan)
        super().carry_out(plan)
        takes = any(isinstance(each, Take) for each in operations)
        self.lacking -= Counter({"take": takes, "restore": bool(restores), "window": bool(seqs)})
        COUNTS["failed restores"] += bool(self.backend.unloadable)
        COUNTS["lost windows"] += bool(self.incomplete & self.backend.unstripped)

    def count_operations(self, plan: StepPlan) -> None:
        restored = {each.dst for each in plan.operations if isinstance(each, Restore)}
        for each in plan.operations:
            COUNTS["takes"] += isinstance(each, Take)
            COUNTS["restores"] += isinstance(each, Restore)
            COUNTS["failed takes"] += isinstance(each, Take) and each.checkpoint in self.refused(plan)
            forks = isinstance(each, Copy) and each.dst not in restored and each.dst < self.shape.n_slots
            COUNTS["forks"] += forks and self.cache._sequences.states.is_live(each.dst)  # type: ignore[union-attr]
            COUNTS["saves"] += isinstance(each, Save)
            COUNTS["loads"] += isinstance(each, Load)
            COUNTS["freed checkpoints"] += isinstance(each, Free) and each.segment in self.backend.checkpoints

    def finish(self) -> None:
        self.lacking.clear()
        super().finish()
        COUNTS["evicted checkpoints"] += self.cache.checkpoints.stats.evicted

    # --- a plan ---

    def plan(self) -> StepPlan:
        if self.living:
            self.load_model()
        before = self.states_now()
        running = {asked: len(self.backend.held[asked.slot]) for asked in self.running}
        was_recovering, self.is_recovering = self.is_recovering, False
        suspected = [a for a in self.running if a.request.is_suspect]
        plan = self.scheduler.plan(self.now)
        suspected = self.without_way_made(suspected, plan)
        COUNTS["plans"] += 1
        admitted = self.record_slots(plan)
        self.carry_out(plan)
        plan = replace(plan.without(self.incomplete), n_extra_steps=0 if self.incomplete else plan.n_extra_steps)
        after = self.states_now()
        is_disturbed = was_recovering or bool(self.incomplete or plan.preempted)
        for asked in admitted:
            asked.n_start = self.n_cached_in(asked, before)
            asked.expected_prefixes = [*self.prefixes(asked)]
            COUNTS["resumed"] += asked in self.preempted
        if not self.cache._sequences.operations and (not plan.work or self.was_pending):
            self.check_agreement()
        self.check_running_states(before, running, plan)
        self.check_admitted(before, after, admitted, is_disturbed=is_disturbed)
        self.check_preempted(plan, admitted)
        self.preempted |= {asked for asked in self.asked if asked.request in plan.preempted}
        for asked in plan.preempted:
            self.starts_by.pop(self.find(asked), None)
        if not suspected and not is_disturbed and not admitted and self.can_take:
            self.check_waiting_for_states(after, running, plan)
        self.check_granted(plan, suspected)
        self.shaken = set(self.incomplete)
        self.is_recovering = bool(self.incomplete)
        if self.incomplete:
            self.starts_by.clear()
        return replace(plan, operations=[], jobs=[])

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        n_fall_backs, was_shaken = self.n_restores_pending(), self.shaken
        super().commit(plan, result)
        self.shaken |= was_shaken
        if result.decoded.status is not Status.OK:
            self.starts_by.clear()
            COUNTS["fall backs"] += self.n_restores_pending() - n_fall_backs
            if result.decoded.status in (Status.ABORTED, Status.FATAL):
                self.shaken |= {asked.slot for asked in self.running}

    @property
    def can_take(self) -> bool:
        """True unless the host had no memory for a checkpoint just now."""
        return self.now >= max(self.tiers._saves_again_at, self.tiers._loads_again_at)

    def n_restores_pending(self) -> int:
        return sum(isinstance(each, Restore) for each in self.cache._sequences.operations)

    def states_now(self) -> States:
        backend = self.backend
        # Those of slot snapshots have numbers below 0, and belong to no tier.
        in_ram = {prefix for n, segment in backend.segments.items() if n >= 0 for prefix in segment.prefixes}
        return States(
            [list(held.prefixes) for held in backend.held],
            [backend.is_live(seq) for seq in range(backend.n_seqs)],
            frozenset(prefixes[-1] for n, (_, prefixes) in backend.checkpoints.items() if n >= 0),
            frozenset(in_ram),
        )

    # --- what is cached ---

    def n_cached_in(self, asked: Asked, states: States) -> int:
        """Tokens of a request whose KV is somewhere, with a state or without one."""
        return self.n_covered(self.prefixes(asked)[:-1], states)

    def n_covered(self, prefixes: Sequence[int], states: States) -> int:
        n = max(common([*prefixes], held) for held in states.held)
        return next((i for i in range(n, len(prefixes)) if prefixes[i] not in states.in_ram), len(prefixes))

    def restore_points(self, asked: Asked, states: States) -> list[tuple[int, bool]]:
        """Positions from which a request can be continued, the deepest first, and if there is a checkpoint."""
        prefixes = self.prefixes(asked)[:-1]
        busy = {other.slot for other in self.running if other is not asked}
        ends = {
            held[-1]
            for seq, (held, is_live) in enumerate(zip(states.held, states.live, strict=True))
            if held and is_live and (self.gives_state(len(held)) or seq in {*range(self.shape.n_slots)} - busy)
        }
        points = []
        for n in range(self.n_covered(prefixes, states), 0, -1):
            has_checkpoint = prefixes[n - 1] in states.checkpoints and n >= self.cache.settings.min_restored
            if has_checkpoint or prefixes[n - 1] in ends:
                points.append((n, has_checkpoint))
        return points

    def gives_state(self, n: int) -> bool:
        """True if a copy of a live sequence of `n` tokens can be continued."""
        chosen = self.cache.settings.checkpoints
        return self.kind in (StateKind.RECURRENT, StateKind.HYBRID) or chosen.size.of(n) <= chosen.limits.ram_bytes

    def pays(self, n_loaded: int) -> bool:
        """True if so many tokens are surely worth loading: the first and the last segment are loaded whole, too."""
        n_most = n_loaded + 2 * self.largest
        return n_loaded >= MIN_SHARED * 4 and n_loaded > self.cache.settings.load_cost * n_most

    def n_resident(self, asked: Asked, states: States) -> int:
        return max(common(self.prefixes(asked)[:-1], held) for held in states.held)

    # --- invariants ---

    def check_agreement(self) -> None:
        super().check_agreement()
        states, backend = self.cache._sequences.states, self.backend
        for seq in self.cache._sequences.all:
            assert states.is_live(seq) == backend.is_live(seq), f"sequence {seq} is live in one account only"
        in_ram = {each.number: each for each in self.tiers.checkpoints if each.state.is_loadable}
        assert backend.checkpoints.keys() == backend.taken.keys()
        # Those of slot snapshots have numbers below 0, and belong to no tier.
        taken = {number: end for number, end in backend.taken.items() if number >= 0}
        # What went with a segment that could not be saved is freed by the next plan.
        assert in_ram.keys() == taken.keys() - {*self.tiers._freed}
        for number, each in in_ram.items():
            assert self.own_prefixes(each.node)[-1:] == backend.checkpoints[number][1][-1:], "on another path"
            assert each.end == backend.taken[number]
        chosen = self.cache.checkpoints.settings
        assert sum(map(chosen.size.of, taken.values())) <= chosen.limits.ram_bytes
        wanted = {asked.namespace for asked in self.living}
        for namespace, _ in backend.checkpoints.values():
            assert not namespace.startswith("private") or namespace in wanted, "a private checkpoint is left"

    def check_cells(self) -> None:
        """Every cell is counted once."""
        duplicates = self.cache._sequences.duplicates
        assert self.cache.cells.used == len(self.backend.cells)
        COUNTS["kept duplicates"] += duplicates.n_cells > 0

    def check_running_states(self, before: States, running: dict[Asked, int], plan: StepPlan) -> None:
        """Nothing was taken from live running sequences, and what a step needs is free."""
        held = self.backend.held
        for asked in running:
            if asked.slot >= 0 and asked.slot not in self.shaken | self.incomplete and before.live[asked.slot]:
                prefixes = before.held[asked.slot]
                assert held[asked.slot].prefixes[: len(prefixes)] == prefixes, "taken from a running request"
        budget = self.shape.idle_cells
        assert budget is None or self.incomplete or len(self.idle) <= budget, "more idle cells than allowed"
        n_granted = sum(len(work.run.tokens) for work in plan.work)
        assert len(self.backend.cells) + n_granted <= self.backend.info.n_ctx

    def check_admitted(self, before: States, after: States, admitted: list[Asked], *, is_disturbed: bool) -> None:
        """A request starts from the deepest restore point that there was when it was admitted."""
        for asked in admitted:
            request = asked.request
            prefixes = self.backend.held[asked.slot].prefixes
            assert prefixes == self.prefixes(asked)[: len(prefixes)], "not its own prefix"
            COUNTS["reused tokens"] += request.n_cached_at_admission
            COUNTS["waited for a leader"] += request.n_waited_for > 0
            if is_disturbed or self.is_squeezed or self.was_short or self.lacking or not self.can_take:
                continue
            then, now = self.restore_points(asked, before), self.restore_points(asked, after)
            # Others that were admitted in the same plan may have taken its place.
            is_first = self.scheduler.admitted[0] is request
            points = then if is_first else [each for each in then if each in now]
            n_resident = min(self.n_resident(asked, before), self.n_resident(asked, after))
            if not is_first or self.shape.disk:
                points = [each for each in points if each[0] <= n_resident]
            pays = [each for each in points if each[0] <= n_resident or self.pays(each[0] - n_resident)]
            best = max((n for n, _ in pays), default=0)
            assert request.n_cached_at_admission >= best, "a restore point was not found"
            COUNTS["continued a sequence"] += 0 < best == len(prefixes)
            sure = max((n for n, has_checkpoint in points if has_checkpoint and n <= n_resident), default=0)
            self.starts_by[asked] = sure
            COUNTS["started from a checkpoint"] += bool(sure)
            COUNTS["loaded up to a checkpoint"] += request.n_cached_at_admission > n_resident

    def check_waiting_for_states(self, after: States, running: dict[Asked, int], plan: StepPlan) -> None:
        """A request that waits has a reason to."""
        waiting = [asked for asked in self.living if asked.slot < 0 and not asked.params.is_background]
        free = [slot.id for slot in self.scheduler.slots if slot.request is None]
        first = [a for a in waiting if a.has_started or a.request.n_overtaken >= MAX_OVERTAKEN]
        is_loading = any(isinstance(each, Load) for each in plan.operations)
        for asked in waiting:
            n_cached = max((n for n, _ in self.restore_points(asked, after)), default=0)
            may_run = any(asked.params.id_slot in (-1, slot) for slot in free)
            may_wait = is_loading or self.waits_for_state(asked, n_cached, running)
            if may_run and not may_wait and not set(first) - {asked}:
                n_copies = self.n_resident(asked, after) * (self.cache._sequences.duplicates.n_cells > 0)
                assert not self.fits_surely(asked, running, n_copies), "held back without a reason"
        assert self.running or not waiting or plan.preempted, "no request runs"

    def waits_for_state(self, asked: Asked, n_cached: int, running: dict[Asked, int]) -> bool:
        """True if a running request computes a prefix of it, and has not passed its end."""
        wanted = self.prefixes(asked)[:-1]
        for leader in self.running:
            if leader.namespace != asked.namespace:
                continue
            if asked.params.group and leader.params.group == asked.params.group and not leader.generated:
                return True
            n = common(wanted, leader.expected_prefixes)
            if n > n_cached and running.get(leader, 0) <= n:
                return True
        return False

    def fits_surely(self, asked: Asked, running: dict[Asked, int], n_copies: int) -> bool:
        """True if there is room for it and the running ones, whatever they generate, and if nothing is shared.

        Of the cells that may be evicted it may be given so many.
        """
        if not self.running:
            return True
        n_held = {each: min(running.get(each, 0), len(self.backend.held[each.slot])) for each in self.running}
        needed = sum(len(each.tokens) - n_held[each] + self.most(each) for each in self.running)
        pinned = len(set().union(*(self.backend.held[each.slot].cells for each in self.running)))
        return pinned + needed + len(asked.tokens) + self.most(asked) + n_copies <= self.backend.info.n_ctx

    def check_granted(self, plan: StepPlan, suspected: list[Asked]) -> None:
        """Suspects run alone; else every stream goes on, and each request begins where it was to at the latest."""
        workers = [self.find(work.request) for work in plan.work]
        if suspected:
            assert len(workers) <= 1
            assert set(workers) <= set(suspected)
        elif not self.chosen["take_ms"]:
            streams = {a for a in self.running if len(a.tokens) - len(self.backend.held[a.slot]) == 1}
            may_rest = self.incomplete | {a.slot for a in streams if self.cache.lacks_state(a.slot)}
            held_up = {a for a in streams - {*workers} if a.slot not in may_rest}
            # Where a prompt and streams may not share a step, they take turns.
            assert not (held_up if self.kind.allows_mixed_lengths else held_up & self.held_up), (
                "a stream was held up"
            )
            self.held_up = held_up
        assert sum(len(work.run.tokens) for work in plan.work) <= self.backend.info.n_ubatch
        is_reading = any(asked.slot >= 0 for asked in self.living) and self.disk.reads
        is_done = plan.work or plan.preempted or plan.operations or is_reading or not self.living
        assert is_done, "nothing is done"
        workers_and_waiting = {a for a in self.running if not self.cache.lacks_state(a.slot)}
        if workers_and_waiting - {*workers} and not suspected:
            assert not plan.n_extra_steps, "a request that may be computed waits for extra steps"
        for work in plan.work:
            starts_by = self.starts_by.pop(self.find(work.request), 0)
            assert work.run.start >= starts_by, "computes what could have been restored"


def test_the_cache_of_models_with_a_partial_state() -> None:
    before = COUNTS.copy()
    chosen = settings(max_examples=2000 if LONG else 60, stateful_step_count=80, deadline=None)
    run_state_machine_as_test(CheckpointMachine, settings=chosen)
    counts = COUNTS - before
    missing = [event for event in (*OFTEN, *(SELDOM if LONG else ())) if not counts[event]]
    assert not missing, "no example came to these"


class Conversations(CheckpointMachine):
    """Requests one after the other, in slots with nothing but what a test gives them."""

    def __init__(
        self, kind: StateKind, *, n_slots: int = 1, n_spare: int = 0, ram: float = 10, take_ms: float = 0
    ) -> None:
        super().__init__()
        fields = {
            **{"layout": 0, "n_slots": n_slots, "n_spare": n_spare, "share": 1.0, "batch": 0.4, "idle_cells": None},
            **{"offload_after": None, "ram": ram, "disk": 0, "load_us": 0, "eos_every": 10**9, "n_expected": 1},
            **{"query_block": None},
        }
        self.start(
            kind=KINDS.index(kind), has_control=False, budget=1000, max_on_path=8, step_tokens=20, min_gap=2,
            take_ms=take_ms, n_restored=0, fields=fields,
        )  # fmt: skip

    def say(self, prompt: list[int], max_tokens: int = 6) -> Asked:
        """Run a request until it has ended."""
        self.new_request(prompt, max_tokens=max_tokens)
        asked = self.asked[-1]
        while not asked.has_ended:
            self.step(1, 0, is_late=False, n_jobs=0)
        return asked


def letters(n: int, seed: int) -> list[int]:
    return [LETTERS[(seed * 7919 + i * i * (seed + 3)) % 5 % 2] for i in range(n)]


Create: TypeAlias = Callable[..., Conversations]


@pytest.fixture
def conversations() -> Iterator[Create]:
    """Create conversations, which end all requests after the test."""
    with ExitStack() as stack:

        def started(*args: Any, **fields: Any) -> Conversations:
            machine = Conversations(*args, **fields)
            stack.callback(machine.teardown)
            return machine

        yield started


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_slots", [1, 2])
def test_a_conversation_goes_on_after_others_took_its_slot(
    conversations: Create, kind: StateKind, n_slots: int
) -> None:
    machine = conversations(kind, n_slots=n_slots)
    first = machine.say([LETTERS[0], *letters(20, 1)])
    for i in range(n_slots):
        machine.say([LETTERS[1], LETTERS[i], *letters(20, 2)])
    again = machine.say(first.tokens + letters(5, 3))
    assert again.request.n_cached == len(first.tokens) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_in_its_slot_without_a_checkpoint(conversations: Create, kind: StateKind) -> None:
    machine = conversations(kind, ram=0)
    first = machine.say(letters(20, 1))
    n_restored = machine.cache.checkpoints.stats.restored
    again = machine.say(first.tokens + letters(5, 3))
    assert again.request.n_cached == len(first.tokens) - 1
    assert machine.cache.checkpoints.stats.restored == n_restored


def test_a_suspect_does_not_wait_for_another_request_s_checkpoint(
    conversations: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fits into a gap, and the host has no memory for any: the stream before the suspect stays at its stop."""
    machine = conversations(StateKind.RECURRENT, n_slots=2, take_ms=60)
    assert machine.cache.settings.max_takes_in_gap == 1
    for seed in (1, 2):
        machine.new_request(letters(12, seed), max_tokens=8)
    while len(machine.running) < 2 or not machine.cache.has_decodes:
        machine.step(1, 0, is_late=False, n_jobs=0)
    monkeypatch.setattr(machine.scheduler._taker, "_is_due", lambda request, queue: True)
    monkeypatch.setattr(machine.cache.checkpoints, "take", lambda slot: None)
    machine.running[1].request.is_suspect = True
    machine.step(1, 0, is_late=False, n_jobs=0)
    assert not any(asked.request.is_suspect for asked in machine.running)


@pytest.mark.parametrize("kind", KINDS)
def test_the_third_prompt_with_a_prefix_starts_at_the_fork(conversations: Create, kind: StateKind) -> None:
    """The first has no reason to stop there, the second finds its KV without a state, and takes a checkpoint."""
    machine = conversations(kind)
    shared = letters(14, 1)
    prompts = [[*shared, *(LETTERS[i >> bit & 1] for bit in (0, 1)), *letters(9, 4 + i)] for i in range(4)]
    starts = [machine.say(prompt).request.n_cached for prompt in prompts]
    assert starts[0] == starts[1] == 0
    assert starts[2] >= len(shared)
    assert starts[3] >= len(shared)
