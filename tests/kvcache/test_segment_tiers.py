"""The tiers of segments against an oracle without a tree: segments, each with the tokens up to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamaslot.base.model import SegmentSize
from llamaslot.base.namespaces import private_namespace
from llamaslot.base.tokens import packed
from llamaslot.kvcache.disk_io import (
    CancelReads,
    Corrupt,
    Erase,
    IoEvent,
    Job,
    MarkUsed,
    Read,
    ReadDone,
    ReadFailed,
    ReadStarted,
    SegmentMeta,
    Write,
    WriteTotals,
    Written,
    path_digest,
)
from llamaslot.kvcache.nodes import Node, Segment, SegmentState
from llamaslot.kvcache.offloading import _missing
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.pacing import PARTIAL_DELAY_S, READ_TIMEOUT_S, RETRY_DELAY_S, WriteBudget
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from tests.cache_settings import tier_settings
from tests.conftest import LONG
from tests.fake_disk import FakeDisk

NAMESPACES = st.sampled_from(["", "salt", private_namespace("r")])
SOME = st.lists(st.integers(1, 2), min_size=1, max_size=14).map(tuple)
HEADER = 3
MAX_TOKENS = 4
Path = tuple[int, ...]


def run_of(tokens: Path) -> bytes:
    return packed(np.array(tokens, dtype=np.int32))


def common(a: Path, b: Path) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(eq=False)
class Tracked:
    """A segment by the oracle's account: all tokens up to its end, and where its bytes are."""

    segment: Segment
    namespace: str
    path: Path
    start: int
    last_used: int
    in_ram: bool = True
    """Or being read."""
    on_disk: bool = False
    """Or being written."""

    @property
    def n_bytes(self) -> int:
        return HEADER + len(self.path) - self.start

    def has(self, namespace: str, tokens: Path, position: int) -> bool:
        """True if it has the KV of this position of some tokens."""
        return (
            self.namespace == namespace
            and self.start <= position < len(self.path)
            and position < len(tokens)
            and self.path[: position + 1] == tokens[: position + 1]
        )

    def is_used_by(self, namespace: str, tokens: Path) -> bool:
        return self.has(namespace, tokens, self.start)


class Tiers:
    """The tiers over a tree of their own; what is to be offloaded is resident only meanwhile."""

    def __init__(
        self,
        ram: int,
        size: SegmentSize,
        max_tokens: int = 512,
        *,
        disk_bytes: int = 0,
        disk_bytes_per_day: int = 0,
    ) -> None:
        self.tree = RadixTree()
        settings = tier_settings(
            ram_bytes=ram,
            segment_size=size,
            segment_tokens=max_tokens,
            disk_bytes=disk_bytes,
            disk_bytes_per_day=disk_bytes_per_day,
        )
        self.tiers = SegmentTiers(self.tree, settings)
        self.disk = DiskTier(self.tiers, self.tree, settings)

    @contextmanager
    def resident(self, namespace: str, tokens: Path) -> Iterator[Node]:
        self.tree.hold(0, namespace)
        self.tree.extend(0, run_of(tokens))
        node = self.tree.end_node(0)
        assert node is not None
        yield node
        self.tree.release(0)

    def missing(self, tokens: Path, start: int, namespace: str = "") -> list[tuple[int, int]]:
        with self.resident(namespace, tokens) as node:
            return _missing(node, start, len(tokens), self.tiers.max_tokens)

    def fits(self, tokens: Path, ranges: list[tuple[int, int]], namespace: str = "") -> bool:
        with self.resident(namespace, tokens) as node:
            return self.tiers.fits(node, ranges)

    def add(self, tokens: Path, start: int = 0, namespace: str = "") -> Segment:
        """Offload the tokens from `start` to the end."""
        with self.resident(namespace, tokens) as node:
            return self.tiers.add(node, start, len(tokens))

    def path(self, tokens: Path, namespace: str = "") -> list[Segment]:
        return self.tree.match(namespace, run_of(tokens)).segments

    def touch(self, tokens: Path, namespace: str = "") -> None:
        self.tiers.touch(self.path(tokens, namespace))

    def readable(self, tokens: Path, namespace: str = "") -> list[Segment]:
        return [each.segment for each in self.disk.readable(self.tree.match(namespace, run_of(tokens)).parts)]

    def prefetch(self, seq: int, tokens: Path, namespace: str = "") -> None:
        self.disk.prefetch(seq, self.disk.readable(self.tree.match(namespace, run_of(tokens)).parts))

    def check(self) -> None:
        self.tiers.check(self.tree.check())

    def written(self, tokens: Path, start: int = 0) -> list[Job]:
        """Offload something and have it written; returns all jobs meanwhile."""
        self.disk.flush()
        self.add(tokens, start)
        self.disk.tick(1000.0)
        jobs = self.tiers.take_jobs()
        for job in jobs:
            if isinstance(job, Write):
                self.disk.on_io(Written(job.meta.number, ok=True), 1000.0)
        return jobs

    def chain(self, n: int, *, first: int = 0) -> list[Segment]:
        """Offload and write so many segments of 100 tokens on one path."""
        path = tuple(range(first, first + 100 * n))
        for i in range(n):
            self.written(path[: 100 * (i + 1)], 100 * i)
        return self.path(path)


