"""Disk tier: when segments in RAM are written to disk, and when they are read back.

A segment is written after its parent, and evicted from disk only after its children. So the index needs only its
own tokens and the number of its parent, and after a restart every path on disk is complete.

    full segment, or one that others continue   written at once
    partial segment                             after `PARTIAL_DELAY_S`, since the next turn usually replaces it; at
                                                once if much else has come into RAM after it
    checkpoint that `is_worth_storing`          the same: the next turn usually takes a deeper one
    other checkpoints                           never
    segment of a private request                never

The file of a replaced segment is erased only once its replacement is written. When a longer segment replaces the
parent of a checkpoint, the index is changed (`Reparent`).

Segments that a request is about to load are read, a few at a time. If a read is not answered in time, the disk is
unresponsive, and nothing is read until it answers. A failed read is retried after a while. A corrupt segment is
evicted from disk with its descendants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import count, takewhile

from msgspec import structs

from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.base.namespaces import tenant_of
from llamaslot.base.stats import DiskStats
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache import disk_io
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.match import SegmentPart
from llamaslot.kvcache.nodes import Checkpoint, Segment, checkpoints_on
from llamaslot.kvcache.nodes import SegmentEvent as E
from llamaslot.kvcache.nodes import SegmentState as S
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers import pacing
from llamaslot.kvcache.tiers.pacing import ReadRate, ReadWatchdog, WriteBudget
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers

_MAX_WRITES = 2
_MAX_READS = 4
"""Most writes and reads at a time. Few, so that the next segment is chosen as late as possible."""
MAX_DIRTY_FRACTION = 0.25
"""If more than this fraction of RAM is dirty, nothing more is offloaded ahead of eviction."""
_EARLY_WRITE_FRACTION = 0.25
"""A partial segment is written without delay once newer segments fill this fraction of RAM: otherwise LRU may evict
it before its delay ends.
"""


class DiskTier:
    """Chooses which segments of `tiers` are written and read, and when."""

    def __init__(self, tiers: SegmentTiers, tree: RadixTree, settings: CacheSettings) -> None:
        self._tiers = tiers
        self._tree = tree
        self._checkpoint_size = settings.checkpoints.size
        written = settings.disk_written or disk_io.WriteTotals()
        self._budget = WriteBudget(settings.budgets.disk_bytes_per_day, written)
        tiers.counters.disk.total_written_bytes = written.total_bytes
        self._paused_until = 0.0
        self._is_flushing = False
        self._rate = ReadRate()
        self._watchdog = ReadWatchdog()

    # --- lookups ---

    def readable(self, parts: Sequence[SegmentPart]) -> list[SegmentPart]:
        """Return the leading parts that can be loaded, now or after reading them from disk."""
        return list(takewhile(lambda part: self.is_readable(part.segment), parts))

    def is_readable(self, segment: Segment) -> bool:
        """True if a segment can be loaded, now or after reading it from disk."""
        return self._tiers.may_load and (segment.state.is_loadable or self.may_read(segment))

    def may_read(self, segment: Segment) -> bool:
        """True if a segment that is only on disk can be read into RAM, evicting whatever is there if needed."""
        ram = self._tiers.ram_of(segment)
        fits = segment.n_bytes <= ram.capacity and not ram.exceeds_limit(segment.tenant, segment.n_bytes)
        return segment.state is not S.UNREADABLE and not self.is_unresponsive and fits

    @property
    def is_unresponsive(self) -> bool:
        """True if the disk does not answer, so that segments that only it has cannot be loaded."""
        return self._watchdog.is_unresponsive(self._tiers.now)

    def read_us(self, segment: Segment) -> float | None:
        """Microseconds to read a segment, at the speed of the newest reads; None if that is not known.

        For one that is being read it is the time that remains. If that is over, it is expected to take as long
        again as it is late, so that a request does not wait for much longer than computing takes.
        """
        expected, begun = self._rate.seconds, self._watchdog.waiting_since
        if expected is not None:
            expected *= max(segment.n_bytes, pacing.MIN_READ_BYTES)
        # Reads are executed in their order, one at a time, so only the first has begun.
        if begun is not None and segment.state is S.READING and segment is self.reading[0]:
            expected = abs((expected or 0.0) - (self._tiers.now - begun))
        return None if expected is None else 1e6 * expected

    @property
    def reading(self) -> list[Segment]:
        """Segments that are being read."""
        return [segment for segment in self._tiers.busy.values() if segment.state is S.READING]

    @property
    def writing(self) -> list[Segment]:
        """Segments that are being written: they count as on disk but are not there yet."""
        return [segment for segment in self._tiers.busy.values() if segment.state is S.WRITING]

    @property
    def has_backlog(self) -> bool:
        """True if more than `MAX_DIRTY_FRACTION` of RAM is dirty: offloading more would evict dirty segments."""
        waiting = (*self._tiers.dirty.values(), *self.writing)
        n_bytes = sum(each.n_bytes for each in waiting if not each.is_checkpoint)
        return n_bytes > self._tiers.ram.capacity * MAX_DIRTY_FRACTION and not self._is_paused

    @property
    def due_at(self) -> float | None:
        """Time at which a write is due, or to look at a read again; None for never."""
        times = (self._write_due_at, self._watchdog.due_at(self._tiers.now))
        return min((each for each in times if each is not None), default=None)

    @property
    def stats(self) -> DiskStats:
        """Counters, and what is on disk, without segments that are still being written."""
        disk, writing = self._tiers.disk, self.writing
        return structs.replace(
            self._tiers.counters.disk,
            total_bytes=disk.capacity,
            used_bytes=disk.n_bytes - sum(segment.n_bytes for segment in writing),
            tokens=disk.n_tokens - sum(segment.n_tokens for segment in writing),
            segments=len(disk) - len(writing),
        )

    # --- a step ---

    def tick(self, now: float) -> None:
        """Advance the clock: time out reads, allow unreadable segments to be read again, start due writes."""
        was_unresponsive = self.is_unresponsive
        self._tiers.tick(now)
        if self._watchdog.check_timeout(now):
            for segment in self.reading:
                self._tiers.transition(segment, E.READ_TIMED_OUT)
            self._tiers.jobs.append(disk_io.CancelReads())
        for segment in [each for each in self._tiers.unreadable.values() if each.retry_at <= now]:
            self._tiers.transition(segment, E.RETRY)
        # Lookups are stale: what only an unresponsive disk has cannot be loaded.
        self._tree.version += self.is_unresponsive != was_unresponsive
        self._budget.advance(now)
        while len(self.writing) < _MAX_WRITES and not self._is_paused:
            due = next((each for each in self._tiers.dirty.values() if self._due_at(each) <= now), None)
            if due is None:
                return
            if not self._tiers.may_write(due) or not self._write(due):
                self._tiers.transition(due, E.UNQUEUE)

    def flush(self) -> None:
        """Make all writes due at once: the server is shutting down, so no path will grow."""
        self._is_flushing = True

    def prefetch(self, seq: int, parts: Iterable[SegmentPart]) -> None:
        """Pin segments that a sequence is about to load, and start to read those that are only on disk."""
        segments = [part.segment for part in parts]
        self._tiers.load_pins[seq] = frozenset(segments)
        for segment in segments:
            if segment.state.uses_ram:
                continue
            if not self.may_start_read or not self._tiers.free_ram(segment.tenant, segment.n_bytes):
                return
            self.start_read(segment)

    def probe_speed(self, parts: Iterable[SegmentPart]) -> None:
        """Read a segment that a request computes instead, if it is in doubt that the disk is too slow."""
        if self.reading or not self._rate.is_doubtful(self._tiers.now):
            return
        for segment, n_wanted in ((part.segment, part.end - part.start) for part in parts):
            # One that is wanted in part may be computed because too little of it is needed, whatever the speed.
            if n_wanted == segment.n_tokens and not segment.state.uses_ram and self.may_read(segment):
                if self._tiers.free_ram(segment.tenant, segment.n_bytes):
                    self.start_read(segment)
                return

    @property
    def may_start_read(self) -> bool:
        """True if another read may be started now."""
        return len(self.reading) < _MAX_READS

    def start_read(self, segment: Segment) -> None:
        """Start to read a segment; the caller has made room for it in RAM."""
        self._tiers.transition(segment, E.READ)
        self._tiers.jobs.append(disk_io.Read(segment.number))

    # --- results of jobs ---

    def on_io(self, event: disk_io.IoEvent, now: float) -> Segment | None:
        """Handle the result of a job; returns a segment that was read and is still wanted in RAM."""
        self._tree.version += 1
        self._tiers.now = now
        match event:
            case disk_io.ReadStarted():
                self._watchdog.on_read_started(self._tiers.now)
            case disk_io.Written(number, ok):
                self._on_written(self._tiers.busy.get(number), ok=ok)
            case disk_io.ReadDone(number, seconds):
                return self._on_read(number, seconds)
            case disk_io.ReadFailed(number):
                self._on_read_failed(number)
            case disk_io.Corrupt(number):
                self._on_corrupt(number)
        return None

    def _on_written(self, segment: Segment | None, *, ok: bool) -> None:
        """Handle the end of a write. `segment` is None, or no longer WRITING, if it was evicted meanwhile."""
        counters = self._tiers.counters
        counters.disk.failed_writes += not ok
        if segment is None or segment.state is not S.WRITING:
            return
        if not ok:
            self._paused_until = self._tiers.now + pacing.RETRY_DELAY_S
            self._tiers.transition(segment, E.WRITE_FAILED)
            self._tiers.queue_write(segment)
            return
        self._tiers.transition(segment, E.WRITTEN)
        counters.written_tokens += segment.n_tokens
        counters.disk.written_bytes += segment.n_bytes
        counters.disk.total_written_bytes += segment.n_bytes
        checkpoints = tuple(each.number for each in segment.children if each.is_checkpoint and each.state.uses_disk)
        if segment.replaces and checkpoints:
            self._tiers.jobs.append(disk_io.Reparent(checkpoints, segment.number))
        self._tiers.erase_replaced(segment)
        for child in segment.children:
            self._tiers.queue_write(child)
        if isinstance(segment, Checkpoint):
            # Checkpoints above this one may not be worth storing any more.
            for above in checkpoints_on(segment.node)[1:]:
                if above.state.uses_disk and not above.state.is_busy and not above.is_worth_storing:
                    self._tiers.transition(above, E.EVICT_DISK)

    def _on_read(self, number: int, seconds: float) -> Segment | None:
        """Handle a successful read; returns the segment if its bytes are still wanted in RAM."""
        segment = self._tiers.busy.get(number)
        is_wanted = segment is not None and segment.state is S.READING
        if segment is not None and is_wanted:
            self._tiers.transition(segment, E.READ_DONE)
            segment.source = "disk"
            self._tiers.counters.read_tokens += segment.n_tokens
            self._rate.observe(segment.n_bytes, seconds, self._tiers.now)
        self._on_answer()
        return segment if is_wanted else None

    def _on_read_failed(self, number: int) -> None:
        """Handle a read that failed for a reason that may be temporary."""
        segment = self._tiers.disk.get(number)
        if segment is not None and segment.state not in (S.CLEAN, S.WRITING):
            segment.retry_at = self._tiers.now + pacing.RETRY_DELAY_S
            self._tiers.transition(segment, E.READ_FAILED)
        self._on_answer(failed=True)

    def _on_corrupt(self, number: int) -> None:
        """Evict a corrupt segment and its descendants from disk."""
        segment = self._tiers.disk.get(number)
        gone = [segment] if segment is not None else []
        self._tiers.counters.disk.corrupt_files += len(gone)
        for each in gone:
            gone += [child for child in each.children if child.state.uses_disk]
        for each in reversed(gone):
            self._tiers.transition(each, E.EVICT_DISK)
        self._on_answer()

    def _on_answer(self, *, failed: bool = False) -> None:
        self._watchdog.on_answer(self._tiers.now, has_more=bool(self.reading), failed=failed)

    # --- writes ---

    @property
    def _is_paused(self) -> bool:
        """True for `RETRY_DELAY_S` after a write failed, and while the budget is used up."""
        return self._tiers.now < max(self._paused_until, self._budget.opens_at)

    @property
    def _write_due_at(self) -> float | None:
        """Time of the next write; None if there is none, or if `_MAX_WRITES` are in progress."""
        dirty = self._tiers.dirty.values()
        if not dirty or len(self.writing) >= _MAX_WRITES:
            return None
        return max(self._paused_until, self._budget.opens_at, min(map(self._due_at, dirty)))

    def _due_at(self, segment: Segment) -> float:
        waits = segment.is_partial(self._tiers.max_tokens) and not self._is_urgent(segment)
        return segment.offloaded_at + (pacing.PARTIAL_DELAY_S if waits else 0.0)

    def _is_urgent(self, segment: Segment) -> bool:
        """True if a partial segment may otherwise be evicted from RAM before it is written.

        That is so if newer segments fill `_EARLY_WRITE_FRACTION` of RAM, for it or a checkpoint that waits for it.
        A checkpoint is written after the segment that it refers to, and counts against its own budget of RAM.
        """
        taken = [node.checkpoint for node in segment.nodes if node.checkpoint is not None]
        waiting = [each for each in taken if each.state is S.RAM and each.is_worth_storing]
        lrus = ((self._tiers.ram_of(each), each) for each in (segment, *waiting))
        return self._is_flushing or any(
            lru.n_bytes_put - each.ram_put_before > _EARLY_WRITE_FRACTION * lru.capacity for lru, each in lrus
        )

    def _write(self, segment: Segment) -> bool:
        """Start to write a segment; False if a more recently used one would have to be evicted for it.

        If the segment's tenant stays within its share, more recent segments of tenants beyond theirs may be
        evicted.
        """
        disk, shares = self._tiers.disk, self._tiers.shares
        oldest: list[Segment] = []
        reserved: Counter[str] = Counter()
        for tenant, n_bytes in self._tiers.replaced_files.values():
            reserved[tenant] += n_bytes
        if shares.losers(disk, segment.tenant, segment.n_bytes, reserved):
            self._tiers.use_pinned()
        while losers := shares.losers(disk, segment.tenant, segment.n_bytes, reserved):
            found = disk.oldest(lambda each: _may_evict(each, oldest), losers)
            if found is None or (found.rank > segment.rank and segment.tenant in losers):
                return False
            oldest.append(found)
            reserved[found.tenant] -= found.n_bytes
        for each in oldest:
            self._tiers.transition(each, E.EVICT_DISK)
        self._tiers.transition(segment, E.WRITE)
        self._budget.take(segment.n_bytes, self._tiers.now)
        parent, prefix = segment.parent, segment.prefix
        meta = disk_io.SegmentMeta(
            number=segment.number,
            parent=parent.number if parent is not None else None,
            namespace=segment.namespace,
            start=segment.start,
            tokens=prefix[segment.start * WIDTH :],
            n_bytes=segment.n_bytes,
            path_digest=disk_io.path_digest(segment.namespace, prefix),
        )
        self._tiers.jobs.append(disk_io.Write(meta, self._budget.n_used))
        return True

    # --- start ---

    def adopt(self, found: Sequence[disk_io.SegmentMeta], first_number: int) -> list[int]:
        """Add the segments on disk, the least recently used first; new ones are numbered from `first_number` on.

        Segments that do not fit into the budget, or whose metadata is not plausible, are erased. The first ones of
        the path that was used last are read at once: so the speed of the disk is known before a request depends on
        it. Returns the numbers of those too large for RAM and of their descendants, which stay on disk but are not
        added.
        """
        self._tiers.numbers, self._tiers.n_uses = count(first_number), len(found)
        disk = self._tiers.disk
        uses = {meta.number: i for i, meta in enumerate(found, 1)}
        too_large: set[int] = set()
        for meta in sorted(found, key=lambda meta: (meta.start, -len(meta.tokens))):
            ram = self._tiers.ram if meta.tokens else self._tiers.checkpoints
            if meta.n_bytes > ram.capacity or meta.parent in too_large:
                too_large.add(meta.number)
                continue
            parent = disk.get(meta.parent) if meta.parent is not None else None
            segment = self._segment_of(meta, parent)
            if segment is None:
                self._tiers.jobs.append(disk_io.Erase((meta.number,)))
                continue
            segment.last_used = uses[meta.number]
            disk.put(segment)
        for segment in sorted(disk, key=lambda segment: -segment.start):
            if segment.parent is not None:
                segment.parent.last_used = max(segment.parent.last_used, segment.last_used)
        shares = self._tiers.shares
        for tenant in (*disk.used, ""):
            while losers := shares.losers(disk, tenant, 0):
                oldest = disk.oldest(_may_evict, losers)
                assert oldest is not None
                self._tiers.transition(oldest, E.EVICT_DISK)
        segments = (each for each in disk if not each.is_checkpoint and self.may_read(each))
        for latest in nsmallest(pacing.N_TRUSTED_READS, segments, key=lambda each: (-each.last_used, each.start)):
            if self._tiers.free_ram(latest.tenant, latest.n_bytes):
                self.start_read(latest)
        return sorted(too_large)

    def _segment_of(self, meta: disk_io.SegmentMeta, parent: Segment | None) -> Segment | None:
        """Add a segment or checkpoint on disk to the tree; None if its metadata is not plausible."""
        tokens = verified_path(meta, parent, self._tiers.size, self._checkpoint_size)
        if tokens is None:
            return None
        if not meta.tokens:
            node = self._tree.insert(meta.namespace, tokens)
            if node.checkpoint is not None:
                return None
            node.checkpoint = Checkpoint(meta.number, node, meta.n_bytes, state=S.DISK)
            return node.checkpoint
        match = self._tree.match(meta.namespace, tokens)
        if any(part.start <= meta.start < part.end for part in match.parts):
            return None
        tenant = tenant_of(meta.namespace)
        segment = Segment(meta.number, meta.start, len(tokens) // WIDTH, meta.n_bytes, tenant=tenant, state=S.DISK)
        self._tree.attach(segment, self._tree.insert(meta.namespace, tokens))
        return segment


def verified_path(
    meta: disk_io.SegmentMeta, parent: Segment | None, size: SegmentSize, checkpoint_size: CheckpointSize
) -> bytes | None:
    """Return all tokens up to the end of a segment or checkpoint that continues `parent`; None if not plausible."""
    n_tokens, odd = divmod(len(meta.tokens), WIDTH)
    sizes = (size.of(n_tokens),) if meta.tokens else checkpoint_size.all_of(meta.start)
    if odd or meta.n_bytes not in sizes:
        return None
    tokens = meta.tokens
    if parent is not None:
        if parent.number != meta.parent or not parent.start < meta.start <= parent.end:
            return None
        tokens = parent.prefix[: meta.start * WIDTH] + tokens
    if not tokens or len(tokens) != (meta.start + n_tokens) * WIDTH:
        return None
    return tokens if meta.path_digest == disk_io.path_digest(meta.namespace, tokens) else None


def _may_evict(segment: Segment, gone: Sequence[Segment] = ()) -> bool:
    """True if a segment may be evicted from disk once those in `gone` have been."""
    if segment.state.is_busy or segment in gone:
        return False
    return all(child in gone for child in segment.children if child.state.uses_disk or child.replaces)
