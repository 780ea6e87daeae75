"""The tree of segments against an oracle that knows no tree: segments, each with the tokens that lead to it."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from llamaslot.kvcache.disk import Erase, Read, Use, Write
from llamaslot.kvcache.pace import OPEN_SECONDS, PAUSE_SECONDS, SILENT_SECONDS
from llamaslot.kvcache.segments import Segment
from llamaslot.kvcache.tiers import Tiers

from llamaslot.base.model import SegmentSize
from llamaslot.base.namespaces import private_namespace
from llamaslot.base.tokens import packed
from tests.conftest import LONG
from tests.fake_disk import Files

SPACES = st.sampled_from(["", "salt", private_namespace("r")])
SOME = st.lists(st.integers(1, 2), min_size=1, max_size=14).map(tuple)
HEADER = 3
LARGEST = 4
Path = tuple[int, ...]


def run_of(tokens: Path) -> bytes:
    return packed(np.array(tokens, dtype=np.int32))


def common(a: Path, b: Path) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(eq=False)
class Known:
    """What the oracle knows of a segment: the whole path to its end, and where its bytes are."""

    segment: Segment
    space: str
    path: Path
    start: int
    last_used: int
    in_ram: bool = True
    on_disk: bool = False

    @property
    def n_bytes(self) -> int:
        return HEADER + len(self.path) - self.start

    def has(self, space: str, tokens: Path, position: int) -> bool:
        """Whether it has the KV of this position of some tokens."""
        return (
            self.space == space
            and self.start <= position < len(self.path)
            and position < len(tokens)
            and self.path[: position + 1] == tokens[: position + 1]
        )

    def is_used_by(self, space: str, tokens: Path) -> bool:
        return self.has(space, tokens, self.start)


class TiersMachine(RuleBasedStateMachine):
    """Paths are stored, used, read and forgotten, and the server is killed; after every rule the tree says what the
    oracle says.
    """

    @initialize(ram=st.sampled_from([12, 40, 100, 10_000]), disk=st.sampled_from([0, 0, 12, 40, 100, 10_000]))
    def start(self, ram: int, disk: int) -> None:
        self.ram, self.disk = ram, disk
        self.files = Files()
        self.known: dict[int, Known] = {}
        self.now = 0
        self.seconds = 0.0
        self.tiers = self.new_tiers()

    def new_tiers(self) -> Tiers:
        size = SegmentSize(HEADER, 1)
        return Tiers(self.ram, size, LARGEST, disk_bytes=self.disk)

    def stored(self, space: str, tokens: Path, position: int) -> bool:
        return any(known.has(space, tokens, position) for known in self.known.values())

    def note_use(self, space: str, tokens: Path) -> None:
        self.now += 1
        for known in self.known.values():
            if known.is_used_by(space, tokens):
                known.last_used = self.now

    def follow(self) -> list[Known]:
        """Let the oracle follow what the tree let go of, and take its jobs; what left RAM."""
        discarded = [self.known[number] for number in self.tiers.take_discarded()]
        for known in discarded:
            assert known.in_ram
            known.in_ram = False
        jobs = self.tiers.take_jobs()
        for job in jobs:
            if isinstance(job, Write):
                known = self.known[job.record.number]
                assert known.in_ram
                known.on_disk = True
            elif isinstance(job, Read):
                assert self.known[job.number].on_disk
                self.known[job.number].in_ram = True
                self.tiers.reads(self.seconds)
        self.files.take(jobs)
        living = {segment.number for tier in (self.tiers.ram, self.tiers.disk) for segment in tier}
        for known in self.known.values():
            known.on_disk = known.segment in self.tiers.disk
            known.in_ram = known.segment in self.tiers.ram
        self.known = {number: known for number, known in self.known.items() if number in living}
        return discarded

    @rule(space=SPACES, tokens=SOME, share=st.floats(0, 1))
    def look(self, space: str, tokens: Path, share: float) -> None:
        start = int(share * len(tokens))
        found = self.tiers.stored(space, run_of(tokens), start)
        at = start
        for each in found:
            known = self.known[each.segment.number]
            assert each.start == at < each.end
            assert all(known.has(space, tokens, position) for position in range(each.start, each.end))
            assert self.tiers.is_at_hand(each.segment) or known.on_disk
            at = each.end
        behind = [known for known in self.known.values() if known.has(space, tokens, at)]
        is_silent = self.tiers.is_silent
        assert all(k.segment.unreadable_until > self.seconds or (is_silent and not k.in_ram) for k in behind)

    @rule(space=SPACES, tokens=SOME, share=st.sampled_from([0, 0, 0.5]))
    def store(self, space: str, tokens: Path, share: float) -> None:
        """All that is missing from some position on, which must be no more than that, or open."""
        start = int(share * len(tokens))
        ranges = self.tiers.missing(space, run_of(tokens), start)
        told = {position for a, b in ranges for position in range(a, b)}
        missing = {i for i in range(start, len(tokens)) if not self.stored(space, tokens, i)}
        assert missing <= told
        assert sum(b - a for a, b in ranges) == len(told)
        assert all(0 < b - a <= LARGEST for a, b in ranges)
        for each in told - missing:
            (again,) = (known for known in self.known.values() if known.has(space, tokens, each))
            assert again.path == tokens[: len(again.path)], "a shared segment would be stored again"
            assert len(again.path) - again.start < LARGEST
            assert again.start in {a for a, _ in ranges}, "only a part of a segment is replaced"
        if not ranges:
            return
        used = [known for known in self.known.values() if known.is_used_by(space, tokens)]
        kept = [k for k in used if not any(a <= k.start and len(k.path) <= b for a, b in ranges)]
        stuck = [k for k in self.known.values() if k not in used and not self.may_leave(k)]
        n_bytes = sum(k.n_bytes for k in kept if k.in_ram and not (self.may_leave(k) and k.on_disk))
        n_bytes += sum(k.n_bytes for k in stuck) + sum(HEADER + b - a for a, b in ranges)
        fits = self.tiers.fits(space, run_of(tokens), ranges)
        assert fits == (n_bytes <= self.ram)
        for a, b in ranges if fits else ():
            self.add(space, tokens[:b], a)

    def may_leave(self, known: Known) -> bool:
        busy = self.tiers.reading | self.tiers.writing | self.tiers.guarded
        return not known.in_ram or known.segment not in busy

    def add(self, space: str, path: Path, start: int) -> None:
        self.note_use(space, path)
        in_front = [known for known in self.known.values() if known.is_used_by(space, path[:start])]
        segment = self.tiers.add(space, run_of(path), start)
        assert segment.number not in self.known
        self.known[segment.number] = Known(segment, space, path, start, self.now)
        before = list(self.known.values())
        gone = self.follow()
        assert all(known.segment.number in self.known for known in in_front), "what leads to it was given up for it"
        for each in gone:
            is_replaced = each.space == space and each.start >= start and each.path == path[: len(each.path)]
            if not is_replaced:
                others = [k for k in before if k.in_ram and self.may_leave(k) and k not in in_front]
                assert all(each.last_used <= other.last_used for other in others), "not the oldest"

    @rule(space=SPACES, tokens=SOME)
    def touch(self, space: str, tokens: Path) -> None:
        self.tiers.touch(space, run_of(tokens))
        self.note_use(space, tokens)
        self.follow()

    @rule(space=SPACES)
    def forget(self, space: str) -> None:
        self.tiers.forget(space)
        self.follow()
        assert all(known.space != space for known in self.known.values())

    @rule(space=SPACES, tokens=SOME, more=st.integers(0, 3))
    def give_up(self, space: str, tokens: Path, more: int) -> None:
        """What lies on a path behind the last place where something else goes on, or behind a later one."""
        others = [(k, common(k.path, tokens)) for k in self.known.values() if k.space == space]
        fork = max((n for k, n in others if n < len(k.path)), default=0)
        assert self.tiers.tree.last_fork(space, run_of(tokens)) == fork
        expected = {k.segment.number for k, n in others if n == len(k.path) and k.start >= fork + more}
        before = set(self.known)
        self.tiers.give_up(space, run_of(tokens), fork + more)
        self.follow()
        assert before - set(self.known) == expected

    @rule()
    def clear(self) -> None:
        self.tiers.clear()
        self.follow()
        assert not self.known

    # --- the disk ---

    @rule(seconds=st.sampled_from([0.0, 0.0, OPEN_SECONDS, SILENT_SECONDS, PAUSE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        was_silent, was_reading = self.tiers.is_silent, bool(self.tiers.reading)
        self.tiers.tend(self.seconds)
        assert self.tiers.is_silent or not was_silent or seconds >= PAUSE_SECONDS
        if was_reading and seconds >= SILENT_SECONDS:
            assert self.tiers.is_silent
            assert not self.tiers.reading
        self.follow()
        due_at = self.tiers.due_at
        assert due_at is None or due_at > self.seconds

    @rule(space=SPACES, tokens=SOME)
    def want(self, space: str, tokens: Path) -> None:
        stored = [each.segment for each in self.tiers.stored(space, run_of(tokens), 0)]
        before = [k for k in self.known.values() if k.in_ram and self.may_leave(k) and k.segment not in stored]
        self.tiers.want(stored)
        self.follow()
        first = next((s for s in stored if not self.tiers.is_at_hand(s)), None)
        if first is not None and len(self.tiers.reading) < 4 and first not in self.tiers.reading:
            assert first.n_bytes + self.tiers.ram.n_bytes > self.ram, "there was room"
            assert not any(known.in_ram for known in before), "others could have left"

    @precondition(lambda self: hasattr(self, "files") and self.files.writes)
    @rule(n=st.integers(1, 4), is_good=st.sampled_from([True, True, True, False]))
    def go_on_writing(self, n: int, is_good: bool) -> None:
        for _ in range(min(n, len(self.files.writes))):
            job = self.files.next_change(is_good=is_good)
            if job is not None:
                self.tiers.was_written(job.record.number, self.seconds, is_good=is_good)
                self.follow()

    @precondition(lambda self: hasattr(self, "files") and self.files.reads)
    @rule(answer=st.sampled_from(["good", "good", "good", "not now", "bad"]))
    def read(self, answer: str) -> None:
        number = self.files.reads.pop(0)
        was_silent = self.tiers.is_silent
        known = self.known.get(number)
        is_wanted = known is not None and known.segment in self.tiers.reading
        if answer == "good" and number in self.files.records:
            segment = self.tiers.was_read(number, 1e-3, self.seconds)
            assert (segment is not None) == is_wanted
            if known is not None and segment is not None:
                assert self.files.path(number) == (known.space, known.path), "the bytes are another prefix's"
                assert (segment, segment.start, segment.end) == (known.segment, known.start, len(known.path))
        elif answer == "bad":
            self.tiers.was_bad(number, self.seconds)
        else:
            self.tiers.was_not_read(number, self.seconds)
            assert self.tiers.is_silent == was_silent
            was_silent = False
        self.follow()
        assert known is None or known.segment not in self.tiers.reading
        assert not (self.tiers.is_silent and was_silent)

    @rule(ram=st.sampled_from([0.5, 1, 1, 1]))
    def be_killed(self, ram: float) -> None:
        """What was under way is lost; the rest is known again, to the token."""
        self.ram = max(12, int(self.ram * ram))
        self.files.writes, self.files.reads = [], []
        for record in self.files.records.values():
            assert record.front is None or record.front in self.files.records, "it hangs in the air"
        was = {number: self.files.path(number) for number in self.files.records}
        self.tiers = self.new_tiers()
        left = self.tiers.restore(list(self.files.records.values()), self.files.first)
        self.known = {
            segment.number: Known(segment, *was[segment.number], segment.start, 0, in_ram=False, on_disk=True)
            for segment in self.tiers.disk
        }
        for number, (space, path) in was.items():
            record = self.files.records[number]
            assert (number in left) == (record.n_bytes > self.ram or record.front in left)
            if number not in left:
                longer = any(known.has(space, path, len(path) - 1) for known in self.known.values())
                assert longer, "it is forgotten"
        self.follow()
        self.tiers.check()

    @precondition(lambda self: hasattr(self, "tiers"))
    @invariant()
    def agree(self) -> None:
        self.tiers.check()
        ram, disk = self.tiers.ram, self.tiers.disk
        known = self.known.values()
        assert {segment.number for segment in ram} == {k.segment.number for k in known if k.in_ram}
        assert {segment.number for segment in disk} == {k.segment.number for k in known if k.on_disk}
        assert ram.n_bytes == sum(k.n_bytes for k in known if k.in_ram) <= ram.capacity
        assert disk.n_bytes == sum(k.n_bytes for k in known if k.on_disk) <= disk.capacity
        positions = [(k.space, k.path[: i + 1]) for k in known for i in range(k.start, len(k.path))]
        assert len(positions) == len(set(positions)), "stored twice"
        written = {segment.number for segment in disk if segment not in self.tiers.writing}
        assert written <= self.files.records.keys()


TiersMachine.TestCase.settings = settings(max_examples=2000 if LONG else 150, stateful_step_count=60, deadline=None)
TestTiers = TiersMachine.TestCase


def test_a_shared_head_is_stored_once() -> None:
    held = Tiers(10**9, SegmentSize(216, 8204))
    head = tuple(range(8000))
    for i in range(50):
        path = (*head, *(10_000 + 100 * i + j for j in range(40)))
        for start, end in held.missing("", run_of(path), 0):
            assert held.add("", run_of(path[:end]), start) is not None
    n_distinct = 8000 + 50 * 40
    assert held.ram.n_tokens == n_distinct
    assert held.ram.n_bytes <= 1.05 * 8204 * n_distinct


def test_a_segment_that_is_not_full_gives_way_to_a_longer_one() -> None:
    held = Tiers(10**9, SegmentSize(0, 1))
    held.add("", run_of(tuple(range(100))), 0)
    assert held.missing("", run_of(tuple(range(130))), 100) == [(0, 130)]
    held.add("", run_of(tuple(range(130))), 0)
    assert (len(held.ram), held.take_discarded()) == (1, [0])


def test_a_part_of_a_segment_cannot_be_replaced() -> None:
    held = Tiers(10**9, SegmentSize(0, 1))
    held.add("", run_of(tuple(range(100))), 0)
    with pytest.raises(AssertionError, match="has a part"):
        held.add("", run_of(tuple(range(120))), 50)


def written(tiers: Tiers, tokens: tuple[int, ...], start: int = 0) -> list[object]:
    """Store something and have it written; all that the disk is told meanwhile."""
    tiers.end()
    tiers.add("", run_of(tokens), start)
    tiers.tend(1000.0)
    jobs = tiers.take_jobs()
    for job in jobs:
        if isinstance(job, Write):
            tiers.was_written(job.record.number, 1000.0, is_good=True)
    return jobs


def test_nothing_is_erased_for_what_does_not_fit_all_the_same() -> None:
    tiers = Tiers(1000, SegmentSize(0, 1), 400, disk_bytes=300)
    for i in range(3):
        written(tiers, tuple(range(1000 * i, 1000 * i + 100)))
    assert written(tiers, tuple(range(9000, 9400))) == []
    assert (len(tiers.disk), tiers.disk.n_bytes) == (3, 300)


def test_the_disk_gives_up_the_oldest_end_first() -> None:
    tiers = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=300)
    path = tuple(range(200))
    written(tiers, path[:100])
    written(tiers, path, 100)
    written(tiers, tuple(range(1000, 1100)))
    erased, _ = written(tiers, tuple(range(2000, 2100)))
    assert erased == Erase((1,))
    assert {segment.number for segment in tiers.disk} == {0, 2, 3}


def test_a_slow_disk_is_tried_again_by_and_by() -> None:
    tiers = Tiers(200, SegmentSize(0, 1), 100, disk_bytes=1000)
    for i in range(3):
        written(tiers, tuple(range(1000 * i, 1000 * i + 100)))
    gone = next(segment for segment in tiers.disk if segment not in tiers.ram)
    tiers.want([gone])
    assert tiers.read_us is None
    assert tiers.was_read(gone.number, 0.5, 1000.0) is gone
    assert tiers.read_us == pytest.approx(5000)
    tiers.tend(1000.0 + PAUSE_SECONDS)
    assert tiers.read_us is None


def chain(tiers: Tiers, n: int, *, first: int = 0) -> list[Segment]:
    """So many segments of 100 tokens on one path, all on disk."""
    path = tuple(range(first, first + 100 * n))
    for i in range(n):
        written(tiers, path[: 100 * (i + 1)], 100 * i)
    return tiers.tree.path("", run_of(path))


def test_what_one_is_about_to_load_does_not_leave_for_another() -> None:
    tiers = Tiers(200, SegmentSize(0, 1), 100, disk_bytes=1000)
    first, second = chain(tiers, 2, first=1000), chain(tiers, 2)
    tiers.tend(1000.0)
    tiers.want(first)
    for each in first:
        assert tiers.was_read(each.number, 1e-3, 1000.0)
    tiers.take_jobs()
    tiers.want(second)
    assert tiers.take_jobs() == []
    tiers.tend(1000.0)
    tiers.want(second)
    assert tiers.take_jobs() == [Read(each.number) for each in second]


def test_no_more_than_four_are_read_and_two_written_at_a_time() -> None:
    tiers = Tiers(600, SegmentSize(0, 1), 100, disk_bytes=10_000)
    path = chain(tiers, 6, first=1000)
    chain(tiers, 6)
    tiers.tend(1000.0)
    tiers.want(path)
    assert [type(job) for job in tiers.take_jobs()] == [Read] * 4
    tiers = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=10_000)
    for i in range(4):
        tiers.add("", run_of(tuple(range(1000 * i, 1000 * i + 100))), 0)
    tiers.tend(1000.0)
    assert [type(job) for job in tiers.take_jobs()] == [Write] * 2


def test_a_write_that_failed_is_tried_again_after_a_pause_and_then_what_is_behind_it() -> None:
    tiers = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=1000)
    path = run_of(tuple(range(200)))
    tiers.add("", path[: 4 * 100], 0)
    tiers.add("", path, 100)
    tiers.tend(0.0)
    (write,) = tiers.take_jobs()
    tiers.was_written(write.record.number, 10.0, is_good=False)
    assert tiers.disk.n_bytes == 0
    assert tiers.due_at == 10.0 + PAUSE_SECONDS
    tiers.tend(10.0 + PAUSE_SECONDS - 1)
    assert tiers.take_jobs() == []
    tiers.tend(10.0 + PAUSE_SECONDS)
    (again,) = tiers.take_jobs()
    assert again == write
    tiers.was_written(write.record.number, 50.0, is_good=True)
    tiers.tend(50.0)
    (behind,) = tiers.take_jobs()
    assert (behind.record.front, behind.record.start) == (write.record.number, 100)


def test_what_cannot_be_read_is_left_alone_for_a_while() -> None:
    tiers = Tiers(100, SegmentSize(0, 1), 100, disk_bytes=1000)
    (gone,) = chain(tiers, 1)
    chain(tiers, 1, first=1000)
    path = run_of(tuple(range(100)))
    tiers.want([gone])
    tiers.was_not_read(gone.number, 2000.0)
    tiers.tend(2000.0 + PAUSE_SECONDS - 1)
    assert tiers.stored("", path, 0) == []
    tiers.tend(2000.0 + PAUSE_SECONDS)
    assert [each.segment for each in tiers.stored("", path, 0)] == [gone]


def test_what_there_was_no_memory_for_is_gone_and_nothing_is_stored_for_a_while() -> None:
    tiers = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=1000)
    path = run_of(tuple(range(300)))
    kept, *gone = [tiers.add("", run_of(tuple(range(at + 100))), at) for at in range(0, 300, 100)]
    tiers.tend(1000.0)
    assert [type(job) for job in tiers.take_jobs()] == [Write]
    for each in gone:
        tiers.was_not_saved(each.number)
    tiers.check()
    assert tiers.take_discarded() == []
    assert [each.segment for each in tiers.stored("", path, 0)] == [kept]
    assert not tiers.fits("", path, [(100, 200)])
    tiers.tend(1000.0 + PAUSE_SECONDS)
    assert tiers.fits("", path, [(100, 200)])
    tiers.was_not_saved(kept.number)
    tiers.check()
    assert tiers.take_jobs() == [Erase((kept.number,))]
    assert tiers.stored("", path, 0) == []


def test_nobody_waits_for_ever_for_a_disk_that_does_not_answer() -> None:
    tiers = Tiers(300, SegmentSize(0, 1), 100, disk_bytes=1000)
    first, second = chain(tiers, 2)
    chain(tiers, 3, first=1000)
    path = run_of(tuple(range(200)))
    tiers.tend(1000.0)
    tiers.want([first, second])
    assert tiers.due_at is None, "the step may take longer than that before the disk is asked"
    tiers.reads(1000.0)
    assert tiers.due_at == 1000.0 + SILENT_SECONDS
    assert tiers.was_read(first.number, 1e-3, 1005.0) is first
    assert tiers.due_at == 1005.0 + SILENT_SECONDS
    tiers.tend(1005.0 + SILENT_SECONDS)
    assert tiers.is_silent
    assert tiers.reading == set()
    assert tiers.due_at is None
    tiers.check()
    assert [each.segment for each in tiers.stored("", path, 0)] == [first]
    tiers.was_not_read(second.number, 1100.0)
    assert tiers.is_silent
    assert second.unreadable_until == 1100.0 + PAUSE_SECONDS
    tiers.tend(1100.0 + PAUSE_SECONDS)
    assert not tiers.is_silent
    assert [each.segment for each in tiers.stored("", path, 0)] == [first, second]


def test_a_late_answer_ends_the_silence() -> None:
    for answer in (lambda tiers, n: tiers.was_read(n, 60.0, 1100.0), lambda tiers, n: tiers.was_bad(n, 1100.0)):
        tiers = Tiers(300, SegmentSize(0, 1), 100, disk_bytes=1000)
        (late,) = chain(tiers, 1)
        chain(tiers, 3, first=1000)
        tiers.want([late])
        tiers.reads(1000.0)
        tiers.tend(1000.0 + SILENT_SECONDS)
        assert tiers.is_silent
        assert answer(tiers, late.number) is None
        assert not tiers.is_silent
        assert tiers.reading == set()
        tiers.check()


def test_what_lies_behind_a_bad_file_leaves_the_disk_with_it() -> None:
    tiers = Tiers(100, SegmentSize(0, 1), 100, disk_bytes=1000)
    path = chain(tiers, 3)
    other = chain(tiers, 1, first=1000)
    tiers.take_jobs()
    tiers.was_bad(path[0].number, 1000.0)
    assert list(tiers.disk) == other
    assert tiers.take_jobs() == [Erase((each.number,)) for each in reversed(path)]
    tiers.was_bad(path[1].number, 1000.0)
    assert tiers.n_bad == 1, "one that was erased meanwhile is not bad"


def test_an_open_end_stays_on_disk_until_what_replaces_it_is_there() -> None:
    tiers = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=160)
    path = run_of(tuple(range(80)))
    written(tiers, tuple(range(60)))
    tiers.add("", path, 0)
    tiers.tend(2000.0)
    (write,) = tiers.take_jobs()
    assert isinstance(write, Write)
    assert tiers.disk.n_bytes == 80
    tiers.was_written(write.record.number, 2000.0, is_good=True)
    assert tiers.take_jobs() == [Erase((0,))]


def test_what_was_not_written_in_its_turn_is_when_it_is_used_again() -> None:
    tiers = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=100)
    chain(tiers, 1)
    chain(tiers, 1, first=1000)
    assert [segment.number for segment in tiers.disk] == [1]
    tiers.touch("", run_of(tuple(range(100))))
    tiers.tend(2000.0)
    assert [segment.number for segment in tiers.disk] == [0]


def test_the_use_of_a_path_is_told_by_its_end() -> None:
    tiers = Tiers(1000, SegmentSize(0, 1), 100, disk_bytes=1000)
    chain(tiers, 3)
    tiers.take_jobs()
    tiers.touch("", run_of(tuple(range(250))))
    tiers.touch("", run_of(tuple(range(150))))
    assert tiers.take_jobs() == [Use((2, 1))]