class TiersMachine(RuleBasedStateMachine):
    """Paths are offloaded, used, read and dropped, and the server is killed; the tiers say what the oracle says."""

    @initialize(ram=st.sampled_from([12, 40, 100, 10_000]), disk=st.sampled_from([0, 0, 12, 40, 100, 10_000]))
    def start(self, ram: int, disk: int) -> None:
        self.ram, self.disk_bytes = ram, disk
        self.disk = FakeDisk()
        self.tracked: dict[int, Tracked] = {}
        self.ignored: set[int] = set()
        """Files of segments that are too large for RAM."""
        self.now = 0
        self.seconds = 0.0
        self.new_tiers()

    def new_tiers(self) -> None:
        self.held = Tiers(self.ram, SegmentSize(HEADER, 1), MAX_TOKENS, disk_bytes=self.disk_bytes)
        self.tiers, self.tree = self.held.tiers, self.held.tree

    def is_offloaded(self, namespace: str, tokens: Path, position: int) -> bool:
        return any(tracked.has(namespace, tokens, position) for tracked in self.tracked.values())

    def record_use(self, namespace: str, tokens: Path) -> None:
        self.now += 1
        for tracked in self.tracked.values():
            if tracked.is_used_by(namespace, tokens):
                tracked.last_used = self.now

    def follow(self) -> list[Tracked]:
        """Take the jobs, and let the oracle follow what was evicted; returns what left RAM."""
        freed = [self.tracked[number] for number in self.tiers.take_freed()]
        for tracked in freed:
            assert tracked.in_ram
            tracked.in_ram = False
        jobs = self.tiers.take_jobs()
        for job in jobs:
            if isinstance(job, Write):
                tracked = self.tracked[job.meta.number]
                assert tracked.in_ram
                tracked.on_disk = True
            elif isinstance(job, Read):
                assert self.tracked[job.number].on_disk
                self.tracked[job.number].in_ram = True
                self.on_io(ReadStarted())
        self.disk.take(jobs)
        living = {segment.number for tier in (self.tiers.ram, self.tiers.disk) for segment in tier}
        to_write: set[int] = set()
        for job in self.disk.writes:
            if isinstance(job, Write):
                to_write.add(job.meta.number)
            elif isinstance(job, Erase):
                to_write.difference_update(job.numbers)
        for number, tracked in self.tracked.items():
            tracked.on_disk = number in self.disk.kept | to_write
            tracked.in_ram = tracked.segment in self.tiers.ram
        for number, tracked in self.tracked.items():
            assert (tracked.segment.state is SegmentState.DROPPED) == (number not in living)
        self.tracked = {number: tracked for number, tracked in self.tracked.items() if number in living}
        return freed

    def on_io(self, event: IoEvent) -> Segment | None:
        return self.held.disk.on_io(event, self.seconds)

    def is_reading(self, tracked: Tracked) -> bool:
        return tracked.segment.state is SegmentState.READING

    @property
    def n_reading(self) -> int:
        return sum(map(self.is_reading, self.tracked.values()))

    @rule(namespace=NAMESPACES, tokens=SOME, share=st.floats(0, 1))
    def look(self, namespace: str, tokens: Path, share: float) -> None:
        start = int(share * len(tokens))
        with self.held.resident(namespace, tokens[:start]):
            found = self.held.disk.readable(self.tree.match(namespace, run_of(tokens)).parts)
        at = start
        for each in found:
            tracked = self.tracked[each.segment.number]
            assert each.start == at < each.end
            assert all(tracked.has(namespace, tokens, position) for position in range(each.start, each.end))
            assert each.segment.state.is_loadable or tracked.on_disk
            at = each.end
        rest = [tracked for tracked in self.tracked.values() if tracked.has(namespace, tokens, at)]
        is_unresponsive = self.held.disk.is_unresponsive
        for each in rest:
            is_unreadable = each.segment.state is SegmentState.UNREADABLE
            assert (is_unreadable and each.segment.retry_at > self.seconds) or (is_unresponsive and not each.in_ram)

    @rule(namespace=NAMESPACES, tokens=SOME, share=st.sampled_from([0, 0, 0.5]))
    def offload(self, namespace: str, tokens: Path, share: float) -> None:
        """Offload all that no segment has from some position on; only partial segments are offloaded again."""
        start = int(share * len(tokens))
        ranges = self.held.missing(tokens, start, namespace)
        told = {position for a, b in ranges for position in range(a, b)}
        missing = {i for i in range(start, len(tokens)) if not self.is_offloaded(namespace, tokens, i)}
        assert missing <= told
        assert sum(b - a for a, b in ranges) == len(told)
        assert all(0 < b - a <= MAX_TOKENS for a, b in ranges)
        for each in told - missing:
            (again,) = (tracked for tracked in self.tracked.values() if tracked.has(namespace, tokens, each))
            assert again.path == tokens[: len(again.path)], "a shared segment would be offloaded again"
            assert len(again.path) - again.start < MAX_TOKENS
            assert again.start in {a for a, _ in ranges}, "only a part of a segment is replaced"
        if not ranges:
            return
        last = max(b for _, b in ranges)
        used = [tracked for tracked in self.tracked.values() if tracked.is_used_by(namespace, tokens[:last])]
        kept = [k for k in used if not any(a <= k.start and len(k.path) <= b for a, b in ranges)]
        stuck = [k for k in self.tracked.values() if k not in used and not self.may_be_evicted(k)]
        n_bytes = sum(k.n_bytes for k in kept if k.in_ram and not (self.may_be_evicted(k) and k.on_disk))
        n_bytes += sum(k.n_bytes for k in stuck) + sum(HEADER + b - a for a, b in ranges)
        fits = self.held.fits(tokens, ranges, namespace)
        assert fits == (n_bytes <= self.ram)
        for a, b in ranges if fits else ():
            self.add(namespace, tokens[:b], a)

    def may_be_evicted(self, tracked: Tracked) -> bool:
        """True if it is not in RAM, or may be evicted."""
        pins = self.tiers.load_pins.values()
        is_busy = tracked.segment.state in (SegmentState.READING, SegmentState.WRITING)
        return not tracked.in_ram or not (is_busy or any(tracked.segment in each for each in pins))

    def add(self, namespace: str, path: Path, start: int) -> None:
        self.record_use(namespace, path)
        above = [tracked for tracked in self.tracked.values() if tracked.is_used_by(namespace, path[:start])]
        segment = self.held.add(path, start, namespace)
        assert segment.number not in self.tracked
        self.tracked[segment.number] = Tracked(segment, namespace, path, start, self.now)
        before = list(self.tracked.values())
        gone = self.follow()
        assert all(tracked.segment.number in self.tracked for tracked in above), "its parents were dropped for it"
        for each in gone:
            is_replaced = (
                each.namespace == namespace and each.start >= start and each.path == path[: len(each.path)]
            )
            if not is_replaced:
                others = [k for k in before if k.in_ram and self.may_be_evicted(k) and k not in above]
                assert all(each.last_used <= other.last_used for other in others), "not the oldest"

    @rule(namespace=NAMESPACES, tokens=SOME)
    def touch(self, namespace: str, tokens: Path) -> None:
        self.held.touch(tokens, namespace)
        self.record_use(namespace, tokens)
        self.follow()

    @rule(namespace=NAMESPACES)
    def drop_namespace(self, namespace: str) -> None:
        found = {tracked.segment: None for tracked in self.tracked.values() if tracked.namespace == namespace}
        self.tiers.drop(sorted(found, key=lambda segment: -segment.start))
        self.follow()
        assert all(tracked.namespace != namespace for tracked in self.tracked.values())

    @rule(namespace=NAMESPACES, tokens=SOME, more=st.integers(0, 3))
    def drop(self, namespace: str, tokens: Path, more: int) -> None:
        """Drop a path from its end back to the last fork, or to a later position."""
        others = [(k, common(k.path, tokens)) for k in self.tracked.values() if k.namespace == namespace]
        fork = max((n for k, n in others if n < len(k.path)), default=0)
        match = self.tree.match(namespace, run_of(tokens))
        assert match.last_fork() == fork
        expected = {k.segment.number for k, n in others if n == len(k.path) and k.start >= fork + more}
        before = set(self.tracked)
        self.tiers.drop(segment for segment in reversed(match.segments) if segment.start >= fork + more)
        self.follow()
        assert before - set(self.tracked) == expected

    @rule(index=st.integers(0, 20))
    def fail_to_save(self, index: int) -> None:
        """The backend had no memory for a segment: it is dropped, and nothing is offloaded for a while."""
        found = [k for k in self.tracked.values() if k.in_ram and not self.is_reading(k) and not k.on_disk]
        if not found:
            return
        tracked = found[index % len(found)]
        self.tiers.on_save_failed(frozenset({tracked.segment.number}), self.seconds)
        assert self.follow() == [], "the backend never had it"
        assert tracked.segment.number not in self.tracked
        assert not self.held.fits((1,), [(0, 1)])
        self.wait(RETRY_DELAY_S)

    @precondition(lambda self: hasattr(self, "tracked") and self.tracked)
    @rule(index=st.integers(0, 20), more=st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple))
    def continue_what_is_written(self, index: int, more: Path) -> None:
        """Have all writes that are due carried out, then offload a path that goes on where a segment ends."""
        self.wait(PARTIAL_DELAY_S)
        while self.disk.writes:
            self.go_on_writing(1, ok=True)
            self.wait(0.0)
        if self.tracked:
            tracked = list(self.tracked.values())[index % len(self.tracked)]
            self.offload(tracked.namespace, (*tracked.path, *more), 0)

    # --- the disk ---

    @rule(seconds=st.sampled_from([0.0, 0.0, PARTIAL_DELAY_S, READ_TIMEOUT_S, RETRY_DELAY_S]))
    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        was_unresponsive, was_reading = self.held.disk.is_unresponsive, self.n_reading > 0
        self.held.disk.tick(self.seconds)
        assert self.held.disk.is_unresponsive or not was_unresponsive or seconds >= RETRY_DELAY_S
        if was_reading and seconds >= READ_TIMEOUT_S:
            assert self.held.disk.is_unresponsive
            assert not self.n_reading
        self.follow()
        due_at = self.held.disk.due_at
        assert due_at is None or due_at > self.seconds
        for tracked in self.tracked.values():
            assert tracked.segment.state is not SegmentState.UNREADABLE or tracked.segment.retry_at > self.seconds

    @rule(namespace=NAMESPACES, tokens=SOME, seq=st.integers(0, 2))
    def prefetch(self, namespace: str, tokens: Path, seq: int) -> None:
        """A sequence keeps in RAM what it is about to load, and has the rest read as far as there is room."""
        self.tiers.load_pins.pop(seq, None)
        wanted = self.held.readable(tokens, namespace)
        before = [
            k for k in self.tracked.values() if k.in_ram and self.may_be_evicted(k) and k.segment not in wanted
        ]
        self.held.prefetch(seq, tokens, namespace)
        self.follow()
        first = next((s for s in wanted if not s.state.is_loadable), None)
        if first is not None and self.n_reading < 4 and first.state is not SegmentState.READING:
            assert first.n_bytes + self.tiers.ram.n_bytes > self.ram, "there was room"
            assert not any(tracked.in_ram for tracked in before), "others could have been evicted"

    @rule(seq=st.integers(0, 2))
    def unpin(self, seq: int) -> None:
        self.tiers.load_pins.pop(seq, None)

    @precondition(lambda self: hasattr(self, "disk") and self.disk.writes)
    @rule(n=st.integers(1, 4), ok=st.sampled_from([True, True, True, False]))
    def go_on_writing(self, n: int, ok: bool) -> None:
        for _ in range(min(n, len(self.disk.writes))):
            job = self.disk.next_change(ok=ok)
            if job is not None:
                self.on_io(Written(job.meta.number, ok=ok))
                self.follow()

    @precondition(lambda self: hasattr(self, "disk") and self.disk.reads)
    @rule(answer=st.sampled_from(["good", "good", "good", "not now", "corrupt"]))
    def read(self, answer: str) -> None:
        number = self.disk.reads.pop(0)
        was_unresponsive = self.held.disk.is_unresponsive
        tracked = self.tracked.get(number)
        is_wanted = tracked is not None and self.is_reading(tracked)
        if answer == "good" and number in self.disk.metas:
            segment = self.on_io(ReadDone(number, 1e-3))
            assert (segment is not None) == is_wanted
            if tracked is not None and segment is not None:
                assert self.disk.path(number) == (tracked.namespace, tracked.path), "the bytes are another prefix's"
                assert (segment, segment.start, segment.end) == (tracked.segment, tracked.start, len(tracked.path))
        elif answer == "corrupt":
            self.on_io(Corrupt(number))
        else:
            self.on_io(ReadFailed(number))
            assert self.held.disk.is_unresponsive == was_unresponsive
            was_unresponsive = False
        self.follow()
        assert tracked is None or not self.is_reading(tracked)
        assert not (self.held.disk.is_unresponsive and was_unresponsive)

    @rule(ram=st.sampled_from([0.5, 1, 1, 1]))
    def be_killed(self, ram: float) -> None:
        """Pending writes are lost; the rest is found again, to the token."""
        self.ram = max(12, int(self.ram * ram))
        self.disk.writes, self.disk.reads = [], []
        metas = self.disk.metas
        for meta in metas.values():
            assert meta.parent is None or meta.parent in metas, "on disk without its parent"
        was = {number: self.disk.path(number) for number in metas}
        self.new_tiers()
        ignored = self.ignored = set(self.held.disk.adopt(list(metas.values()), self.disk.first_number))
        self.tracked = {
            segment.number: Tracked(segment, *was[segment.number], segment.start, 0, in_ram=False, on_disk=True)
            for segment in self.tiers.disk
        }
        for number, (namespace, path) in was.items():
            meta = metas[number]
            assert (number in ignored) == (meta.n_bytes > self.ram or meta.parent in ignored)
            if number not in ignored:
                longer = any(tracked.has(namespace, path, len(path) - 1) for tracked in self.tracked.values())
                assert longer, "it is lost"
        self.follow()
        self.held.check()

    @precondition(lambda self: hasattr(self, "tiers"))
    @invariant()
    def agree(self) -> None:
        self.held.check()
        ram, disk = self.tiers.ram, self.tiers.disk
        tracked = self.tracked.values()
        assert {segment.number for segment in ram} == {k.segment.number for k in tracked if k.in_ram}
        assert {segment.number for segment in disk} == {k.segment.number for k in tracked if k.on_disk}
        assert ram.n_bytes == sum(k.n_bytes for k in tracked if k.in_ram) <= ram.capacity
        assert disk.n_bytes == sum(k.n_bytes for k in tracked if k.on_disk) <= disk.capacity
        positions = [(k.namespace, k.path[: i + 1]) for k in tracked for i in range(k.start, len(k.path))]
        assert len(positions) == len(set(positions)), "offloaded twice"
        written = {segment.number for segment in disk if segment.state is not SegmentState.WRITING}
        replaced = {number for tier in (ram, disk) for segment in tier for number in segment.replaces}
        assert written <= self.disk.kept <= written | replaced | self.ignored, "a file that nothing erases"


