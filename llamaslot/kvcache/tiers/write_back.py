"""Write-back of dirty segments to disk.

A segment is written after its parent, and evicted from disk only after its children. So the index needs only its
own tokens and the number of its parent, and after a restart every path on disk is complete. The last segment of a
path is usually replaced by a longer one as the conversation goes on. So it is written only after a delay, or when
much else has come into RAM, and the file that it replaces is erased only once it is written itself.

Only checkpoints from which other prompts are likely to continue are written (`is_worth_storing`). The index has the
parent of each; when a longer segment replaces the parent, that entry is changed (`Reparent`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamaslot.base.namespaces import is_private
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.segment import Checkpoint, Segment, checkpoints_on
from llamaslot.kvcache.segment import SegmentEvent as E
from llamaslot.kvcache.segment import SegmentState as S
from llamaslot.kvcache.tiers.disk_io import Erase, Reparent, SegmentMeta, Write, WriteTotals, path_digest
from llamaslot.kvcache.tiers.disk_pacing import WriteBudget, WriteQueue

if TYPE_CHECKING:
    from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers

_MAX_WRITES = 2
"""Most writes at a time. Few, so that the next segment is chosen as late as possible."""
MAX_DIRTY_FRACTION = 0.25
"""If more than this fraction of RAM is dirty, nothing more is offloaded ahead of eviction."""
_EARLY_WRITE_FRACTION = 0.25
"""A partial segment is written without delay once newer segments fill this fraction of RAM: otherwise LRU may evict
it before its delay ends.
"""


class WriteBack:
    """Chooses which segments of the tiers are written to disk, and when."""

    def __init__(self, tiers: SegmentTiers, bytes_per_day: int, written: WriteTotals | None = None) -> None:
        self._tiers = tiers
        self._budget = WriteBudget(bytes_per_day, written)
        self._queue = WriteQueue(tiers.max_tokens, self._budget, self._may_be_evicted_soon)
        self._replaced: dict[int, tuple[str, int]] = {}
        """Tenant and bytes of files that stay until their replacement is written, by number."""

    @property
    def writing(self) -> list[Segment]:
        """Segments that are being written: they count as on disk but are not there yet."""
        return [segment for segment in self._tiers.busy.values() if segment.state is S.WRITING]

    @property
    def due_at(self) -> float | None:
        """Time of the next write; None if there is none, or if `_MAX_WRITES` are in progress."""
        return self._queue.due_at if len(self.writing) < _MAX_WRITES else None

    @property
    def has_backlog(self) -> bool:
        """True if more than `MAX_DIRTY_FRACTION` of RAM is dirty: offloading more would evict dirty segments."""
        n_bytes = sum(each.n_bytes for each in (*self._queue, *self.writing) if not each.is_checkpoint)
        is_too_much = n_bytes > self._tiers.ram.capacity * MAX_DIRTY_FRACTION
        return is_too_much and not self._queue.is_paused(self._tiers.now)

    def tick(self) -> None:
        """Start the writes that are due."""
        self._budget.advance(self._tiers.now)
        while len(self.writing) < _MAX_WRITES:
            segment = self._queue.next_due(self._tiers.now)
            if segment is None:
                return
            if not self._may_write(segment) or not self._write(segment):
                self._tiers.transition(segment, E.UNQUEUE)

    def queue(self, segment: Segment) -> None:
        """Queue a segment to be written, unless it is on disk already or its parent is not."""
        if segment.state is S.RAM and self._may_write(segment):
            self._tiers.transition(segment, E.QUEUE)

    def flush(self) -> None:
        """Make all writes due at once: the server is shutting down."""
        self._queue.flush()

    def replace(self, old: Segment, new: Segment) -> None:
        """Keep the file of segment `old` until `new`, which replaces it, is written."""
        new.replaces += old.replaces
        old.replaces = []
        if old.state.uses_disk:
            new.replaces.append(old.number)
            self._replaced[old.number] = old.tenant, old.n_bytes

    def on_transition(self, segment: Segment) -> None:
        """Update the queue after a segment's change of state."""
        self._queue.remove(segment)
        if segment.state is S.DIRTY:
            self._queue.put(segment)
        elif segment.state is S.DROPPED:
            if segment.replaces:
                # The files of its checkpoints still refer to the replaced files, which are erased now.
                for each in segment.children:
                    if each.is_checkpoint and each.state.uses_disk:
                        self._tiers.transition(each, E.EVICT_DISK)
            self._erase_replaced(segment)

    def on_written(self, segment: Segment | None, *, ok: bool) -> None:
        """Handle the end of a write. `segment` is None, or no longer WRITING, if it was evicted meanwhile."""
        self._tiers.counters.disk.failed_writes += not ok
        if segment is None or segment.state is not S.WRITING:
            return
        if not ok:
            self._queue.pause(self._tiers.now)
            self._tiers.transition(segment, E.WRITE_FAILED)
            self.queue(segment)
            return
        self._tiers.transition(segment, E.WRITTEN)
        self._tiers.counters.written_tokens += segment.n_tokens
        self._tiers.counters.disk.written_bytes += segment.n_bytes
        self._tiers.counters.disk.total_written_bytes += segment.n_bytes
        checkpoints = tuple(each.number for each in segment.children if each.is_checkpoint and each.state.uses_disk)
        if segment.replaces and checkpoints:
            self._tiers.add_job(Reparent(checkpoints, segment.number))
        self._erase_replaced(segment)
        for child in segment.children:
            self.queue(child)
        if isinstance(segment, Checkpoint):
            self._thin(segment)

    def trim(self) -> None:
        """Evict segments from disk that exceed its budget, or that of an API key."""
        disk = self._tiers.disk
        for tenant in (*disk.used, ""):
            self._trim(tenant)

    def _trim(self, tenant: str) -> None:
        disk, shares = self._tiers.disk, self._tiers.shares
        while losers := shares.losers(disk, tenant, 0):
            oldest = disk.oldest(_may_evict, losers)
            assert oldest is not None
            self._tiers.transition(oldest, E.EVICT_DISK)

    def check(self, segments: set[Segment]) -> None:
        """Verify that the queue has exactly the dirty segments; raises `AssertionError`."""
        assert set(self._queue) == {segment for segment in segments if segment.state is S.DIRTY}

    def _may_be_evicted_soon(self, segment: Segment) -> bool:
        """True if newer segments fill `_EARLY_WRITE_FRACTION` of RAM, for it or a checkpoint that waits for it.

        A checkpoint is written after the segment that it refers to, and counts against its own budget of RAM.
        """
        taken = [node.checkpoint for node in segment.nodes if node.checkpoint is not None]
        waiting = [each for each in taken if each.state is S.RAM and each.is_worth_storing]
        for each in (segment, *waiting):
            lru = self._tiers.ram_of(each)
            if lru.n_bytes_put - each.ram_put_before > _EARLY_WRITE_FRACTION * lru.capacity:
                return True
        return False

    def _may_write(self, segment: Segment) -> bool:
        if not self._tiers.disk.capacity or is_private(segment.namespace):
            return False
        if isinstance(segment, Checkpoint) and not segment.is_worth_storing:
            return False
        parent = segment.parent
        return segment.start == 0 or (
            parent is not None and parent.state.uses_disk and parent.state is not S.WRITING
        )

    def _write(self, segment: Segment) -> bool:
        """Start to write a segment; False if a more recently used one would have to be evicted for it.

        If the segment's tenant stays within its share, more recent segments of tenants beyond theirs may be
        evicted.
        """
        disk, shares = self._tiers.disk, self._tiers.shares
        oldest: list[Segment] = []
        reserved: Counter[str] = Counter()
        for tenant, n_bytes in self._replaced.values():
            reserved[tenant] += n_bytes
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
        meta = SegmentMeta(
            number=segment.number,
            parent=parent.number if parent is not None else None,
            namespace=segment.namespace,
            start=segment.start,
            tokens=prefix[segment.start * WIDTH :],
            n_bytes=segment.n_bytes,
            path_digest=path_digest(segment.namespace, prefix),
        )
        self._tiers.add_job(Write(meta, self._budget.n_used))
        return True

    def _thin(self, checkpoint: Checkpoint) -> None:
        """Evict checkpoints above this one from disk, unless they are still worth storing."""
        for above in checkpoints_on(checkpoint.node)[1:]:
            if above.state.uses_disk and not above.state.is_busy and not above.is_worth_storing:
                self._tiers.transition(above, E.EVICT_DISK)

    def _erase_replaced(self, segment: Segment) -> None:
        if segment.replaces:
            self._tiers.add_job(Erase(tuple(segment.replaces)))
        for number in segment.replaces:
            del self._replaced[number]
        segment.replaces = []


def _may_evict(segment: Segment, gone: Sequence[Segment] = ()) -> bool:
    """True if a segment may be evicted from disk once those in `gone` have been."""
    if segment.state.is_busy or segment in gone:
        return False
    return all(child in gone for child in segment.children if child.state.uses_disk or child.replaces)
