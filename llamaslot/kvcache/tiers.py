"""Where segments are, in RAM or on disk, and which of them go when there is no more room.

    in RAM   on disk    what it means                          can be loaded
    yes      no         stored, not written yet, or never      now
    yes      writing    its file is being written              now
    yes      yes        both                                   now
    reading  yes        RAM is kept for its bytes              once they are there
    no       yes        its file alone                         once it is read, unless the disk is silent
    no       no         gone: it is not in the tree            -

In each tier the least recently used segment goes first. A path is always used from its end to its start, so no
segment goes before those behind it.

A segment is written once what is in front of it is on disk, and leaves the disk when nothing behind it is there any
more: so its own tokens and the one in front of it are all that a disk needs to know, and after a restart nothing
there hangs in the air. The last segment of a path is replaced by a longer one as a conversation goes on, so it is
written only when it has lain for a while, and what it replaced is erased only then.

Nothing here knows of cells, of sequences or of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from llamaslot.base.model import SegmentSize
from llamaslot.base.namespaces import is_private
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.disk import Erase, Job, Read, Record, Use, Write, path_digest, path_of
from llamaslot.kvcache.pace import PAUSE_SECONDS, ReadRate, ReadWatch, WriteQueue
from llamaslot.kvcache.segments import LARGEST, Segment, SegmentTree, Stored
from llamaslot.kvcache.tier import Tier

_MOST_WRITES = 2
_MOST_READS = 4
"""Segments to write, and to read, at a time: what comes next is chosen as late as may be."""
_LAG = 4
"""The part of RAM, as one of so many, that may wait to be written before no more is stored ahead of need."""


class Tiers:
    """All segments, each of at most `largest` tokens, in `ram_bytes` and `disk_bytes`.

    What is stored is in RAM first, so without RAM nothing is. Times are seconds on the caller's clock, see `tend`.
    """

    def __init__(self, ram_bytes: int, size: SegmentSize, largest: int = LARGEST, *, disk_bytes: int = 0) -> None:
        self.tree = SegmentTree(largest)
        self.ram = Tier(ram_bytes)
        self.disk = Tier(disk_bytes if ram_bytes else 0)
        self.reading: set[Segment] = set()
        """Those in RAM whose bytes are not there yet."""
        self.writing: set[Segment] = set()
        """Those on disk whose file is not there yet."""
        self.guarded: set[Segment] = set()
        """Those that a request is about to load: they stay in RAM."""
        self.n_read = 0
        """Tokens read from disk so far."""
        self.n_written = 0
        """Tokens written there so far."""
        self.n_bad = 0
        """Files so far that were not as they were written."""
        self._size = size
        self._now = 0.0
        self._stores_again_at = 0.0
        self._n_uses = 0
        self._replaced: dict[int, int] = {}
        """Bytes of the files that stay until what replaces them is there, by number."""
        self._next_number = 0
        self._to_write = WriteQueue(self.tree.is_open)
        """What is in front of them was on disk when they came."""
        self._read_rate = ReadRate()
        self._read_watch = ReadWatch()
        self._discarded: list[int] = []
        self._used: dict[int, None] = {}
        """Those on disk at the ends of the paths that were used, in that order."""
        self._jobs: list[Job] = []

    # --- reading ---

    def stored(self, space: str, tokens: bytes, start: int) -> list[Stored]:
        """What can be loaded of `tokens` from `start` on, now or once it is read, without a gap."""
        found = self.tree.stored(space, tokens, start)
        n = next((i for i, each in enumerate(found) if not self._can_be_loaded(each.segment)), len(found))
        return found[:n]

    def _can_be_loaded(self, segment: Segment) -> bool:
        is_reachable = self.is_at_hand(segment) or not self.is_silent
        return is_reachable and segment.unreadable_until <= self._now

    def missing(self, space: str, tokens: bytes, start: int) -> list[tuple[int, int]]:
        """See `SegmentTree.missing`."""
        return self.tree.missing(space, tokens, start)

    def is_at_hand(self, segment: Segment) -> bool:
        """Whether its bytes are in RAM."""
        return segment in self.ram and segment not in self.reading

    def fits(self, space: str, tokens: bytes, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether these ranges of `tokens` can be stored: RAM has room if all went that may, and memory was not
        short of late.
        """
        if self._now < self._stores_again_at:
            return False
        path = set(self.tree.path(space, tokens))
        replaced = {s for s in path if any(start <= s.start and s.end <= end for start, end in ranges)}
        stuck = (path | self.reading | self.writing | self.guarded) - replaced
        kept = [s for s in stuck if s in self.ram and not (self._may_leave_ram(s) and s in self.disk)]
        n_bytes = sum(segment.n_bytes for segment in kept)
        return n_bytes + sum(self._size.of(end - start) for start, end in ranges) <= self.ram.capacity

    @property
    def read_us(self) -> float | None:
        """See `ReadRate.us`."""
        return self._read_rate.us(self._now)

    @property
    def due_at(self) -> float | None:
        """When something is to be written, or the disk falls silent, if nothing happens before; None for never."""
        writes_at = self._to_write.due_at if len(self.writing) < _MOST_WRITES else None
        return min((each for each in (writes_at, self._read_watch.due_at) if each is not None), default=None)

    @property
    def is_silent(self) -> bool:
        """Whether the disk does not answer: what it alone has cannot be loaded until it does."""
        return self._read_watch.is_silent(self._now)

    @property
    def lags(self) -> bool:
        """Whether so much is to be written by and by that more would push it out of RAM."""
        n_bytes = sum(segment.n_bytes for segment in (*self._to_write, *self.writing))
        return n_bytes > self.ram.capacity // _LAG and not self._to_write.is_paused(self._now)

    # --- changing ---

    def tend(self, now: float) -> None:
        """Begin a plan at this time: nobody is about to load anything yet, nobody waits longer for a silent disk,
        and what has lain for long enough is written.
        """
        self._now = now
        self.guarded.clear()
        if self._read_watch.falls_silent(now):
            while self.reading:
                self.ram.drop(self.reading.pop())
        while len(self.writing) < _MOST_WRITES and (segment := self._to_write.take(now)) is not None:
            if self._can_be_written(segment):
                self._write(segment)

    def end(self) -> None:
        """Let nothing lie any more before it is written."""
        self._to_write.end()

    def add(self, space: str, tokens: bytes, start: int) -> Segment:
        """A new segment for the tokens from `start` to their end, which must fit.

        It takes the place of segments within that range; others leave RAM for it, but none in front of it that is
        not on disk.
        """
        end = len(tokens) // WIDTH
        if not self.fits(space, tokens, [(start, end)]):
            raise AssertionError(f"there is no room for [{start}, {end})")
        segment = Segment(self._next_number, start, end, self._size.of(end - start), self._now)
        self._next_number += 1
        for each in self.tree.attach(segment, space, tokens):
            self._replace(each, segment)
        self.touch(space, tokens)
        path = set(self.tree.path(space, tokens))
        if not self._make_room_in_ram(segment.n_bytes, path):
            raise AssertionError("there was room")
        self.ram.put(segment)
        self._queue(segment)
        return segment

    def was_not_saved(self, number: int) -> None:
        """There was no memory for a segment of the last plan: it is gone, with what it took the place of, and
        nothing is stored for a while.

        What lies behind it stays, and is found again once the gap is filled. A number that RAM does not have is one
        of a slot that was to be saved.
        """
        self._stores_again_at = self._now + PAUSE_SECONDS
        segment = self.ram.get(number)
        if segment is None:
            return
        if segment in self.disk:
            self._leave_disk(segment)
        self._leave_ram(segment)
        self._discarded.remove(number)

    def touch(self, space: str, tokens: bytes) -> None:
        """Note that a path is used now."""
        self._n_uses += 1
        path = self.tree.path(space, tokens)
        for segment in path:
            segment.last_used = self._n_uses
        unwritten = next((segment for segment in path if segment not in self.disk), None)
        if unwritten is not None and unwritten in self.ram:
            self._queue(unwritten)
        last = next((segment for segment in reversed(path) if segment in self.disk), None)
        if last is not None:
            self._used[last.number] = self._used.pop(last.number, None)

    def want(self, segments: Sequence[Segment]) -> None:
        """Somebody is about to load these, one after another: the first that are not in RAM are read, as far as
        there is room beside what was wanted before.
        """
        self.guarded.update(segments)
        for segment in segments:
            if segment in self.ram:
                continue
            if len(self.reading) >= _MOST_READS or not self._make_room_in_ram(segment.n_bytes):
                return
            self.ram.put(segment)
            self.reading.add(segment)
            self._jobs.append(Read(segment.number))

    def give_up(self, space: str, tokens: bytes, fork: int) -> tuple[int, int]:
        """Discard the segments on the path of some tokens that lie behind a position where something else goes on;
        the tokens that RAM and disk have no more.
        """
        before = self.ram.n_tokens, self.disk.n_tokens
        for segment in reversed(self.tree.path(space, tokens)):
            if segment.start < fork:
                break
            self._discard(segment)
        return before[0] - self.ram.n_tokens, before[1] - self.disk.n_tokens

    def forget(self, space: str) -> None:
        """Discard what is stored in a namespace."""
        for segment in reversed(self.tree.of_space(space)):
            self._discard(segment)

    def clear(self) -> None:
        """Discard everything."""
        for space in self.tree.spaces:
            self.forget(space)

    def take_discarded(self) -> list[int]:
        """The numbers of the segments whose bytes left RAM since the last call."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def take_jobs(self) -> list[Job]:
        """What the disk has to do since the last call."""
        jobs, self._jobs = self._jobs, []
        if self._used:
            jobs.append(Use(tuple(self._used)))
            self._used.clear()
        return jobs

    def check(self) -> None:
        """Prove what must always hold; raises `AssertionError`. Takes time in proportion to all segments."""
        assert self.tree.check() == {segment for tier in (self.ram, self.disk) for segment in tier}
        for tier in (self.ram, self.disk):
            assert tier.n_bytes == sum(segment.n_bytes for segment in tier) <= tier.capacity
            assert tier.n_tokens == sum(segment.n_tokens for segment in tier)
            for segment in tier:
                front = segment.front
                assert front is None or front.rank > segment.rank, "a segment would go before one behind it"
        for segment in self.disk:
            front = segment.front
            assert not is_private(segment.space)
            is_reached = front is not None and front in self.disk and front not in self.writing
            assert segment.start == 0 or is_reached, "it hangs in the air"
        assert all(segment in self.ram and segment in self.disk for segment in self.reading | self.writing)
        assert not self.reading & self.writing
        assert all(segment in self.ram and segment not in self.disk for segment in self._to_write)

    # --- what the disk answers ---

    def reads(self, now: float) -> None:
        """The disk begins with a `Read`."""
        self._now = now
        self._read_watch.asked(now)

    def was_read(self, number: int, seconds: float, now: float) -> Segment | None:
        """The bytes for a `Read` are there, after so long: the segment, if they are still wanted."""
        segment = self._answered(number, now)
        if segment is None:
            return None
        self.n_read += segment.n_tokens
        self._read_rate.note(segment.n_tokens, seconds, self._now)
        segment.is_fresh = True
        return segment

    def was_not_read(self, number: int, now: float) -> None:
        """There are no bytes for a `Read` now: nor is what is stored behind them loaded for a while."""
        segment = self._answered(number, now, failed=True)
        if segment is not None:
            self.ram.drop(segment)
        known = self.disk.get(number)
        if known is not None:
            known.unreadable_until = now + PAUSE_SECONDS

    def was_bad(self, number: int, now: float) -> None:
        """A file was not as it was written: what is on disk behind it leaves with it."""
        self._now = now
        segment = self.disk.get(number)
        gone = [segment] if segment is not None else []
        self.n_bad += segment is not None
        for each in gone:
            gone += [behind for behind in each.behind() if behind in self.disk]
        for each in reversed(gone):
            self._leave_disk(each)
        self._read_watch.answered(now, waits=bool(self.reading))

    def _answered(self, number: int, now: float, *, failed: bool = False) -> Segment | None:
        """The segment of this number, which is not being read any more; None if it was not."""
        self._now = now
        segment = next((each for each in self.reading if each.number == number), None)
        if segment is not None:
            self.reading.remove(segment)
        self._read_watch.answered(now, waits=bool(self.reading), failed=failed)
        return segment

    def was_written(self, number: int, now: float, *, is_good: bool) -> None:
        """The answer to a `Write`."""
        self._now = now
        segment = self.disk.get(number)
        if segment is None or segment not in self.writing:
            return
        self.writing.remove(segment)
        if not is_good:
            self.disk.drop(segment)
            self._to_write.pause(self._now)
            self._queue(segment)
            return
        self.n_written += segment.n_tokens
        self._erase_replaced(segment)
        for each in segment.behind():
            self._queue(each)

    def restore(self, records: Sequence[Record], first_number: int) -> list[int]:
        """Take in what is on disk, the least recently used first; new segments have numbers from `first_number` on.

        What fits nowhere is erased. Returns the numbers of what is too large for RAM, or behind that: it stays, and
        is not known.
        """
        self._next_number = first_number
        uses = {record.number: i for i, record in enumerate(records, 1)}
        self._n_uses = len(uses)
        left: set[int] = set()
        for record in sorted(records, key=lambda record: (record.start, -len(record.tokens))):
            if record.n_bytes > self.ram.capacity or record.front in left:
                left.add(record.number)
                continue
            front = self.disk.get(record.front) if record.front is not None else None
            tokens = path_of(record, front, self._size)
            if tokens is None or self.tree.stored(record.space, tokens, record.start):
                self._jobs.append(Erase((record.number,)))
                continue
            segment = Segment(record.number, record.start, len(tokens) // WIDTH, record.n_bytes)
            segment.last_used = uses[record.number]
            segment.cell_order = record.cell_order
            self.tree.attach(segment, record.space, tokens)
            self.disk.put(segment)
        for segment in sorted(self.disk, key=lambda segment: -segment.start):
            if segment.front is not None:
                segment.front.last_used = max(segment.front.last_used, segment.last_used)
        while self.disk.n_bytes > self.disk.capacity:
            oldest = self.disk.oldest(self._may_leave_disk)
            assert oldest is not None
            self._leave_disk(oldest)
        return sorted(left)

    # --- leaving ---

    def _discard(self, segment: Segment) -> None:
        if segment in self.disk:
            self._leave_disk(segment)
        if segment in self.ram:
            self._leave_ram(segment)

    def _may_leave_ram(self, segment: Segment) -> bool:
        return not (segment in self.reading or segment in self.writing or segment in self.guarded)

    def _make_room_in_ram(self, n_bytes: int, path: Container[Segment] = ()) -> bool:
        """Let segments leave RAM, but none of `path` that is nowhere else; whether there is room then."""
        while not self.ram.has_room(n_bytes):
            oldest = self.ram.oldest(lambda s: self._may_leave_ram(s) and (s not in path or s in self.disk))
            if oldest is None:
                return False
            self._leave_ram(oldest)
        return True

    def _may_leave_disk(self, segment: Segment, gone: Sequence[Segment] = ()) -> bool:
        """Whether it may, once those that are `gone` have."""
        if segment in self.reading or segment in self.writing or segment in gone:
            return False
        return all(each in gone for each in segment.behind() if each in self.disk or each.replaces)

    def _leave_ram(self, segment: Segment) -> None:
        self.ram.drop(segment)
        if segment in self.reading:
            self.reading.remove(segment)
        else:
            self._discarded.append(segment.number)
        self._to_write.drop(segment)
        if segment not in self.disk:
            self._remove(segment)

    def _leave_disk(self, segment: Segment) -> None:
        self.disk.drop(segment)
        self.writing.discard(segment)
        self._jobs.append(Erase((segment.number,)))
        if segment in self.reading:
            self._leave_ram(segment)
        elif segment not in self.ram:
            self._remove(segment)

    def _replace(self, old: Segment, new: Segment) -> None:
        """`new` has taken the place of `old`, whose file stays until that of `new` is there."""
        new.replaces += old.replaces
        old.replaces = []
        if old in self.disk:
            new.replaces.append(old.number)
            self._replaced[old.number] = old.n_bytes
            self.disk.drop(old)
            self.writing.discard(old)
        if old in self.ram:
            self._leave_ram(old)

    def _remove(self, segment: Segment) -> None:
        """Take a segment out of the tree that is in no tier any more."""
        self._erase_replaced(segment)
        self.tree.detach(segment)

    def _erase_replaced(self, segment: Segment) -> None:
        if segment.replaces:
            self._jobs.append(Erase(tuple(segment.replaces)))
            for number in segment.replaces:
                del self._replaced[number]
            segment.replaces = []

    # --- writing ---

    def _queue(self, segment: Segment) -> None:
        """Have a segment written, if it is not and what is in front of it is."""
        if self._can_be_written(segment):
            self._to_write.put(segment)

    def _can_be_written(self, segment: Segment) -> bool:
        if not self.disk.capacity or segment in self.disk or is_private(segment.space):
            return False
        front = segment.front
        return segment.start == 0 or (front is not None and front in self.disk and front not in self.writing)

    def _write(self, segment: Segment) -> None:
        """Start to write a segment, unless only what was used after it could make room."""
        oldest: list[Segment] = []
        n_missing = self.disk.n_bytes + sum(self._replaced.values()) + segment.n_bytes - self.disk.capacity
        while n_missing > 0:
            found = self.disk.oldest(lambda each: self._may_leave_disk(each, oldest))
            if found is None or found.rank > segment.rank:
                return
            oldest.append(found)
            n_missing -= found.n_bytes
        for each in oldest:
            self._leave_disk(each)
        self.disk.put(segment)
        self.writing.add(segment)
        front, tokens = segment.front, segment.tokens
        record = Record(
            number=segment.number,
            front=front.number if front is not None else None,
            space=segment.space,
            start=segment.start,
            tokens=tokens[segment.start * WIDTH :],
            n_bytes=segment.n_bytes,
            path_digest=path_digest(segment.space, tokens),
        )
        self._jobs.append(Write(record))