TiersMachine.TestCase.settings = settings(max_examples=2000 if LONG else 100, stateful_step_count=60, deadline=None)
TestTiers = TiersMachine.TestCase


def test_a_shared_prefix_is_offloaded_once() -> None:
    held = Tiers(10**9, SegmentSize(216, 8204))
    head = tuple(range(8000))
    for i in range(50):
        path = (*head, *(10_000 + 100 * i + j for j in range(40)))
        for start, end in held.missing(path, 0):
            held.add(path[:end], start)
    n_distinct = 8000 + 50 * 40
    assert held.tiers.ram.n_tokens == n_distinct
    assert held.tiers.ram.n_bytes <= 1.05 * 8204 * n_distinct


def test_a_partial_segment_is_replaced_by_a_longer_one() -> None:
    held = Tiers(10**9, SegmentSize(0, 1))
    held.add(tuple(range(100)))
    assert held.missing(tuple(range(130)), 100) == [(0, 130)]
    held.add(tuple(range(130)))
    assert (len(held.tiers.ram), held.tiers.take_freed()) == (1, [0])


def test_a_partial_segment_with_children_is_not_replaced() -> None:
    held = Tiers(10**9, SegmentSize(0, 1))
    held.add((1, 2, 3))
    held.add((1, 2, 3, 4), 3)
    assert held.missing((1, 2, 3, 5), 3) == [(3, 4)]


