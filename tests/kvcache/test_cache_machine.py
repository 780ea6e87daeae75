"""Scheduler and cache against an oracle: whatever is asked for or fails, nothing is lost, mixed up or held back.

A state machine drives the scheduler on a backend, plan by plan, and trusts neither: `Recorder` has what was really
done to each sequence, and the invariants are worked out from that and from the requests. `Asked` is the machine's
own account of a request. Tokens are two letters, so that prefixes are shared, branch and meet again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from unittest import mock

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llamaslot.base.backend import Backend, Run, Status
from llamaslot.base.commands import ContextShift, GenerateParams, LocalTier
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.kv_ops import Copy, Kv, Load, Remove, Save, Shift
from llamaslot.base.model import ModelInfo, SegmentSize, StepCost
from llamaslot.base.namespaces import PUBLIC_SALT, key_salt, key_secret
from llamaslot.base.tokens import TokenizedPrompt, packed, unpacked
from llamaslot.kvcache import ghost_list
from llamaslot.kvcache.cache import KVCache
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.disk_io import (
    Corrupt,
    Job,
    Read,
    ReadDone,
    ReadFailed,
    ReadStarted,
    Write,
    Written,
)
from llamaslot.kvcache.match import Acquired, Match
from llamaslot.kvcache.nodes import Node, SegmentState
from llamaslot.kvcache.pins import MAX_PINS
from llamaslot.kvcache.slot_snapshots import SlotSnapshot, SnapshotPart, UnsavableSlotError
from llamaslot.kvcache.tiers import pacing
from llamaslot.kvcache.tiers.budget import CALM_S, MemoryReading
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from llamaslot.scheduler import admission, chunk_sizer, padding
from llamaslot.scheduler.admission import MAX_OVERTAKEN
from llamaslot.scheduler.request import Request, RequestState
from llamaslot.scheduler.scheduler import DecodeFailed, Sampled, Scheduler
from llamaslot.scheduler.step import StepPlan, StepResult, apply, next_decode_step
from tests.cache_settings import cache_settings
from tests.conftest import LONG
from tests.fake_backend import EOS, FakeBackend, FakeSampler
from tests.fake_disk import FakeDisk
from tests.pool import tokens_of
from tests.recorder import Failure, Offloaded, Past, Recorder

LETTERS = 97, 98
MIN_SHARED = 4
NO_SHIFT = ContextShift()

ALWAYS_PADDED = StepCost(step_us=1.0, token_us=0.0, token_cell_us=0.0, block_us=0.0, block_cell_us=0.0)

COUNTS: Counter[str] = Counter()
"""Number of times that each event came up in the runs."""
OFTEN = (
    *("requests", "plans", "steps", "tokens", "ended", "cancelled", "broke", "reused tokens", "extra steps"),
    *("drafted", "rejected"),
    *("saves", "written", "losses", "looked for what is cached", "dropped: path", "RAM reduced"),
    *("ran in the background", "made way"),
)
"""Events that must come up in any run, for else a check is vacuous."""
SHARES = "lost of its share", "lost beyond its share"
"""Events that must come up in a long run with two API keys."""
SELDOM = (
    *("loads", "reads", "read", "not saved", "overtaken", "preempted", "restored", "RAM normal"),
    *("copied between partitions", "partitioned", "unified again", "unloaded", "loaded again"),
    *("losses for RAM", "losses for cells", "slots saved", "slots restored", "padded steps"),
    *("padded steps with extra ones", "looked for idle prefixes that slow prompts", "wrote everything at the end"),
    *("dropped: everything", "dropped: namespace", "padded in a partition", "rows between streams"),
    *("pinned", "not pinned"),
)
"""Events that must come up in a long run."""


@dataclass(frozen=True)
class Shape:
    """A context and how it is used.

    The layouts are a unified pool, a partitioned one, one that is both in turn, and models without reuse.
    """

    layout: str
    n_slots: int
    n_spare: int
    n_ctx: int
    n_ubatch: int
    idle_cells: int | None
    offload_after: int | None
    ram: float
    """The RAM tier, in pools; 0 for none."""
    disk: float
    """The disk tier, in pools; 0 for none."""
    eos_every: int

    @property
    def reuses(self) -> bool:
        return "whole" not in self.layout


@dataclass(eq=False)
class Asked:
    """A request and its history, by the machine's own account."""

    request: Request
    prompt: list[int]
    namespace: str
    generated: list[int] = field(default_factory=list)
    discarded: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of its tokens that were discarded, each in what was left then."""
    slot: int = -1
    """Where it runs; -1 while it does not."""
    n_start: int = 0
    """Tokens that were cached when it was admitted last."""
    expected_prefixes: list[int] = field(default_factory=list)
    """The prefixes of all its tokens then."""
    has_started: bool = False
    has_ended: bool = False
    n_computed: int = 0
    """Positions of the prompt sent to the backend."""
    prefixes: list[int] = field(default_factory=list)
    """The prefixes of its tokens so far, as far as they were asked for."""
    n_overtaken: int = 0
    has_waited: bool = False
    """True if it ever had a leader to wait for."""

    @property
    def tokens(self) -> list[int]:
        tokens = self.prompt + self.generated
        for start, end in self.discarded:
            del tokens[start:end]
        return tokens

    @property
    def params(self) -> GenerateParams:
        return self.request.params

    @property
    def is_private(self) -> bool:
        return self.namespace.startswith("private")


class TinyFake(FakeBackend):
    """A fake model that knows two letters."""

    def _draw(self, rows: Sequence[int], sampler: FakeSampler, index: int) -> int:
        token = super()._draw(rows, sampler, index)
        return token if token == EOS else LETTERS[token % 2]


def common(a: list[int], b: list[int]) -> int:
    """Number of prefixes that two paths have in common: where two of them are the same, so are all before."""
    n = min(len(a), len(b))
    return n if n and a[n - 1] == b[n - 1] else bisect_left(range(n), True, key=lambda i: a[i] != b[i])


class CacheMachine(RuleBasedStateMachine):
    """Subclasses choose the backend, and the token that a cold run would have given."""

    layouts: ClassVar[tuple[str, ...]] = (
        *("shared", "shared", "shared", "shared", "partitions", "partitions", "whole", "whole partitions"),
        *("changing", "changing"),
    )
    pools: ClassVar[tuple[int, int]] = (48, 96)
    ubatches: ClassVar[tuple[int, int]] = (4, 24)
    largest: ClassVar[int] = 8
    """Tokens of a segment."""
    stretch: ClassVar[int] = 1
    """Factor by which prompts are longer than the rules say."""
    salts: ClassVar[tuple[str, str]] = "a", "b"
    public: ClassVar[str | None] = None
    """The namespace that the other one finds too; by the machine's own account of it."""
    pools_per_key: ClassVar[float] = 0
    """Limit of an API key in RAM and on disk, in pools; 0 for none."""

    more_spare: ClassVar[int] = 0
    """Sequence ids in addition to those that the rules say."""
    control: ClassVar[tuple[int, ...]] = ()
    """Letters that count as control tokens."""

    asked: list[Asked]
    names: dict[str, str]
    """The machine's names of all namespaces, by the scheduler's."""
    just_shifted: AbstractSet[Asked] = frozenset()
    """Requests whose context the last plan has shifted."""

    def new_backend(self, shape: Shape) -> Backend:
        raise NotImplementedError

    def check_token(
        self, history: list[int], sampling: Sampling, n_drawn: int, token: int, past: Past = ()
    ) -> None:
        raise NotImplementedError

    def cold_tokens(self, history: list[int], sampling: Sampling, n: int, *, past: Past = ()) -> list[int]:
        """The greedy tokens that follow a history in a cold run with the same shifts, at most `n`."""
        raise NotImplementedError

    def slot_context(self) -> int:
        """Tokens that a slot may hold."""
        return self.backend.info.n_ctx_slot

    @initialize(
        layout=st.integers(0, 20),
        n_slots=st.integers(2, 3),
        n_spare=st.integers(0, 3),
        share=st.floats(0, 1),
        batch=st.floats(0, 1),
        idle_cells=st.sampled_from([None, None, 0, 16]),
        offload_after=st.sampled_from([None, None, 1, 12, 40]),
        ram=st.sampled_from([0, 0.2, 0.4, 1, 10, 10]),
        disk=st.sampled_from([0, 1, 10, 10]),
        load_us=st.sampled_from([0, 0, 2e4]),
        eos_every=st.sampled_from([6, 12, 10**9]),
        n_expected=st.sampled_from([1, 1, 2, 64]),
        query_block=st.sampled_from([None, 4, 12]),
    )
    def start(
        self,
        *,
        layout: int,
        n_slots: int,
        n_spare: int,
        share: float,
        batch: float,
        idle_cells: int | None,
        offload_after: int | None,
        ram: float,
        disk: float,
        load_us: float,
        eos_every: int,
        n_expected: int,
        query_block: int | None,
    ) -> None:
        # Small pools are outgrown only if requests are expected to be short.
        self.patches = [
            mock.patch.object(admission, "MIN_EXPECTED_TOKENS", n_expected),
            mock.patch.object(pacing, "PARTIAL_DELAY_S", 0.005),
            mock.patch.object(ghost_list, "BLOCK_TOKENS", 2 * MIN_SHARED),
            mock.patch.object(padding, "QUERY_BLOCK", (query_block or 64) * self.stretch),
            mock.patch.object(chunk_sizer, "QUERY_BLOCK", (query_block or 64) * self.stretch),
        ]
        for patch in self.patches:
            patch.start()
        low, high = self.pools
        name = self.layouts[layout % len(self.layouts)]
        assert name in CacheMachine.layouts, f"unknown layout {name}"
        n_ctx = int(low + share * (high - low)) // n_slots * n_slots
        n_ubatch = int(self.ubatches[0] + batch * (self.ubatches[1] - self.ubatches[0]))
        n_spare = n_spare + self.more_spare if name in ("shared", "changing") else 0
        ram = ram if "whole" not in name else 0
        ram = max(ram, 10) if name == "changing" else ram
        disk = disk if ram else 0
        shape = Shape(name, n_slots, n_spare, n_ctx, n_ubatch, idle_cells, offload_after, ram, disk, eos_every)
        self.shape = shape
        self.backend = Recorder(self.new_backend(shape), self.public)
        info = self.backend.info
        self.n_ctx_slot = self.slot_context()
        self.ram_bytes = self.size_of(int(ram * n_ctx))
        self.disk_bytes = self.size_of(int(disk * n_ctx))
        self.bytes_per_key = self.size_of(int(self.pools_per_key * n_ctx))
        self.disk = FakeDisk()
        self.snapshots: list[tuple[SlotSnapshot, list[Offloaded]]] = []
        """Saved slots, with what the recorder knows of their parts."""
        self.states: dict[int, Kv] = {}
        """The bytes of the files."""
        self.unreadable: set[int] = set()
        self.just_saved: set[int] = set()
        """Segments that the last plan saved."""
        self.queued_saves: dict[int, set[int]] = {}
        """By slot, those of them that were to be saved already when the slot was acquired."""
        self.is_short = self.was_short = False
        """True while there is no memory to save in, and true if there ever was none, or little."""
        self.memory_read_at = 0.0
        self.step_cost = ALWAYS_PADDED if query_block else None
        self.scheduler = Scheduler(
            self.model_info(),
            self.cache_settings(
                n_slots=info.n_slots,
                n_cells=info.n_ctx,
                n_seqs=self.backend.n_seqs,
                unified=info.unified,
                can_trim=info.can_trim,
                idle_cells=idle_cells,
                offload_after=offload_after,
                ram_bytes=self.ram_bytes,
                ram_is_fixed=False,
                disk_bytes=self.disk_bytes,
                ram_bytes_per_key=self.bytes_per_key,
                disk_bytes_per_key=self.bytes_per_key,
                segment_size=info.segment_size,
                segment_tokens=self.largest,
                load_us=load_us,
                part_cells=info.part_cells,
                foreign_us=1e5,
                min_shared=MIN_SHARED,
                gap_ms=100.0,
                write_interval_ms=0.0,
                idle_delay_ms=0.0,
            ),
            eog=self.backend.vocab.eog,
            control=self.control,
        )
        self.acquire_slot, self.cache.acquire = self.cache.acquire, self.acquire
        self.is_sound = True
        self.asked, self.names = [], {}
        self.now = 0.0
        self.incomplete: AbstractSet[int] = frozenset()
        """Sequences that do not hold what the last plan said, for want of memory."""
        self.shaken: set[int] = set()
        """Slots whose sequence the last step, which failed, may have left in any state."""
        self.was_pending = False
        """True if the last step left operations for the next plan."""
        self.compared: tuple[int, int, list[tuple[Asked, int]]] | None = None
        """State in which `check_agreement` last compared everything: calls, version of the tree, requests."""
        self.is_recovering = False
        """True if the last step failed, so that the next plan may evict what it likes."""

    def model_info(self) -> ModelInfo:
        """The model as the scheduler knows it."""
        return msgspec.structs.replace(self.backend.info, step_cost=self.step_cost, n_ctx_slot=self.n_ctx_slot)

    def cache_settings(self, **fields: Any) -> CacheSettings:
        """Settings of the cache, with those of `start`."""
        return cache_settings(**fields)

    def acquire(self, slots: Sequence[int], match: Match, **fields: bool) -> Acquired:
        """Acquire a slot for the cache's user, and record what is to be saved by then: the match has it."""
        queued = {each.segment for each in self.cache._sequences.operations if isinstance(each, Save)}
        acquired = self.acquire_slot(slots, match, **fields)
        self.queued_saves[acquired.slot] = queued
        return acquired

    # --- requests ---

    def new_request(
        self, prompt: list[int], *, salt: int = 0, cached: bool = True, max_tokens: int = 1, seed: int = 0,
        greedy: bool = True, group: str = "", pin: int = -1, endless: bool = False, is_background: bool = False,
        is_kept: bool | None = None, shift: ContextShift = NO_SHIFT,
    ) -> None:  # fmt: skip
        prompt = prompt[: self.n_ctx_slot - 1]
        name = f"r{len(self.asked)}"
        params = GenerateParams(
            name,
            sampling=Sampling(temperature=0.0 if greedy else 1.0, seed=seed, ignore_eos=endless),
            max_tokens=max_tokens,
            shift=shift,
            cache_prompt=cached,
            cache_salt=self.salts[salt],
            group=group,
            id_slot=pin if pin < self.shape.n_slots else -1,
            is_background=is_background,
            pin=is_kept,
        )
        can_reuse = self.cache.settings.can_reuse
        tokenized = TokenizedPrompt(packed(np.array(prompt, dtype=np.int32)))
        request = Request(params, tokenized, arrival=len(self.asked), now=self.now, can_reuse=can_reuse)
        if is_kept and self.scheduler.why_not_pinned(request):
            COUNTS["not pinned"] += 1
            return
        self.scheduler.submit(request)
        namespace = f"salt {salt}" if cached and can_reuse else f"private {group or name}"
        self.asked.append(Asked(request, prompt, namespace))
        self.names[request.namespace] = namespace
        COUNTS["requests"] += 1

    def prompt(self, origin: int, share: float, tail: int, n_tail: int) -> list[int]:
        """The start of an earlier request's tokens, and a tail."""
        n_tail *= self.stretch
        letters = [LETTERS[tail >> (i % 40) & 1] for i in range(n_tail)]
        earlier = self.asked[-1 - origin % len(self.asked)].tokens if self.asked else []
        head = [token for token in earlier if token != EOS]
        return head[: int(share * len(head))] + letters

    kinds = st.sampled_from([0, 0, 0, 0, 0, 1]), st.sampled_from([True] * 5 + [False])
    lengths = st.sampled_from([0, 1, 2, 3, 5, 8, 12, 20, 40, -1])
    tails = st.integers(0, 2**40 - 1)

    @precondition(lambda self: self.n_waiting < 12)
    @rule(
        origin=st.integers(0, 5), share=st.sampled_from([0, 0.3, 0.5, 0.9, 1, 1]), tail=tails,
        n_tail=st.integers(1, 40), salt=kinds[0], cached=kinds[1], max_tokens=lengths,
        pin=st.sampled_from([-1, -1, -1, -1, 0, 1, 2]), greedy=st.booleans(), endless=st.booleans(),
    )  # fmt: skip
    def ask(
        self, *, origin: int, share: float, tail: int, n_tail: int, salt: int, cached: bool, max_tokens: int,
        pin: int, greedy: bool, endless: bool,
    ) -> None:  # fmt: skip
        self.new_request(
            self.prompt(origin, share, tail, n_tail), salt=salt, cached=cached, max_tokens=max_tokens, pin=pin,
            greedy=greedy, endless=endless,
        )  # fmt: skip

    @precondition(lambda self: self.n_waiting < 6)
    @rule(
        origin=st.integers(0, 5), share=st.sampled_from([0.5, 1, 1]), tail=tails, n_tail=st.integers(1, 5),
        n=st.integers(2, 9), max_tokens=lengths, cached=kinds[1],
    )  # fmt: skip
    def ask_side_by_side(
        self, *, origin: int, share: float, tail: int, n_tail: int, n: int, max_tokens: int, cached: bool
    ) -> None:
        """Some requests that share a prefix and differ at the end, or in nothing."""
        head = self.prompt(origin, share, tail, n_tail)
        for i in range(n):
            end = [LETTERS[i >> bit & 1] for bit in range(n_tail % 4)]
            self.new_request(head + end, cached=cached, max_tokens=max_tokens)

    @precondition(lambda self: self.n_waiting < 6)
    @rule(
        origin=st.integers(0, 5), share=st.sampled_from([0, 0.5, 1]), tail=tails, n_tail=st.integers(1, 24),
        n=st.integers(2, 4), max_tokens=lengths, cached=kinds[1], pin=st.sampled_from([-1, -1, -1, 0]),
        differ=st.sampled_from([False, False, False, True]),
    )  # fmt: skip
    def ask_for_choices(
        self, *, origin: int, share: float, tail: int, n_tail: int, n: int, max_tokens: int, cached: bool, pin: int,
        differ: bool,
    ) -> None:  # fmt: skip
        prompt = self.prompt(origin, share, tail, n_tail)
        group = f"g{len(self.asked)}"
        for i in range(n):
            if differ and i % 2:
                prompt = [*prompt[:-1], LETTERS[0] + LETTERS[1] - prompt[-1]]
            self.new_request(
                prompt, cached=cached, max_tokens=max_tokens, group=group, seed=i, greedy=False, pin=pin
            )

    @rule(
        origin=st.integers(0, 5), share=st.sampled_from([0.3, 0.9, 1, 1]), tail=tails, n_tail=st.integers(1, 40),
        salt=kinds[0], is_disturbed=st.booleans(),
    )  # fmt: skip
    def ask_in_the_background(
        self, *, origin: int, share: float, tail: int, n_tail: int, salt: int, is_disturbed: bool
    ) -> None:
        """A prompt that is computed while there is no other request, in place of an earlier one."""
        for asked in self.living:
            if asked.params.is_background:
                self.end(asked)
        prompt = self.prompt(origin, share, tail, n_tail)
        self.new_request(prompt, salt=salt, max_tokens=0, is_background=True)
        if is_disturbed:
            self.step(1, 0, is_late=False, n_jobs=0)
            self.new_request(prompt[:n_tail], salt=salt)

    # Seldom, since what is pinned makes other events rarer.
    @precondition(lambda self: len(self.asked) % 4 == 1 and self.n_waiting < 12)
    @rule(
        origin=st.integers(0, 5), share=st.sampled_from([0.3, 0.9, 1, 1]), tail=tails, n_tail=st.integers(0, 12),
        salt=kinds[0], is_kept=st.sampled_from([True, True, False, None]),
    )  # fmt: skip
    def warm(self, *, origin: int, share: float, tail: int, n_tail: int, salt: int, is_kept: bool | None) -> None:
        """Compute a prompt only, and pin or unpin it."""
        if prompt := self.prompt(origin, share, tail, n_tail):
            self.new_request(prompt, salt=salt, max_tokens=0, is_kept=is_kept)
            pins = self.cache.pins.stats
            assert pins.prefixes <= MAX_PINS
            assert pins.tokens <= pins.max_tokens
            COUNTS["pinned"] += pins.prefixes

    @precondition(lambda self: self.living)
    @rule(index=st.integers(0, 20))
    def cancel(self, index: int) -> None:
        self.end(self.living[index % len(self.living)])

    def end(self, asked: Asked) -> None:
        self.scheduler.end(asked.request, self.now)
        self.mark_ended(asked)
        COUNTS["cancelled"] += 1

    def mark_ended(self, asked: Asked) -> None:
        """Record the end of a request."""
        asked.has_ended, asked.slot = True, -1

    # --- events ---

    @rule(
        status=st.sampled_from([Status.FATAL, Status.FATAL, Status.ABORTED, Status.NO_CELLS, Status.INVALID]),
        n_applied=st.integers(0, 24),
        loses=st.booleans(),
    )
    def fail_next(self, status: Status, n_applied: int, loses: bool) -> None:
        self.backend.failure = Failure(status, n_applied * self.stretch, loses)

    @precondition(lambda self: self.shape.ram)
    @rule(is_short=st.sampled_from([False, False, True]))
    def change_memory(self, is_short: bool) -> None:
        """Segments that could not be saved are tried again after a pause."""
        if self.is_short and not is_short:
            self.now += pacing.RETRY_DELAY_S
        self.is_short = is_short

    @precondition(lambda self: self.shape.ram)
    @rule(free=st.sampled_from([0.2, 0.7, 0.9, 1.8, 3, 40, 40, 40]))
    def change_free_memory(self, free: float) -> None:
        """The budget of RAM follows what is free, here in budgets."""
        budget = self.cache.ram_budget
        reading = MemoryReading(int(free * self.ram_bytes), 10 * self.ram_bytes)
        for _ in range(20 if free == 40 else 1):
            self.memory_read_at += CALM_S
            budget.observe(reading, self.tiers.ram.n_bytes, self.memory_read_at)
        assert 0 <= budget.n_bytes <= self.ram_bytes
        self.was_short |= self.is_squeezed
        COUNTS[f"RAM {budget.state.value}"] += 1

    @precondition(lambda self: self.asked)
    @rule(
        kind=st.sampled_from(["path", "path", "path", "invalid", "namespace", "everything"]),
        index=st.integers(0, 9), share=st.sampled_from([0.5, 1, 1]),
    )  # fmt: skip
    def drop(self, kind: str, index: int, share: float) -> None:
        """Drop prefixes on demand: nothing idle is left of them, and nothing is taken from running requests."""
        cache, asked = self.cache, self.asked[-1 - index % len(self.asked)]
        namespace, running = asked.request.namespace, list(self.running)
        if kind == "everything":
            cache.dropper.drop()
            assert cache._tree.n_tokens == cache._tree.n_pinned_tokens
            assert not len(self.tiers.ram) + len(self.tiers.disk)
        elif kind == "path":
            tokens = asked.tokens[: int(share * len(asked.tokens))]
            path = packed(np.array(tokens, dtype=np.int32))
            fork = cache._tree.match(namespace, path).last_fork()
            cache.dropper.drop_paths([(namespace, path)])
            left = cache._tree.match(namespace, path)
            assert left.n_resident <= fork
            # A segment that starts before the fork cannot be cut: it stays whole.
            assert left.n_matched == fork or left.segments[-1].start < fork
        elif kind == "invalid":
            tokens = asked.tokens[: int(share * len(asked.tokens))]
            path = packed(np.array(tokens, dtype=np.int32))
            node = cache._tree.match(namespace, path).matched_end
            start, is_pinned = node.start, node.n_pins > 0
            cache.dropper.invalidate_path(namespace, path, with_public=asked.request.n_public > 0)
            left = cache._tree.match(namespace, path)
            assert is_pinned or left.n_matched <= start
        elif all(other.request.namespace != namespace for other in running):
            cache.dropper.drop(namespace)
            assert not list(cache._tree.nodes(namespace))
        for other in running:
            assert cache._tree.is_pinned(other.slot) or other.slot in self.shaken
        self.is_recovering = True
        COUNTS[f"dropped: {kind}"] += 1

    # Seldom, since what is dropped makes other events rarer.
    @precondition(lambda self: len(self.asked) % 4 == 3)
    @rule(tier=st.sampled_from(["pool", "ram", "disk"]))
    def drop_tier(self, tier: LocalTier) -> None:
        """Drop the prefixes of one tier: other tiers keep what they have of them."""
        cache, tiers, before = self.cache, self.tiers, self.cache._tree.n_tokens
        held = {"ram": {*tiers.ram}, "disk": {*tiers.disk}}
        cache.dropper.drop_tier(tier)
        if tier == "pool":
            assert cache._tree.n_tokens == cache._tree.n_pinned_tokens
        else:
            assert cache._tree.n_tokens == before
            loading = [each for each in tiers.in_use if each.state is not SegmentState.DROPPED]
            left = tiers.ram if tier == "ram" else tiers.disk
            assert {*left} <= {above for each in loading for above in each.path_from_root}
        if tier != "ram":
            assert {*tiers.ram} == held["ram"]
        if tier != "disk":
            assert {*tiers.disk} == held["disk"]
        self.is_recovering = True
        COUNTS[f"dropped: {tier}"] += 1

    # Where slots can be saved the layout is fixed, for each change would empty them.
    @precondition(lambda self: self.cache.settings.saves and self.shape.layout != "changing")
    @rule(slot=st.integers(0, 2))
    def save_slot(self, slot: int) -> None:
        """Save what a slot holds, as `POST /slots/{id}?action=save` does."""
        self.load_model()
        slot %= self.shape.n_slots
        if self.scheduler.slots[slot].request is not None:
            return
        try:
            save = self.cache.save_slot(slot)
        except UnsavableSlotError:
            return
        assert not self.backend.held[slot].namespace.startswith("private"), "a private prefix is saved"
        self.step(1, 0, is_late=False, n_jobs=0)
        kvs = {number: kv for number in save.numbers if (kv := self.backend.kv_of(number)) is not None}
        self.cache.free_saved(kvs)
        if len(kvs) == len(save.numbers):
            parts = tuple(SnapshotPart(each.start, each.end, kvs[each.segment]) for each in save.saves)
            state = kvs[save.take.checkpoint] if save.take is not None else None
            snapshot = SlotSnapshot(save.namespace, save.tokens, parts, state)
            contents = [self.backend.saved[each.segment] for each in save.saves]
            taken = self.backend.ever_taken[save.take.checkpoint] if save.take is not None else None
            self.snapshots.append((snapshot, contents, taken))
            COUNTS["slots saved"] += 1

    @precondition(lambda self: self.snapshots)
    @rule(index=st.integers(0, 20), slot=st.integers(0, 2))
    def restore_slot(self, index: int, slot: int) -> None:
        """Restore what was saved of any slot into an idle one; refused only if running requests need the cells."""
        slot %= self.shape.n_slots
        if self.scheduler.slots[slot].request is not None:
            return
        self.load_model()
        snapshot, contents, taken = self.snapshots[index % len(self.snapshots)]
        parts = self.cache.load_slot(slot, snapshot)
        if parts is None:
            n_pinned = len(self.backend.prefixes(asked.slot for asked in self.running))
            # A part is loaded whole, even if some of it is resident.
            n_part = max(part.end - part.start for part in snapshot.parts)
            n_needed = n_pinned + len(unpacked(snapshot.tokens)) + n_part
            assert n_needed > self.backend.info.n_ctx, "refused without a reason"
            return
        assert tokens_of(self.cache._tree, slot) == unpacked(snapshot.tokens).tolist()
        for number, part in parts.items():
            if part.start < part.end:
                self.backend.saved[number] = contents[snapshot.parts.index(part)]
            else:
                self.backend.ever_taken[number] = taken
            self.backend.put(number, part.start, part.end, part.kv)
        self.is_recovering = True
        self.step(1, 0, is_late=False, n_jobs=0)
        COUNTS["slots restored"] += 1

    @rule(
        n=st.integers(5, 15), n_extra=st.integers(0, 3), n_jobs=st.integers(0, 2),
        n_drafted=st.sampled_from([(0, 0), (0, 0), (3, 5)]),
    )  # fmt: skip
    def go_on(self, n: int, n_extra: int, n_jobs: int, n_drafted: tuple[int, int]) -> None:
        self.step(n, n_extra, is_late=False, n_jobs=n_jobs, n_drafted=n_drafted)

    @rule(
        n=st.integers(1, 4), n_extra=st.integers(0, 3), is_late=st.booleans(), n_jobs=st.integers(0, 2),
        n_drafted=st.sampled_from([(0, 0), (0, 0), (0, 0), (8, 0), (3, 5), (0, 2)]),
    )  # fmt: skip
    def step(self, n: int, n_extra: int, is_late: bool, n_jobs: int, n_drafted: tuple[int, int] = (0, 0)) -> None:
        """So many plans, each with at most `n_extra` extra steps, committed as they come or all at the end."""
        self.is_sound = False
        for _ in range(n):
            self.draft(*n_drafted)
            plan = self.plan()
            if self.shape.disk:
                self.run_disk_jobs(n_jobs, n_jobs, True, "good")
            done = [(plan, self.apply(plan))]
            while len(done) <= n_extra:
                if not is_late:
                    self.commit(*done[-1])
                after = next_decode_step(*done[-1], self.backend.vocab.eog)
                if after is None:
                    break
                COUNTS["extra steps"] += 1
                done.append((after, self.apply(after)))
            for each in done if is_late else done[n_extra:]:
                self.commit(*each)
            self.was_pending = bool(self.cache._sequences.operations)
            if not self.was_pending:
                self.check_agreement()
        self.is_sound = True

    @precondition(lambda self: self.disk.writes or self.disk.reads)
    @rule(
        n_writes=st.integers(0, 9), n_reads=st.integers(0, 3), is_written=st.sampled_from([True] * 9 + [False]),
        answer=st.sampled_from(["good"] * 9 + ["not now", "bad"]),
    )  # fmt: skip
    def run_disk_jobs(self, n_writes: int, n_reads: int, is_written: bool, answer: str) -> None:
        for _ in range(min(n_writes, len(self.disk.writes))):
            job = self.disk.next_change(ok=is_written)
            if job is not None:
                self.cache.on_io(Written(job.meta.number, ok=is_written), self.now)
                COUNTS["written"] += is_written
        for _ in range(min(n_reads, len(self.disk.reads))):
            number = self.disk.reads.pop(0)
            if answer == "good" and number in self.disk.metas:
                positions = self.cache.on_io(ReadDone(number, 1e-6), self.now)
                if positions is not None:
                    self.backend.put(number, positions.start, positions.stop, self.states[number])
                    COUNTS["read"] += 1
            elif answer == "not now":
                segment = self.tiers.busy.get(number)
                if segment is not None and segment.state is SegmentState.READING:
                    self.unreadable.add(number)
                self.cache.on_io(ReadFailed(number), self.now)
            else:
                self.cache.on_io(Corrupt(number), self.now)
        self.take_jobs(self.cache.take_jobs())

    def take_jobs(self, jobs: list[Job]) -> None:
        self.disk.take(jobs)
        for job in jobs:
            COUNTS["reads"] += isinstance(job, Read)
            if isinstance(job, Write):
                number = job.meta.number
                self.states[number] = self.backend.kv_of(number)
                saved = self.backend.saved[number]
                assert not saved.namespace.startswith("private"), "a private prefix is written"

    @property
    def is_squeezed(self) -> bool:
        """True if RAM may keep less than was configured, because memory is short."""
        return self.cache.ram_budget.n_bytes < self.ram_bytes

    @property
    def cache(self) -> KVCache:
        return self.scheduler.cache

    @property
    def tiers(self) -> SegmentTiers:
        return self.cache._tiers

    def size_of(self, n_tokens: int) -> int:
        """Bytes of a segment; nothing takes none."""
        size = self.backend.info.segment_size
        return size.of(n_tokens) if n_tokens and size is not None else 0

    @property
    def shares(self) -> bool:
        """True while sequences may share cells."""
        return self.shape.reuses and self.backend.info.unified

    def follow_layout(self) -> None:
        """Change the layout if the requests of now want another one: all that the pool holds goes to RAM."""
        if self.scheduler.wants_unified(self.now) == self.backend.info.unified:
            return
        self.empty_pool()
        is_unified = not self.backend.info.unified
        self.backend.set_layout(unified=is_unified)
        self.scheduler.set_layout(self.model_info(), self.backend.n_seqs)
        COUNTS["unified again" if is_unified else "partitioned"] += 1

    def empty_pool(self) -> None:
        """Move all that the pool holds to RAM."""
        # What was dropped meanwhile is not lost by this.
        self.carry_out(StepPlan(self.cache.take_operations()))
        before = Before(self)
        self.scheduler.empty_pool(self.now)
        self.carry_out(StepPlan(self.cache.take_operations()))
        lost = before.prefixes_in(self.wanted) - self.offloaded
        lacks_ram = self.was_short or self.is_squeezed or self.has_little_ram or self.is_ram_full
        assert not lost or lacks_ram or not self.cache.settings.offloads, "lost with the pool"

    @precondition(lambda self: self.backend.is_loaded and not self.living)
    @rule()
    def unload(self) -> None:
        """Unload the model until a request comes."""
        self.empty_pool()
        self.backend.unload()
        COUNTS["unloaded"] += 1

    def load_model(self) -> None:
        """Load the model if it is unloaded."""
        if not self.backend.is_loaded:
            self.backend.reload()
            COUNTS["loaded again"] += 1

    def plan(self) -> StepPlan:
        if self.living:
            self.load_model()
        if self.backend.is_loaded:
            self.follow_layout()
        before = Before(self)
        suspected = [a for a in self.running if a.request.is_suspect]
        plan = self.scheduler.plan(self.now)
        was_suspected = self.without_way_made(suspected, plan)
        COUNTS["plans"] += 1
        admitted = self.record_slots(plan)
        self.record_shifts(plan)
        for each in plan.operations:
            COUNTS["copied between partitions"] += isinstance(each, Copy) and not self.backend.info.unified
        self.carry_out(plan)
        self.readable = self.find_readable()
        for asked in admitted:
            asked.n_start = self.n_cached(asked, self.queued_saves[asked.slot])
            asked.expected_prefixes = [*self.prefixes(asked)]
        # A step is compared once, after its decode, unless a later operation was pending then.
        if not plan.work or self.was_pending:
            self.check_agreement()
        self.check_running(before, plan)
        self.check_restored(plan)
        self.check_loaded(plan)
        self.check_admissions(plan, admitted)
        self.check_preempted(plan, admitted)
        if not was_suspected:
            self.check_waiting(before, plan, admitted)
        if self.shares:
            self.check_losses(before, plan)
        self.check_work(plan, was_suspected)
        self.is_recovering, self.shaken = False, set()
        return replace(plan, operations=[], jobs=[])

    def without_way_made(self, suspected: list[Asked], plan: StepPlan) -> list[Asked]:
        """Suspects that a plan retries, or preempts for lack of cells: not one that made way for a request."""
        return [a for a in suspected if a.request.state is RequestState.RUNNING or a.request in plan.preempted]

    def carry_out(self, plan: StepPlan) -> None:
        """Carry out all of a plan but its work. While memory is short nothing is saved."""
        loaded = {number for each in plan.operations if isinstance(each, Load) for number, _ in each.parts}
        saved = {each.segment for each in plan.operations if isinstance(each, Save)}
        assert not saved & loaded, "loaded before it is known to be saved"
        self.backend.refused = self.refused(plan)
        only = replace(plan, work=[])
        result = apply(only, self.backend, lambda: self.now)
        self.scheduler.commit(only, result, self.now)
        self.incomplete = result.incomplete
        # One that could not be saved and is freed in the same plan is not among those that are reported.
        self.just_saved = {number for number in saved - {*result.unsaved} if number in self.backend.saved}
        jobs = []
        for job in plan.jobs:
            if isinstance(job, Write) and job.meta.number in result.unsaved:
                self.cache.on_io(Written(job.meta.number, ok=False), self.now)
            else:
                jobs.append(job)
                if isinstance(job, Read):
                    self.cache.on_io(ReadStarted(), self.now)
        self.take_jobs(jobs)
        self.was_short |= bool(result.unsaved)
        COUNTS["not saved"] += len(result.unsaved)

    def refused(self, plan: StepPlan) -> set[int]:
        """What a plan saves for which there is no memory."""
        return {each.segment for each in plan.operations if isinstance(each, Save)} if self.is_short else set()

    def record_slots(self, plan: StepPlan) -> list[Asked]:
        """Record which request runs where from now on; returns those that were admitted."""
        gone = [asked for asked in self.asked if asked.request in plan.preempted]
        for asked in gone:
            assert asked.slot >= 0, "preempted while not running"
            asked.slot = -1
        for asked in self.running:
            if asked.params.is_background and asked.request.state is RequestState.QUEUED:
                # The other one may be admitted at once, and then have nothing to compute, or wait for a read.
                others = [*self.scheduler.queue, *(r for r in self.scheduler.running if not r.params.is_background)]
                assert others, "it made way for nothing"
                asked.slot = -1
                COUNTS["made way"] += 1
        admitted = []
        for slot in self.scheduler.slots:
            asked = next((a for a in self.living if a.request is slot.request), None)
            assert (slot.request is None) == (asked is None)
            if asked is not None and asked.slot != slot.id:
                assert asked.slot == -1, "moved to another slot"
                assert asked.params.id_slot in (-1, slot.id)
                asked.slot, asked.has_started = slot.id, True
                self.backend.namespaces[slot.id] = asked.namespace
                admitted.append(asked)
        waiting = [*self.scheduler.queue]
        background = self.scheduler.admission.background
        if background is not None and background.state is RequestState.QUEUED:
            waiting.append(background)
        assert {a.request for a in self.running} | {*waiting} == {a.request for a in self.living}
        assert len(self.running) + len(waiting) == len(self.living)
        is_ahead = [asked.params.is_background for asked in self.running]
        assert not any(is_ahead) or len(self.running) + len(self.scheduler.queue) == 1, "it runs beside others"
        COUNTS["ran in the background"] += any(is_ahead)
        return admitted

    def record_shifts(self, plan: StepPlan) -> None:
        """Record what a plan has discarded of full contexts: the rest is the request's own from now on."""
        shifted = set()
        for asked in self.living:
            n_discarded = asked.request.n_discarded - sum(end - start for start, end in asked.discarded)
            if not n_discarded:
                continue
            shift, slot = asked.params.shift, asked.request.slot
            assert shift.is_on
            assert asked.slot == slot or asked.request in plan.preempted
            # As in llama-server's update_slots.
            n_keep = len(asked.prompt) if shift.n_keep < 0 else shift.n_keep
            n_keep = min(n_keep + self.backend.info.adds_bos, self.n_ctx_slot - 4)
            n_left = self.n_ctx_slot - 1 - n_keep
            assert n_discarded == min(shift.n_discard or n_left // 2, n_left - 1), "not as llama-server"
            done = [each for each in plan.operations if isinstance(each, Shift) and each.seq == slot]
            ranges = {(each.start, each.end) for each in done}
            assert ranges <= {(n_keep, n_keep + n_discarded)}, "not what the request discards"
            COUNTS["shifted"] += 1
            COUNTS["shifted again"] += bool(asked.discarded)
            COUNTS["too few cells to shift"] += Remove(slot, 0) in plan.operations and asked.slot == slot
            COUNTS["preempted with a shift"] += asked.slot < 0
            asked.discarded.append((n_keep, n_keep + n_discarded))
            asked.namespace, asked.prefixes = f"private {asked.request.id} shift {len(asked.discarded)}", []
            self.names[asked.request.namespace] = asked.namespace
            self.backend.namespaces[slot] = asked.namespace
            shifted.add(asked)
        self.just_shifted = shifted

    def apply(self, plan: StepPlan) -> StepResult:
        if self.backend.info.state.n_rollback:
            lengths = [len(work.run.tokens) for work in plan.work]
            assert lengths == sorted(lengths)
            assert len({*lengths}) == 1 or not any(work.run.n_drafted for work in plan.work)
        for work in plan.work:
            asked = self.find(work.request)
            self.backend.namespaces[asked.slot] = asked.namespace
            self.check_run(asked, work.run)
            if not asked.discarded:
                end = min(work.run.start + len(work.run.tokens), len(asked.prompt))
                asked.n_computed += max(0, end - work.run.start)
        COUNTS["steps"] += 1
        if plan.padding:
            unified = self.backend.info.unified
            for run in plan.padding:
                if unified or run.seq not in self.backend.namespaces:
                    self.backend.namespaces[run.seq] = "padding"
            is_prompt = any(len(work.run.tokens) > 1 for work in plan.work)
            COUNTS["padded in a partition"] += not unified and is_prompt
            COUNTS["rows between streams"] += not unified and not is_prompt
            COUNTS["padded steps"] += 1
            COUNTS["padded steps with extra ones"] += plan.n_extra_steps > 0
        result = apply(plan, self.backend, lambda: self.now)
        if result.decoded.status is Status.OK:
            for work, results in zip(plan.work, result.results, strict=True):
                for each in results:
                    for token in each.tokens:
                        self.record_token(self.find(each.request), token)
                COUNTS["drafted"] += work.run.n_drafted
                COUNTS["rejected"] += len(work.run.tokens) - len(work.kept(results[0].tokens))
        return result

    def draft(self, n_right: int, n_wrong: int) -> None:
        """Draft so many tokens for each reply, the first ones as a cold run would choose them."""
        for asked in self.running:
            if asked.generated and asked.params.sampling.temperature == 0 and n_right + n_wrong:
                sampling, past = asked.params.sampling, self.past(asked)
                draft = self.cold_tokens(asked.tokens, sampling, n_right, past=past) if n_right else []
                asked.request.draft = np.array([*draft, *LETTERS * n_wrong][: n_right + n_wrong], dtype=np.int32)

    def record_token(self, asked: Asked, token: int) -> None:
        """Record a sampled token, which must be the one of a cold run."""
        self.check_token(asked.tokens, asked.params.sampling, len(asked.generated), token, self.past(asked))
        asked.generated.append(token)
        COUNTS["tokens"] += 1
        COUNTS["tokens after a shift"] += bool(self.past(asked))

    def past(self, asked: Asked) -> Past:
        """The shifts on which the KV of a request depends: none if it was computed again since."""
        return self.backend.held[asked.slot].past if asked.slot >= 0 else ()

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        self.now += 1e-3
        outcomes = self.scheduler.commit(plan, result, self.now)
        if result.decoded.status is not Status.OK:
            assert len(outcomes) <= 1
            self.is_recovering = True
            self.shaken = {work.run.seq for work in plan.work}
            if not self.cache.settings.can_reuse and result.decoded.status in (Status.ABORTED, Status.FATAL):
                # Such models may have recurrent states, which all are lost.
                self.shaken |= {asked.slot for asked in self.running}
        sampled = {each.id for work in plan.work for each in work.samples}
        for outcome in outcomes:
            asked = self.find(outcome.request)
            assert not asked.has_ended, "ended twice"
            if isinstance(outcome, DecodeFailed):
                assert outcome.reason == result.decoded.status.name != Status.OK.name
                assert len(plan.work) == 1, "failed, but not alone"
                COUNTS["broke"] += 1
            elif not outcome.tokens:
                assert asked.params.max_tokens == 0
                assert outcome.reason == "limit"
            else:
                sampled.remove(asked.request.id)
                assert outcome.reason == self.reason(asked, outcome)
            if isinstance(outcome, DecodeFailed) or outcome.reason:
                self.mark_ended(asked)
                COUNTS["ended"] += 1
            else:
                asked.has_started = True
        assert not sampled or result.decoded.status is not Status.OK

    def reason(self, asked: Asked, outcome: Sampled) -> str | None:
        """Why a request must end with these tokens; with extra steps more tokens may be recorded by now."""
        n = asked.request.n_generated
        assert asked.generated[n - len(outcome.tokens) : n] == [*outcome.tokens]
        if outcome.tokens[-1] in self.backend.vocab.eog:
            return "eos"
        is_full = len(asked.prompt) + n == self.n_ctx_slot and not asked.params.shift.is_on
        assert outcome.truncated == (is_full and n != asked.params.max_tokens)
        return "limit" if n == asked.params.max_tokens or is_full else None

    # --- invariants ---

    def check_agreement(self) -> None:
        """With no operation pending, the cache says what was recorded, and so does the backend.

        Nothing is compared again before anything has happened to the backend, the tree or a request.
        """
        cache, backend = self.cache, self.backend
        state = backend.n_calls, cache._tree.version, [(asked, asked.slot) for asked in self.living]
        if state == self.compared:
            return
        self.compared = state
        ranges = backend.check()
        cache.check(ranges.__getitem__)
        if self.shape.reuses:
            in_ram = {segment.number for segment in self.tiers.ram if segment.state.is_loadable}
            assert in_ram == backend.segments.keys()
        for seq, held in enumerate(backend.held):
            assert tokens_of(cache._tree, seq) == held.tokens, seq
            assert cache.length(seq) == len(held)
        self.check_cells()
        if cache.settings.can_reuse:
            self.check_tree()
        wanted = {asked.namespace for asked in self.living}
        for held in backend.held:
            is_left = held.cells and held.namespace.startswith("private") and held.namespace not in wanted
            assert not is_left, "a private prefix was left behind"
        offloaded = [prefix for segment in backend.segments.values() for prefix in segment.prefixes]
        assert len(offloaded) == len(set(offloaded)), "offloaded twice"
        assert sum(self.size_of(len(segment.tokens)) for segment in backend.segments.values()) <= self.ram_bytes
        for segment in backend.segments.values():
            assert len(segment.tokens) <= self.largest
            assert not segment.namespace.startswith("private") or segment.namespace in wanted, "left in RAM"

    def check_cells(self) -> None:
        """The cache counts the cells that are used."""
        backend = self.backend
        n_used = len(backend.cells) if self.shares else sum(map(len, backend.held))
        assert self.cache.cells.used == n_used

    def check_tree(self) -> None:
        """Cells, pins, holders and segments are those that were recorded."""
        tree, backend = self.cache._tree, self.backend
        running = [asked.slot for asked in self.running]
        pinned, everything = backend.prefixes(running), backend.prefixes()
        assert (tree.n_tokens, tree.n_pinned_tokens) == (len(everything), len(pinned))
        if self.shares:
            assert self.cache.cells.idle == len(everything - pinned)
        held_by = {seq: set(held.prefixes) for seq, held in enumerate(backend.held) if held.cells}
        named: dict[Node | None, list[int]] = {}
        for node in tree.nodes():
            tokens = unpacked(bytes(node.run)).tolist()
            prefixes = backend.named(self.names[node.namespace], tokens, named.get(node.parent, ()))
            named[node] = prefixes
            holders = set(node.holders())
            assert holders == {seq for seq, prefixes_of in held_by.items() if prefixes[-1] in prefixes_of}
            assert node.n_pins == sum(prefixes[-1] in held_by.get(seq, ()) for seq in running), "a reference count"
            if node.segment is not None:
                saved = backend.saved[node.segment.number]
                assert prefixes[saved.start :] == saved.prefixes[: node.end - saved.start], "another path"

    def own_prefixes(self, node: Node) -> list[int]:
        """The prefixes that end in a node."""
        prefix = unpacked(node.prefix()).tolist()
        return [*self.backend.named(self.names[node.namespace], prefix)[node.start :]]

    def check_running(self, before: Before, plan: StepPlan) -> None:
        """Nothing was taken from requests that ran already, and each used cell holds another prefix."""
        held = self.backend.held
        for asked, prefixes in before.running.items():
            if asked.slot not in self.shaken and asked.slot >= 0 and asked not in self.just_shifted:
                assert held[asked.slot].prefixes[: len(prefixes)] == prefixes, "taken from a running request"
        for asked in self.just_shifted & {*self.running}:
            start, end = asked.discarded[-1]
            n_left = self.n_ctx_slot - 1 - (end - start)
            assert held[asked.slot].prefixes in ([], self.prefixes(asked)[:n_left]), "not what a shift leaves"
        if self.shares:
            assert len(self.backend.cells) == len(self.backend.prefixes()), "duplicate cells"
            budget, idle = self.shape.idle_cells, self.idle
            assert budget is None or len(idle) <= budget, "more idle cells than allowed"
            ready = [self.find(work.request) for work in plan.work]
            pending = [len(asked.tokens) - len(held[asked.slot]) for asked in ready]
            n_pending = sum(n for n in pending if n > 1)
            if self.shape.offload_after is not None and self.shape.ram and n_pending and not self.is_squeezed:
                for node in self.cache._tree.nodes():
                    n_since = before.clock - node.last_used
                    is_new = n_since <= 0 or n_since + n_pending <= self.shape.offload_after
                    assert is_new or not node.is_idle_leaf, "an idle prefix slows prompts"
                COUNTS["looked for idle prefixes that slow prompts"] += 1
        n_granted = sum(len(work.run.tokens) for work in plan.work)
        if self.backend.info.unified:
            assert len(self.backend.cells) + n_granted <= self.backend.info.n_ctx

        if self.shares:
            n_holders = Counter(prefix for each in held for prefix in each.prefixes)
            for spare in held[self.shape.n_slots :]:
                assert not spare.cells or n_holders[spare.prefixes[-1]] == 1, "an id for a covered path"

    def check_restored(self, plan: StepPlan) -> None:
        """A running request whose sequence had to be cleared starts again from all that is cached."""
        for asked in self.running:
            if self.shape.reuses and asked.slot in self.shaken and Remove(asked.slot, 0) in plan.operations:
                prefixes = self.prefixes(asked)[:-1]
                n_cached = max(common(prefixes, held.prefixes) for held in self.backend.held)
                assert len(self.backend.held[asked.slot]) == n_cached, "not restored"
                COUNTS["restored"] += 1

    def check_loaded(self, plan: StepPlan) -> None:
        """Nothing is computed that is cached, unless the pool is too full to load it."""
        COUNTS["loads"] += sum(isinstance(each, Load) for each in plan.operations)
        COUNTS["saves"] += sum(isinstance(each, Save) for each in plan.operations)
        n_pinned = len(self.backend.prefixes(asked.slot for asked in self.running))
        has_little = self.has_little_ram or self.is_squeezed
        is_full = self.backend.info.n_ctx - n_pinned < self.largest or (self.shape.disk and has_little)
        for work in plan.work:
            asked = self.find(work.request)
            if self.shape.reuses and len(asked.tokens) - work.run.start > 1:
                n_missing = self.n_cached(asked) - work.run.start
                # A segment that has to be read takes longer than to compute an eighth of its tokens.
                is_slow = self.shape.disk and n_missing <= self.n_segments(asked, work.run.start)
                assert not n_missing or is_full or plan.preempted or is_slow, "computes what is cached"
                COUNTS["looked for what is cached"] += 1

    def check_admissions(self, plan: StepPlan, admitted: list[Asked]) -> None:
        """An admitted request holds all that is cached of its prompt, or is about to, and waited for its leader."""
        loading = {each.dst for each in plan.operations if isinstance(each, Load)}
        for asked in admitted:
            wanted = self.prefixes(asked)[:-1]
            prefixes = self.backend.held[asked.slot].prefixes
            assert prefixes == wanted[: len(prefixes)], "not its own prefix"
            assert len(prefixes) <= asked.n_start
            COUNTS["reused tokens"] += asked.n_start
            if self.shape.reuses:
                others = [held.prefixes for seq, held in enumerate(self.backend.held) if seq != asked.slot]
                longest = max(common(wanted, other) for other in others)
                assert len(prefixes) >= longest or asked.slot in loading, "a longer match was left"
            if not self.backend.info.can_trim:
                assert asked.n_start == 0 or asked.params.group
            running = [other for other in self.running if other not in admitted]
            # A RAM that is too small may lose what was cached when they were admitted.
            is_lossy = (
                (self.shape.ram and self.has_little_ram)
                or self.unreadable
                or 0 < self.shape.disk < 10
                or self.was_short
            )
            waits = self.waits(asked, asked.n_start, running)
            assert not waits or is_lossy, "computed side by side with its leader"
            for other in admitted[: admitted.index(asked)]:
                first = self.waits(asked, asked.n_start, [other])
                also = self.waits(other, other.n_start, [asked])
                assert not (first and also) or is_lossy, "admitted side by side"

    def waits(self, asked: Asked, n_cached: int, running: list[Asked], min_shared: int = MIN_SHARED) -> bool:
        """True if one of these computes something that a request should wait for, beyond `n_cached`."""
        if not self.shape.reuses:
            return False
        wanted = self.prefixes(asked)[:-1]
        for leader in running:
            if leader.namespace != asked.namespace:
                continue
            if asked.params.group and leader.params.group == asked.params.group and not leader.generated:
                return True
            n = common(wanted, leader.expected_prefixes)
            if n > n_cached and n - leader.n_start > min_shared:
                return True
        return False

    def check_preempted(self, plan: StepPlan, admitted: list[Asked]) -> None:
        """The youngest request is preempted, never the oldest, and only with nothing idle left."""
        if not plan.preempted:
            return
        COUNTS["preempted"] += len(plan.preempted)
        gone = [asked for asked in self.asked if asked.request in plan.preempted]
        oldest = min(asked.request.arrival for asked in gone)
        assert all(asked.request.arrival < oldest for asked in self.running), "not the youngest"
        assert self.running, "the oldest was preempted"
        assert not set(gone) & set(admitted)
        left = {each for asked in gone for each in self.prefixes(asked)}
        assert not self.shares or self.idle <= left, "preempted with idle cells left"

    def check_waiting(self, before: Before, plan: StepPlan, admitted: list[Asked]) -> None:
        """A request that still waits has a reason to, and is not overtaken for ever."""
        waiting = [asked for asked in self.living if asked.slot < 0 and not asked.params.is_background]
        free = [slot.id for slot in self.scheduler.slots if slot.request is None]
        first = [a for a in waiting if a.has_started or a.request.n_overtaken >= MAX_OVERTAKEN]
        for asked in waiting:
            if asked.request in plan.preempted:
                continue
            n_cached = self.n_cached(asked)
            waits = self.waits(asked, n_cached, self.running, MIN_SHARED - self.n_not_worth_reading)
            asked.has_waited |= waits
            may_wait = waits or (asked.has_waited and self.waits(asked, n_cached, self.running, min_shared=0))
            # What is loaded in this plan takes room as if it were not shared yet.
            may_wait |= any(isinstance(each, Load) for each in plan.operations)
            for other in admitted:
                if (
                    other.request.arrival > asked.request.arrival
                    and other in before.fresh
                    and asked in before.fresh
                    and asked.params.id_slot in (-1, other.slot)
                    and not may_wait
                    and not self.waits(asked, 0, [*before.running])
                ):
                    asked.n_overtaken += 1
                    COUNTS["overtaken"] += 1
            # In the plan in which the limit is reached, the requests ahead of it are not counted one by one.
            assert asked.n_overtaken < MAX_OVERTAKEN + self.shape.n_slots, "overtaken too often"
            may_run = any(asked.params.id_slot in (-1, slot) for slot in free)
            if may_run and not may_wait and not plan.preempted and not set(first) - {asked}:
                assert not self.surely_fits(asked, before), "held back without a reason"
        assert self.running or not waiting or plan.preempted, "no request runs"

    @property
    def n_not_worth_reading(self) -> int:
        """Tokens of a running request that were on disk when it was admitted, but too few to be read from there."""
        if not self.shape.disk:
            return 0
        return max((asked.n_start - asked.request.n_cached_at_admission for asked in self.running), default=0)

    def surely_fits(self, asked: Asked, before: Before) -> bool:
        """True if there is room for a request and the running ones whatever they generate.

        What a running request copies in this plan still takes room when the plan admits others.
        """
        if not self.backend.info.unified:
            part = self.cache.settings.part_cells
            return not part or len(asked.tokens) + max(self.most(asked), 64) <= part
        if not self.running:
            return True
        held = self.backend.held
        n_held = {r: min(len(held[r.slot]), len(before.running.get(r, held[r.slot]))) for r in self.running}
        needed = sum(len(r.tokens) - n_held.get(r, 0) + self.most(r) for r in (*self.running, asked))
        shared = self.backend.prefixes(r.slot for r in self.running)
        pinned = len(shared) if self.shares else sum(map(len, held))
        return pinned + needed <= self.backend.info.n_ctx

    def is_too_long(self, asked: Asked) -> bool:
        """True for a prompt in the background that is longer than a part of the pool: the layout stays as it is."""
        part = self.cache.settings.part_cells
        return asked.params.is_background and not self.backend.info.unified and 0 < part < len(asked.tokens)

    def most(self, asked: Asked) -> int:
        """Tokens that a request may generate still."""
        n_free = self.n_ctx_slot - len(asked.tokens)
        limit = asked.params.max_tokens
        return n_free if limit < 0 else min(n_free, limit - len(asked.generated))

    def check_losses(self, before: Before, plan: StepPlan) -> None:
        """Prefixes that may be wanted again are evicted only for lack of RAM, ids, cells or budget."""
        lost = before.prefixes_in(self.wanted) - self.backend.prefixes() - self.offloaded
        # Private KV goes with a shift, and what is left after one with a preemption.
        is_dropped = any(asked.request.is_private for asked in self.just_shifted)
        is_dropped |= any(request.n_discarded for request in plan.preempted)
        if not lost or self.is_recovering or is_dropped:
            return
        COUNTS["losses"] += 1
        if self.shape.ram:
            # A RAM of a pool or less has no room for the longest prefixes.
            assert self.is_ram_full or self.has_little_ram or self.was_short, "lost while there is room in RAM"
            COUNTS["losses for RAM"] += 1
            return
        if self.shape.idle_cells is not None and len(self.idle) == self.shape.idle_cells:
            return
        n_free = self.backend.info.n_ctx - len(self.backend.cells) - sum(len(work.run.tokens) for work in plan.work)
        n_free -= sum(len(run.tokens) for run in plan.padding)
        # Further shifts come after the eviction for the first one of another request.
        n_free -= sum(each.end - each.start for each in plan.operations if isinstance(each, Shift))
        are_decoding = bool(plan.work) and all(
            work.run.n_outputs and len(work.run.tokens) == 1 for work in plan.work
        )
        if n_free <= ((plan.n_extra_steps + 1) * len(plan.work) - 1 if are_decoding else 0):
            COUNTS["losses for cells"] += 1
            return
        assert self.n_empty <= 2, "lost while ids and cells are free"
        COUNTS["losses for ids"] += 1

    @property
    def is_ram_full(self) -> bool:
        """True if RAM, or the disk below it, cannot take two of the largest segments."""
        n_bytes = sum(self.size_of(len(segment.tokens)) for segment in self.backend.segments.values())
        written = *self.disk.metas.values(), *(each.meta for each in self.disk.writes if isinstance(each, Write))
        n_written = sum(meta.n_bytes for meta in written)
        most = min(self.ram_bytes - n_bytes, self.disk_bytes - n_written if self.shape.disk else self.ram_bytes)
        return most < 2 * self.size_of(self.largest) or 0 < self.shape.disk < 10

    def check_work(self, plan: StepPlan, was_suspected: list[Asked]) -> None:
        """Suspects run alone; else every stream goes on, or waits for the prompt of a partitioned pool."""
        workers = [self.find(work.request) for work in plan.work]
        if was_suspected:
            assert len(workers) <= 1
            assert set(workers) <= set(was_suspected)
        else:
            runs = [work.run for work in plan.work]
            is_prompt = not self.backend.info.unified and any(len(run.tokens) - run.n_drafted > 1 for run in runs)
            assert not is_prompt or len(workers) == 1
            for asked in self.running if not is_prompt else ():
                n_left = len(asked.tokens) - len(self.backend.held[asked.slot])
                is_stream = n_left == 1 and asked.params.max_tokens != 0
                assert not is_stream or asked in workers, "a stream was held up"
        assert sum(len(work.run.tokens) for work in plan.work) <= self.backend.info.n_ubatch
        # What is public is loaded by the plan after the one that saves it. So is what was saved to make place, in
        # another part, for what the request's slot held.
        moves = (Load,) if self.public is None and self.backend.info.unified else (Load, Save)
        is_loading = any(isinstance(each, moves) for each in plan.operations)
        is_reading = any(asked.slot >= 0 for asked in self.living) and self.disk.reads
        able = [asked for asked in self.living if not self.is_too_long(asked)]
        assert plan.work or plan.preempted or is_loading or is_reading or not able, "nothing is done"

    def check_run(self, asked: Asked, run: Run) -> None:
        held = self.backend.held[run.seq]
        assert run.seq == asked.slot
        assert not asked.has_ended
        assert run.start == len(held)
        tokens = run.tokens[: len(run.tokens) - run.n_drafted].tolist()
        assert held.tokens + tokens == asked.tokens[: run.start + len(tokens)]
        is_last = run.start + len(tokens) == len(asked.tokens)
        assert bool(run.n_outputs) == (is_last and asked.params.max_tokens != 0)
        assert run.n_drafted <= self.backend.info.max_draft

    @invariant()
    @precondition(lambda self: hasattr(self, "scheduler"))
    def the_tree_is_sound(self) -> None:
        self.cache._tree.check()
        for asked in self.running:
            assert self.cache._tree.is_pinned(asked.slot) or asked.slot in self.shaken
        for asked in self.asked:
            assert (asked.request.state is RequestState.DONE) == asked.has_ended
            assert asked.request.tokens.view().tolist() == asked.tokens
            assert asked.request.n_prompt_computed == asked.n_computed

    def teardown(self) -> None:
        """End all requests."""
        try:
            if getattr(self, "is_sound", False):
                self.finish()
        finally:
            for patch in getattr(self, "patches", ()):
                patch.stop()

    def finish(self) -> None:
        self.backend.failure = None
        for asked in self.living:
            if asked.params.max_tokens < 0:
                self.end(asked)
        for _ in range(4000):
            if all(self.is_too_long(asked) for asked in self.living):
                break
            self.step(1, 0, False, n_jobs=3)
        assert all(self.is_too_long(asked) for asked in self.living), "a request never ended"
        for asked in self.living:
            self.end(asked)
        self.check_samplers()
        if self.shape.disk:
            self.shut_down()
        self.backend.close()

    def shut_down(self) -> None:
        """Once the scheduler has stopped, all that others may share and that fits is written to disk."""
        self.change_memory(is_short=False)
        self.change_free_memory(free=40)
        assert not self.is_squeezed
        self.now += pacing.RETRY_DELAY_S
        self.scheduler.stop(self.now)
        for _ in range(1000):
            plan = self.scheduler.plan(self.now)
            if not plan and not self.disk.writes:
                break
            self.carry_out(plan)
            self.run_disk_jobs(9, 9, True, "good")
        assert not plan, "shutting down never ends"
        assert not [each for each in self.tiers.ram if each.state is SegmentState.DIRTY], "dirty after the end"
        n_free = self.disk_bytes - self.tiers.disk.n_bytes
        if (
            min(self.shape.ram, self.shape.disk) == 10
            and not self.bytes_per_key
            and n_free > 2 * self.size_of(self.largest)
        ):
            written = {each for number in self.disk.kept for each in self.backend.saved[number].prefixes}
            assert self.backend.prefixes() <= written, "not written before the end"
            COUNTS["wrote everything at the end"] += 1

    def check_samplers(self) -> None:
        """Verify that the samplers of ended requests are freed."""

    # --- lookups ---

    @property
    def wanted(self) -> set[str]:
        """Namespaces of requests whose KV is kept for them while they wait."""
        return {asked.namespace for asked in self.living if not asked.discarded}

    @property
    def living(self) -> list[Asked]:
        return [asked for asked in self.asked if not asked.has_ended]

    @property
    def n_waiting(self) -> int:
        return len(self.scheduler.queue)

    @property
    def running(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.slot >= 0]

    @property
    def has_little_ram(self) -> bool:
        """True if a tenant's RAM holds a pool or less."""
        return self.shape.ram < 10 or bool(self.bytes_per_key)

    def prefixes(self, asked: Asked) -> list[int]:
        """The prefixes of a request's tokens."""
        asked.prefixes = self.backend.named(asked.namespace, asked.tokens[len(asked.prefixes) :], asked.prefixes)
        return asked.prefixes

    @property
    def offloaded(self) -> set[int]:
        """Prefixes whose last token is offloaded, and can be loaded by and by."""
        return self.prefixes_of_segments(self.disk.kept - self.unreadable)

    def find_readable(self) -> set[int]:
        """Prefixes whose last token is offloaded, and can be loaded now or once it is read.

        What only the disk has counts as evicted while RAM is too small to read it, or the disk does not answer.
        """
        if self.cache._disk.is_unresponsive:
            return self.prefixes_of_segments(set())
        kept, saved = self.disk.kept - self.unreadable, self.backend.saved
        return self.prefixes_of_segments(
            {number for number in kept if self.size_of(len(saved[number].tokens)) <= self.tiers.ram.capacity}
        )

    def prefixes_of_segments(self, on_disk: set[int]) -> set[int]:
        """Prefixes of the segments in RAM, and of these on disk."""
        segments = *self.backend.segments.values(), *map(self.backend.saved.__getitem__, on_disk)
        return {prefix for each in segments for prefix in each.prefixes}

    def n_cached(self, asked: Asked, queued_saves: AbstractSet[int] = frozenset()) -> int:
        """Tokens of a request that need not be computed, by a lookup that saw these of the plan's saves."""
        prefixes = self.prefixes(asked)[:-1]
        n = max(common(prefixes, held.prefixes) for held in self.backend.held)
        offloaded = self.readable
        public = prefixes
        if self.public is not None and not asked.is_private:
            public = self.backend.named(self.public, asked.tokens)[:-1]
            # What was in the pool only when the plan looked it up could not be loaded from there.
            unseen = [self.backend.saved[number] for number in self.just_saved - queued_saves]
            new = {prefix for each in unseen for prefix in each.prefixes}
            offloaded = offloaded - new | set(prefixes) & offloaded
        is_cached = [not offloaded.isdisjoint(each) for each in zip(prefixes, public, strict=True)]
        return next((i for i in range(n, len(prefixes)) if not is_cached[i]), len(prefixes))

    def n_segments(self, asked: Asked, start: int) -> int:
        """Segments that have tokens of a request from `start` on, without a gap."""
        match = self.cache._public.match(asked.request.namespace, asked.request.prefix)
        return sum(part.end > start for part in self.cache._disk.readable(match.parts))

    @property
    def n_empty(self) -> int:
        """Sequences that hold nothing and are of no running request."""
        running = {asked.slot for asked in self.running}
        return sum(not held.cells and seq not in running for seq, held in enumerate(self.backend.held))

    @property
    def idle(self) -> set[int]:
        """Prefixes that only idle sequences hold."""
        return self.backend.prefixes() - self.backend.prefixes(asked.slot for asked in self.running)

    def find(self, request: Request) -> Asked:
        return self.asked[int(request.id[1:])]


class Before:
    """The recorded state before a plan."""

    def __init__(self, machine: CacheMachine) -> None:
        held = machine.backend.held
        self.clock = machine.cache._sequences.clock
        self.running = {asked: list(held[asked.slot].prefixes) for asked in machine.running}
        self.fresh = {asked for asked in machine.living if asked.slot < 0 and not asked.has_started}
        self.held = [(each.namespace, set(each.prefixes)) for each in held]
        self.cells: dict[str, set[int]] = defaultdict(set)
        """Prefixes in the pool, by namespace."""
        for namespace, prefixes in self.held:
            self.cells[namespace] |= prefixes
        offloaded = [*machine.backend.segments.values(), *map(machine.backend.saved.get, machine.disk.kept)]
        self.held += [(each.namespace, set(each.prefixes)) for each in offloaded]

    def prefixes_in(self, namespaces: set[str]) -> set[int]:
        """The prefixes that were held or offloaded, but for private ones of other namespaces than these."""
        return {
            each
            for namespace, prefixes in self.held
            if namespace in namespaces or not namespace.startswith("private")
            for each in prefixes
        }


class FakeMachine(CacheMachine):
    def new_backend(self, shape: Shape) -> Backend:
        self.cold = TinyFake(n_slots=1, n_ctx=128, n_ubatch=128, eos_every=shape.eos_every)
        return TinyFake(
            n_slots=shape.n_slots,
            n_reserved=shape.n_spare,
            n_ctx=shape.n_ctx,
            n_ubatch=shape.n_ubatch,
            unified="partitions" not in shape.layout,
            may_partition=shape.layout == "changing",
            can_trim="whole" not in shape.layout,
            eos_every=shape.eos_every,
            segment_size=SegmentSize(20, 10),
        )

    def check_token(
        self, history: list[int], sampling: Sampling, n_drawn: int, token: int, past: Past = ()
    ) -> None:
        assert self.cold_tokens(history, sampling, 1, n_drawn, past=past) == [token], "not what a cold run gives"

    def cold_tokens(
        self, history: list[int], sampling: Sampling, n: int, n_drawn: int = 0, *, past: Past = ()
    ) -> list[int]:
        self.cold.change(Remove(0, 0))
        for held, shift in past:
            added = np.array(held[self.cold.seq_len(0) :], dtype=np.int32)
            self.cold.decode([Run(0, self.cold.seq_len(0), added, 1)])
            self.cold.change(replace(shift, seq=0))
        sampler, tokens, found = FakeSampler(sampling, n_drawn), history[self.cold.seq_len(0) :], []
        while len(found) < n and self.cold.seq_len(0) + len(tokens) <= self.cold.info.n_ubatch:
            self.cold.decode([Run(0, self.cold.seq_len(0), np.array(tokens, dtype=np.int32), 1)])
            ((token,),) = self.cold.sample([(0, sampler)])
            tokens = [token]
            found.append(token)
        return found

    def check_samplers(self) -> None:
        assert all(sampler.closed for sampler in self.backend.samplers)


class PublicMachine(FakeMachine):
    """One of two namespaces is public; the other one finds it, and never the other way round."""

    layouts = ("shared",)
    salts = key_salt(key_secret("key"), ""), PUBLIC_SALT
    public = "salt 1"

    def new_request(self, prompt: list[int], *, salt: int = 0, group: str = "", **fields: Any) -> None:
        """Make a fifth of the requests that would not be public."""
        salt = salt if group or len(self.asked) % 5 else 1
        super().new_request(prompt, salt=salt, group=group, **fields)

    def teardown(self) -> None:
        super().teardown()
        COUNTS["public tokens"] += self.cache.stats().public_tokens if hasattr(self, "scheduler") else 0


class TenantMachine(FakeMachine):
    """The two namespaces are of two API keys: each keeps its share of the pool, and neither exceeds its limit."""

    layouts = ("shared",)
    salts = key_salt(key_secret("one"), ""), key_salt(key_secret("other"), "")
    pools_per_key = 0.5
    more_spare = 12

    def check_losses(self, before: Before, plan: StepPlan) -> None:
        super().check_losses(before, plan)
        for tier in (self.backend.segments.values(), map(self.backend.saved.get, self.disk.kept)):
            used = Counter[str]()
            for each in tier:
                used[each.namespace] += self.size_of(len(each.tokens))
            for namespace in ("salt 0", "salt 1"):
                assert used[namespace] <= self.bytes_per_key, "more than a key may have"
                COUNTS["limited"] += used[namespace] > self.bytes_per_key - self.size_of(self.largest)
        self.check_shares(before, plan)

    def check_shares(self, before: Before, plan: StepPlan) -> None:
        """While one key has idle cells beyond its share, the other one loses none of its own share."""
        # Ids, ages and the budget of idle cells take cells too, by last use.
        by_age = self.shape.idle_cells is not None or self.shape.offload_after is not None
        n_empty = sum(not held.cells for held in self.backend.held)
        if by_age or n_empty <= 2 or plan.preempted or self.is_recovering:
            return
        share = self.backend.info.n_ctx // 2
        for namespace, other in (("salt 0", "salt 1"), ("salt 1", "salt 0")):
            had, has = before.cells[namespace], self.in_pool(namespace)
            if had - has and len(had) <= share:
                COUNTS["lost of its share"] += 1
                assert len(self.in_pool(other)) <= share or not self.in_pool(other) & self.idle, "a share was taken"
            if len(had) > share and had - has:
                COUNTS["lost beyond its share"] += 1

    def in_pool(self, namespace: str) -> set[int]:
        """Prefixes of a namespace in the pool."""
        return {each for held in self.backend.held if held.namespace == namespace for each in held.prefixes}


@pytest.mark.slow
def test_the_cache_with_two_api_keys() -> None:
    before = COUNTS.copy()
    chosen = settings(max_examples=1000 if LONG else 20, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(TenantMachine, settings=chosen)
    counts = COUNTS - before
    missing = [event for event in ("limited", *OFTEN, *(SHARES if LONG else ())) if not counts[event]]
    assert not missing, "no example came to these"


@pytest.mark.slow
def test_the_cache_with_a_public_namespace() -> None:
    before = COUNTS.copy()
    chosen = settings(max_examples=1000 if LONG else 20, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(PublicMachine, settings=chosen)
    assert (COUNTS - before)["public tokens"], "no example loaded what is public"


def test_the_cache_on_a_fake_model() -> None:
    before = COUNTS.copy()
    chosen = settings(max_examples=2000 if LONG else 60, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(FakeMachine, settings=chosen)
    counts = COUNTS - before
    missing = [event for event in (*OFTEN, *(SELDOM if LONG else ())) if not counts[event]]
    assert not missing, "no example came to these"
