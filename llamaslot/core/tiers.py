"""Where segments are, in RAM or on disk, and which of them go when there is no more room.

    in RAM   on disk    what it means                          can be loaded
    yes      no         stored, not written yet, or never      now
    yes      writing    its file is being written              now
    yes      yes        both                                   now
    reading  yes        RAM is kept for its bytes              once they are there
    no       yes        its file alone                         once it is read: `want`
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

from collections.abc import Iterable, Sequence

import numpy as np

from llamaslot.base.model import SegmentSize
from llamaslot.core.disk import Erase, Job, Read, Record, Use, Write, path_digest
from llamaslot.core.node import WIDTH
from llamaslot.core.segments import LARGEST, Segment, SegmentTree, Stored
from llamaslot.core.spaces import is_private
from llamaslot.core.tier import Tier

OPEN_SECONDS = 2.0
"""How long the last segment of a path lies before it is written."""
PAUSE_SECONDS = 30.0
"""How long nothing is written after a write failed, and a segment not read that could not be."""
_WEIGHT = 0.2
"""Share of the newest reading in the mean."""
_MOST_WRITES = 2
"""Segments to write at a time: what waits for more is chosen as late as may be."""


class Tiers:
    """All segments, each of at most `largest` tokens, in `ram_bytes` and `disk_bytes`.

    What is stored is in RAM first, so without RAM nothing is. Times are seconds on the caller's clock, see `tend`.
    """

    def __init__(
        self, ram_bytes: int, size: SegmentSize, largest: int = LARGEST, *, disk_bytes: int = 0, first: int = 0
    ) -> None:
        """`first` is the number of the first segment that is made."""
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
        self._clock = 0
        self._n_made = first
        self._to_write: dict[Segment, None] = {}
        """In the order in which they were stored; what is in front of them was on disk then."""
        self._is_ending = False
        self._writes_again_at = 0.0
        self._read_us = 0.0
        self._read_at = 0.0
        self._discarded: list[int] = []
        self._used: dict[int, None] = {}
        """Those on disk at the ends of the paths that were used, in that order."""
        self._jobs: list[Job] = []

    # --- reading ---

    def stored(self, space: str, tokens: bytes, start: int) -> list[Stored]:
        """What can be loaded of `tokens` from `start` on, now or once it is read, without a gap."""
        found = self.tree.stored(space, tokens, start)
        n = next((i for i, each in enumerate(found) if each.segment.unreadable_until > self._now), len(found))
        return found[:n]

    def missing(self, space: str, tokens: bytes, start: int) -> list[tuple[int, int]]:
        """See `SegmentTree.missing`."""
        return self.tree.missing(space, tokens, start)

    def is_at_hand(self, segment: Segment) -> bool:
        """Whether its bytes are in RAM."""
        return segment in self.ram and segment not in self.reading

    def fits(self, space: str, tokens: bytes, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether RAM has room for these ranges of `tokens`, if all went that may."""
        path = set(self.tree.path(space, tokens))
        replaced = {s for s in path if any(start <= s.start and s.end <= end for start, end in ranges)}
        stuck = (path | self.reading | self.writing | self.guarded) - replaced
        kept = [s for s in stuck if s in self.ram and not (self._may_leave_ram(s) and s in self.disk)]
        n_bytes = sum(segment.n_bytes for segment in kept)
        return n_bytes + sum(self._size.of(end - start) for start, end in ranges) <= self.ram.capacity

    @property
    def read_us(self) -> float:
        """Microseconds in which the disk reads a token, by what was read of late; 0 where nothing was."""
        return self._read_us if self._now < self._read_at + PAUSE_SECONDS else 0.0

    @property
    def due_at(self) -> float | None:
        """When something is to be written, if nothing happens before; None if nothing is."""
        if not self._to_write or len(self.writing) >= _MOST_WRITES:
            return None
        return max(self._writes_again_at, min(map(self._written_at, self._to_write)))

    # --- changing ---

    def tend(self, now: float) -> None:
        """Let it be so late: nobody is about to load anything, and what has lain for long enough is written."""
        self._now = now
        self.guarded.clear()
        if now < self._writes_again_at:
            return
        for segment in list(self._to_write):
            if len(self.writing) >= _MOST_WRITES:
                return
            if self._written_at(segment) <= now:
                del self._to_write[segment]
                if self._can_be_written(segment):
                    self._write(segment)

    def end(self) -> None:
        """Write what is open at once from now on: no path goes on any more."""
        self._is_ending = True

    def add(self, space: str, tokens: bytes, start: int) -> Segment:
        """A new segment for the tokens from `start` to their end, which must fit.

        It takes the place of segments within that range; others leave RAM for it, but none in front of it that is
        not on disk.
        """
        end = len(tokens) // WIDTH
        if not self.fits(space, tokens, [(start, end)]):
            raise AssertionError(f"there is no room for [{start}, {end})")
        segment = Segment(self._n_made, start, end, self._size.of(end - start), self._now)
        self._n_made += 1
        for each in self.tree.attach(segment, space, tokens):
            self._replace(each, segment)
        self.touch(space, tokens)
        path = set(self.tree.path(space, tokens))
        while not self.ram.has_room(segment.n_bytes):
            oldest = self.ram.oldest(lambda s: self._may_leave_ram(s) and (s not in path or s in self.disk))
            assert oldest is not None
            self._leave_ram(oldest)
        self.ram.put(segment)
        self._queue(segment)
        return segment

    def touch(self, space: str, tokens: bytes) -> None:
        """Note that a path is used now."""
        self._clock += 1
        path = self.tree.path(space, tokens)
        for segment in path:
            segment.clock = self._clock
        last = next((segment for segment in reversed(path) if segment in self.disk), None)
        if last is not None:
            self._used[last.id] = self._used.pop(last.id, None)

    def want(self, segments: Sequence[Segment]) -> None:
        """Somebody is about to load these, one after another: those that are not in RAM are read, as far as there
        is room beside what was wanted before.
        """
        self.guarded.update(segments)
        for segment in segments:
            if segment in self.ram:
                continue
            while not self.ram.has_room(segment.n_bytes):
                oldest = self.ram.oldest(self._may_leave_ram)
                if oldest is None:
                    return
                self._leave_ram(oldest)
            self.ram.put(segment)
            self.reading.add(segment)
            self._jobs.append(Read(segment.id))

    def forget(self, space: str) -> None:
        """Discard what is stored in a namespace."""
        for segment in self.tree.of_space(space):
            if segment in self.disk:
                self._leave_disk(segment)
            if segment in self.ram:
                self._leave_ram(segment)

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
                assert front is None or front.use > segment.use, "a segment would go before one behind it"
        for segment in self.disk:
            front = segment.front
            assert not is_private(segment.space)
            is_reached = front is not None and front in self.disk and front not in self.writing
            assert segment.start == 0 or is_reached, "it hangs in the air"
        assert all(segment in self.ram and segment in self.disk for segment in self.reading | self.writing)
        assert not self.reading & self.writing
        assert all(segment in self.ram and segment not in self.disk for segment in self._to_write)

    # --- what the disk answers ---

    def was_read(self, number: int, seconds: float) -> Segment | None:
        """The bytes for a `Read` are there: the segment, if they are still wanted."""
        segment = self.ram.get(number)
        if segment is None or segment not in self.reading:
            return None
        self.reading.remove(segment)
        self.n_read += segment.n_tokens
        us = 1e6 * seconds / segment.n_tokens
        self._read_us = self.read_us + _WEIGHT * (us - self.read_us) if self.read_us else us
        self._read_at = self._now
        segment.is_fresh = True
        return segment

    def was_not_read(self, number: int) -> None:
        """There are no bytes for a `Read` now: nor is what is stored behind them loaded for a while."""
        segment = self.ram.get(number)
        if segment is not None and segment in self.reading:
            self.reading.remove(segment)
            self.ram.drop(segment)
            segment.unreadable_until = self._now + PAUSE_SECONDS

    def was_bad(self, number: int) -> None:
        """A file was not as it was written: what is on disk behind it leaves with it."""
        self.n_bad += 1
        segment = self.disk.get(number)
        gone = [segment] if segment is not None else []
        for each in gone:
            gone += [behind for behind in each.behind() if behind in self.disk]
        for each in reversed(gone):
            self._leave_disk(each)

    def was_written(self, number: int, *, is_good: bool) -> None:
        """The answer to a `Write`."""
        segment = self.disk.get(number)
        if segment is None or segment not in self.writing:
            return
        self.writing.remove(segment)
        if not is_good:
            self.disk.drop(segment)
            self._writes_again_at = self._now + PAUSE_SECONDS
            self._queue(segment)
            return
        self.n_written += segment.n_tokens
        self._erase_replaced(segment)
        for each in segment.behind():
            self._queue(each)

    def restore(self, records: Iterable[Record]) -> None:
        """Take in what is on disk, the least recently used first; what fits nowhere is erased."""
        clocks = {record.number: i for i, record in enumerate(records, 1)}
        self._clock = max(self._clock, len(clocks))
        for record in sorted(records, key=lambda r: (r.start, -len(r.tokens))):
            if not self._restore(record, clocks[record.number]):
                self._jobs.append(Erase((record.number,)))
        for segment in sorted(self.disk, key=lambda s: -s.start):
            if segment.front is not None:
                segment.front.clock = max(segment.front.clock, segment.clock)
        while self.disk.n_bytes > self.disk.capacity:
            oldest = self.disk.oldest(self._may_leave_disk)
            assert oldest is not None
            self._leave_disk(oldest)

    def _restore(self, record: Record, clock: int) -> bool:
        """Take in one record; whether it fits behind what is there."""
        n_tokens, odd = divmod(len(record.tokens), WIDTH)
        if odd or not n_tokens or record.n_bytes != self._size.of(n_tokens) or record.n_bytes > self.ram.capacity:
            return False
        tokens = record.tokens
        if record.front is not None:
            front = self.disk.get(record.front)
            if front is None or front.space != record.space or not front.start < record.start <= front.end:
                return False
            tokens = front.tokens[: record.start * WIDTH] + tokens
        elif record.start != 0:
            return False
        if record.order and not _is_permutation(record.order, n_tokens):
            return False
        if record.path != path_digest(record.space, tokens) or self.tree.stored(record.space, tokens, record.start):
            return False
        segment = Segment(record.number, record.start, record.start + n_tokens, record.n_bytes)
        segment.clock = clock
        segment.order = record.order
        self.tree.attach(segment, record.space, tokens)
        self.disk.put(segment)
        return True

    # --- leaving ---

    def _may_leave_ram(self, segment: Segment) -> bool:
        return not (segment in self.reading or segment in self.writing or segment in self.guarded)

    def _may_leave_disk(self, segment: Segment) -> bool:
        if segment in self.reading or segment in self.writing:
            return False
        return not any(each in self.disk for each in segment.behind())

    def _leave_ram(self, segment: Segment) -> None:
        self.ram.drop(segment)
        if segment in self.reading:
            self.reading.remove(segment)
        else:
            self._discarded.append(segment.id)
        self._to_write.pop(segment, None)
        if segment not in self.disk:
            self._remove(segment)

    def _leave_disk(self, segment: Segment) -> None:
        self.disk.drop(segment)
        self.writing.discard(segment)
        self._jobs.append(Erase((segment.id,)))
        if segment in self.reading:
            self._leave_ram(segment)
        elif segment not in self.ram:
            self._remove(segment)

    def _replace(self, old: Segment, new: Segment) -> None:
        """`new` has taken the place of `old`, whose file stays until that of `new` is there."""
        new.replaces += old.replaces
        old.replaces = []
        if old in self.disk:
            new.replaces.append(old.id)
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
            segment.replaces = []

    # --- writing ---

    def _queue(self, segment: Segment) -> None:
        """Have a segment written, if it is not and what is in front of it is."""
        if self._can_be_written(segment):
            self._to_write[segment] = None

    def _can_be_written(self, segment: Segment) -> bool:
        if not self.disk.capacity or segment in self.disk or is_private(segment.space):
            return False
        front = segment.front
        return segment.start == 0 or (front is not None and front in self.disk and front not in self.writing)

    def _written_at(self, segment: Segment) -> float:
        is_lying = self.tree.is_open(segment) and not self._is_ending
        return segment.stored_at + (OPEN_SECONDS if is_lying else 0.0)

    def _write(self, segment: Segment) -> None:
        """Start to write a segment, unless only what was used after it could make room."""
        while not self.disk.has_room(segment.n_bytes):
            oldest = self.disk.oldest(self._may_leave_disk)
            if oldest is None or oldest.use > segment.use:
                return
            self._leave_disk(oldest)
        self.disk.put(segment)
        self.writing.add(segment)
        front, tokens = segment.front, segment.tokens
        record = Record(
            number=segment.id,
            front=front.id if front is not None else None,
            space=segment.space,
            start=segment.start,
            tokens=tokens[segment.start * WIDTH :],
            n_bytes=segment.n_bytes,
            path=path_digest(segment.space, tokens),
        )
        self._jobs.append(Write(record))


def _is_permutation(order: bytes, n: int) -> bool:
    return len(order) == 2 * n and sorted(np.frombuffer(order, "<i2").tolist()) == list(range(n))