def test_no_part_of_a_segment_can_be_replaced() -> None:
    held = Tiers(10**9, SegmentSize(0, 1))
    held.add(tuple(range(100)))
    with pytest.raises(AssertionError, match="has a part"):
        held.add(tuple(range(120)), 50)


def test_nothing_is_evicted_from_disk_for_a_segment_that_does_not_fit_all_the_same() -> None:
    held = Tiers(1000, SegmentSize(0, 1), 400, disk_bytes=300)
    for i in range(3):
        held.written(tuple(range(1000 * i, 1000 * i + 100)))
    assert held.written(tuple(range(9000, 9400))) == []
    assert (len(held.tiers.disk), held.tiers.disk.n_bytes) == (3, 300)


def test_the_least_recently_used_end_of_a_path_is_evicted_from_disk_first() -> None:
    held = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=300)
    path = tuple(range(200))
    held.written(path[:100])
    held.written(path, 100)
    held.written(tuple(range(1000, 1100)))
    erased, _ = held.written(tuple(range(2000, 2100)))
    assert erased == Erase((1,))
    assert {segment.number for segment in held.tiers.disk} == {0, 2, 3}


def test_segments_that_a_sequence_is_about_to_load_are_not_evicted_for_another_one() -> None:
    held = Tiers(200, SegmentSize(0, 1), 100, disk_bytes=1000)
    first, second = held.chain(2, first=1000), held.chain(2)
    held.disk.tick(1000.0)
    held.prefetch(0, tuple(range(1000, 1200)))
    for each in first:
        assert held.disk.on_io(ReadDone(each.number, 1e-3), 1000.0)
    held.tiers.take_jobs()
    held.prefetch(1, tuple(range(200)))
    assert held.tiers.take_jobs() == []
    held.tiers.load_pins.pop(0, None)
    held.prefetch(1, tuple(range(200)))
    assert held.tiers.take_jobs() == [Read(each.number) for each in second]


def test_at_most_four_segments_are_read_and_two_written_at_a_time() -> None:
    held = Tiers(600, SegmentSize(0, 1), 100, disk_bytes=10_000)
    held.chain(6, first=1000)
    held.chain(6)
    held.disk.tick(1000.0)
    held.prefetch(0, tuple(range(1000, 1600)))
    assert [type(job) for job in held.tiers.take_jobs()] == [Read] * 4
    held = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=10_000)
    for i in range(4):
        held.add(tuple(range(1000 * i, 1000 * i + 100)))
    held.disk.tick(1000.0)
    assert [type(job) for job in held.tiers.take_jobs()] == [Write] * 2


def test_a_write_that_failed_is_retried_after_a_pause_and_then_its_children_are_written() -> None:
    held = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=1000)
    path = tuple(range(200))
    held.add(path[:100])
    held.add(path, 100)
    held.disk.tick(0.0)
    (write,) = held.tiers.take_jobs()
    assert isinstance(write, Write)
    held.disk.on_io(Written(write.meta.number, ok=False), 10.0)
    assert held.tiers.disk.n_bytes == 0
    assert held.disk.due_at == 10.0 + RETRY_DELAY_S
    held.disk.tick(10.0 + RETRY_DELAY_S - 1)
    assert held.tiers.take_jobs() == []
    held.disk.tick(10.0 + RETRY_DELAY_S)
    (again,) = held.tiers.take_jobs()
    assert again == write
    held.disk.on_io(Written(write.meta.number, ok=True), 50.0)
    held.disk.tick(50.0)
    (child,) = held.tiers.take_jobs()
    assert isinstance(child, Write)
    assert (child.meta.parent, child.meta.start) == (write.meta.number, 100)


def test_an_unreadable_segment_is_not_read_for_a_while() -> None:
    held = Tiers(100, SegmentSize(0, 1), 100, disk_bytes=1000)
    (gone,) = held.chain(1)
    held.chain(1, first=1000)
    path = tuple(range(100))
    held.prefetch(0, path)
    held.disk.on_io(ReadFailed(gone.number), 2000.0)
    held.disk.tick(2000.0 + RETRY_DELAY_S - 1)
    assert held.readable(path) == []
    held.disk.tick(2000.0 + RETRY_DELAY_S)
    assert held.readable(path) == [gone]


def test_a_failed_save_drops_the_segment_and_stops_offloading_for_a_while() -> None:
    held = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=1000)
    path = tuple(range(300))
    kept, *gone = [held.add(path[: at + 100], at) for at in range(0, 300, 100)]
    held.disk.tick(1000.0)
    assert [type(job) for job in held.tiers.take_jobs()] == [Write]
    for each in gone:
        held.tiers.on_save_failed(frozenset({each.number}), 1000.0)
    held.check()
    assert held.tiers.take_freed() == []
    assert held.readable(path) == [kept]
    assert not held.fits(path, [(100, 200)])
    held.disk.tick(1000.0 + RETRY_DELAY_S)
    assert held.fits(path, [(100, 200)])
    held.tiers.on_save_failed(frozenset({kept.number}), 1000.0 + RETRY_DELAY_S)
    held.check()
    assert held.tiers.take_jobs() == [Erase((kept.number,))]
    assert held.readable(path) == []


def test_no_request_waits_for_an_unresponsive_disk() -> None:
    held = Tiers(300, SegmentSize(0, 1), 100, disk_bytes=1000)
    first, second = held.chain(2)
    held.chain(3, first=1000)
    path = tuple(range(200))
    tiers, disk = held.tiers, held.disk
    disk.tick(1000.0)
    tiers.take_jobs()
    held.prefetch(0, path)
    assert disk.due_at is None, "the step may take longer than that before the disk is asked"
    disk.on_io(ReadStarted(), 1000.0)
    assert disk.due_at == pytest.approx(1000.1), "to see whether waiting still pays"
    assert disk.on_io(ReadDone(first.number, 1e-3), 1005.0) is first
    disk.tick(1004.95 + READ_TIMEOUT_S)
    assert disk.due_at == 1005.0 + READ_TIMEOUT_S
    disk.tick(1005.0 + READ_TIMEOUT_S)
    assert disk.is_unresponsive
    assert tiers.take_jobs()[-1] == CancelReads()
    assert second.state is SegmentState.DISK
    assert disk.due_at is None
    held.check()
    assert held.readable(path) == [first]
    disk.on_io(ReadFailed(second.number), 1100.0)
    assert disk.is_unresponsive
    assert second.retry_at == 1100.0 + RETRY_DELAY_S
    disk.tick(1100.0 + RETRY_DELAY_S)
    assert not disk.is_unresponsive
    assert held.readable(path) == [first, second]


@pytest.mark.parametrize("event", [lambda n: ReadDone(n, 60.0), Corrupt], ids=["read", "corrupt"])
def test_a_late_answer_makes_the_disk_responsive_again(event: Callable[[int], IoEvent]) -> None:
    held = Tiers(300, SegmentSize(0, 1), 100, disk_bytes=1000)
    (late,) = held.chain(1)
    held.chain(3, first=1000)
    held.prefetch(0, tuple(range(100)))
    held.disk.on_io(ReadStarted(), 1000.0)
    held.disk.tick(1000.0 + READ_TIMEOUT_S)
    assert held.disk.is_unresponsive
    version = held.tree.version
    assert held.disk.on_io(event(late.number), 1100.0) is None
    assert not held.disk.is_unresponsive
    assert held.tree.version > version, "a waiting request would keep its stale lookup"
    assert late.state in (SegmentState.DISK, SegmentState.DROPPED)
    held.check()


def test_waiting_requests_look_again_once_an_unresponsive_disk_is_tried_again() -> None:
    held = Tiers(300, SegmentSize(0, 1), 100, disk_bytes=1000)
    first, _ = held.chain(2)
    held.chain(3, first=1000)
    held.prefetch(0, tuple(range(200)))
    held.disk.on_io(ReadStarted(), 1000.0)
    held.disk.tick(1000.0 + READ_TIMEOUT_S)
    held.disk.on_io(ReadFailed(first.number), 1100.0)
    assert held.disk.is_unresponsive
    held.tiers.drop(reversed(held.path(tuple(range(200)))))
    version = held.tree.version
    held.disk.tick(1100.0 + RETRY_DELAY_S)
    assert not held.disk.is_unresponsive
    assert held.tree.version > version


def test_the_children_of_a_corrupt_file_are_evicted_from_disk_with_it() -> None:
    held = Tiers(100, SegmentSize(0, 1), 100, disk_bytes=1000)
    path = held.chain(3)
    other = held.chain(1, first=1000)
    held.tiers.take_jobs()
    held.disk.on_io(Corrupt(path[0].number), 1000.0)
    assert list(held.tiers.disk) == other
    assert held.tiers.take_jobs() == [Erase((each.number,)) for each in reversed(path)]
    held.disk.on_io(Corrupt(path[1].number), 1000.0)
    assert held.tiers.counters.disk.corrupt_files == 1, "one that was erased meanwhile is not corrupt"


def test_a_partial_segment_stays_on_disk_until_its_replacement_is_written() -> None:
    held = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=160)
    held.written(tuple(range(60)))
    held.add(tuple(range(80)))
    held.disk.tick(2000.0)
    (write,) = held.tiers.take_jobs()
    assert isinstance(write, Write)
    assert held.tiers.disk.n_bytes == 80
    held.disk.on_io(Written(write.meta.number, ok=True), 2000.0)
    assert held.tiers.take_jobs() == [Erase((0,))]


def test_a_segment_that_was_not_written_in_its_turn_is_once_it_is_used_again() -> None:
    held = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=100)
    held.chain(1)
    held.chain(1, first=1000)
    assert [segment.number for segment in held.tiers.disk] == [1]
    held.touch(tuple(range(100)))
    held.disk.tick(2000.0)
    assert [segment.number for segment in held.tiers.disk] == [0]


def test_writes_stay_within_the_budget_of_a_day() -> None:
    day = 86_400.0
    budget = WriteBudget(1000, WriteTotals())
    assert budget.opens_at == 0.0
    budget.take(900, 0.0)
    assert budget.opens_at <= 0.0, "100 are left"
    budget.take(400, 0.0)
    assert budget.opens_at == pytest.approx(0.3 * day)
    budget.take(100, 0.5 * day)
    assert budget.opens_at <= 0.5 * day, "200 have come back since it opened"
    budget.take(1000, 10 * day)
    assert budget.opens_at <= 10 * day, "a day's bytes are the most that add up"
    budget.take(1, 10 * day)
    assert budget.opens_at == pytest.approx(10 * day + day / 1000)
    unlimited = WriteBudget(0, WriteTotals())
    unlimited.take(10**15, 1.0)
    assert unlimited.opens_at == 0.0


@pytest.mark.parametrize("start", [0.0, 5 * 86_400.0])
def test_a_clock_that_jumps_a_day_neither_stops_writes_nor_lets_more_pass(start: float) -> None:
    day = 86_400.0
    budget = WriteBudget(1000, WriteTotals())
    budget.take(1500, start)
    assert budget.opens_at == pytest.approx(start + 0.5 * day)
    back = start - day
    budget.advance(back)
    assert budget.opens_at == pytest.approx(back + 0.5 * day), "as long as without the jump"
    budget.advance(back + 0.25 * day)
    assert budget.opens_at == pytest.approx(back + 0.5 * day)
    budget.advance(back + 20 * day)
    assert budget.n_used == 0
    budget.take(1001, back + 20 * day)
    assert budget.opens_at > back + 20 * day, "more than the bytes of a day"


def test_the_budget_goes_on_over_a_restart() -> None:
    day = 86_400.0
    first = WriteBudget(1000, WriteTotals())
    first.take(1200, 50.0)
    assert first.n_used == 1200
    for ago, opens_in in ((0.0, 0.2 * day), (0.1 * day, 0.1 * day), (0.2 * day, 0.0)):
        again = WriteBudget(1000, WriteTotals(10**6, 1200, ago))
        again.advance(7.0)
        assert again.opens_at == pytest.approx(7.0 + opens_in)
    rested = WriteBudget(1000, WriteTotals(10**6, 1200, 9 * day))
    rested.take(1000, 0.0)
    assert (rested.n_used, rested.opens_at) == (1000, 0.0)
    larger = WriteBudget(5000, WriteTotals(10**6, 1200, 0.0))
    larger.take(3000, 0.0)
    assert larger.opens_at <= 0.0


def test_what_exceeds_the_budget_is_written_later_and_offloading_goes_on() -> None:
    held = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=1000, disk_bytes_per_day=150)
    held.disk.flush()
    for i in range(4):
        held.add(tuple(range(100 * i, 100 * i + 100)))
    held.disk.tick(1000.0)
    written = [job.meta.number for job in held.tiers.take_jobs()]
    assert written == [0, 1], "the last one may exceed what is left"
    for number in written:
        held.disk.on_io(Written(number, ok=True), 1000.0)
    held.disk.tick(1000.0)
    assert held.tiers.take_jobs() == []
    assert not held.disk.has_backlog
    assert held.tiers.counters.disk.written_bytes == 200
    due = held.disk.due_at
    assert due == pytest.approx(1000.0 + 50 / 150 * 86_400)
    held.disk.tick(due + 1)
    assert [job.meta.number for job in held.tiers.take_jobs()] == [2]


def test_the_use_of_a_path_is_reported_by_its_last_segment() -> None:
    held = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=1000)
    held.chain(3)
    held.tiers.take_jobs()
    held.touch(tuple(range(250)))
    held.touch(tuple(range(150)))
    assert held.tiers.take_jobs() == [MarkUsed((2, 1))]


def test_a_segment_larger_than_ram_stays_on_disk_unknown_with_all_behind_it() -> None:
    size = SegmentSize(HEADER, 1)
    long, short, other = (1, 2, 3, 4), (1, 2, 3, 4, 5), (9,)
    metas = [
        SegmentMeta(0, None, "", 0, run_of(long), size.of(4), path_digest("", run_of(long))),
        SegmentMeta(1, 0, "", 4, run_of(short[4:]), size.of(1), path_digest("", run_of(short))),
        SegmentMeta(2, None, "", 0, run_of(other), size.of(1), path_digest("", run_of(other))),
    ]
    held = Tiers(size.of(1), size, MAX_TOKENS, disk_bytes=100)
    tiers = held.tiers
    assert held.disk.adopt(metas, 3) == [0, 1]
    assert [segment.number for segment in tiers.disk] == [2]
    assert tiers.take_jobs() == [Read(2)]
