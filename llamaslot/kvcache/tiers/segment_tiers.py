"""Segments in RAM and on disk: which are added, evicted, written and read.

`segment.py` has the states and their transitions; this module has the consequences of each transition for budgets,
jobs and the radix tree. Each tier evicts the least recently used segments first, beginning with those of tenants
that have more than their share (`tenant_shares.py`). Using a segment uses its ancestors too, so no segment is
evicted before its children. Checkpoints are segments, but have their own budget of RAM.

Nothing here knows cells, sequences or llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from llamaslot.base.model import CheckpointSize, SegmentSize
from llamaslot.base.namespaces import is_private, tenant_of
from llamaslot.base.stats import CacheStats
from llamaslot.kvcache.match import SegmentPart
from llamaslot.kvcache.node import Node
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.segment import Checkpoint, Segment
from llamaslot.kvcache.segment import SegmentEvent as E
from llamaslot.kvcache.segment import SegmentState as S
from llamaslot.kvcache.tiers import disk_io, pacing
from llamaslot.kvcache.tiers.segment_lru import SegmentLru
from llamaslot.kvcache.tiers.segment_reader import SegmentReader
from llamaslot.kvcache.tiers.tenant_shares import TenantShares, exceeds_limit
from llamaslot.kvcache.tiers.upload_queue import UploadQueue
from llamaslot.kvcache.tiers.write_back import WriteBack


class SegmentTiers:
    """All segments, each of at most `max_tokens`, in `ram_bytes` and `disk_bytes`.

    Those of one API key take at most `ram_bytes_per_key` and `disk_bytes_per_key`; 0 for no such limit.

    Offloaded KV goes to RAM first, so without RAM there is no disk tier either. Times are seconds on the caller's
    clock.
    """

    def __init__(
        self,
        tree: RadixTree,
        ram_bytes: int,
        size: SegmentSize,
        max_tokens: int,
        counters: CacheStats,
        *,
        disk_bytes: int = 0,
        disk_bytes_per_day: int = 0,
        disk_written: disk_io.WriteTotals | None = None,
        ram_bytes_per_key: int = 0,
        disk_bytes_per_key: int = 0,
        checkpoint_bytes: int = 0,
        checkpoint_size: CheckpointSize | None = None,
        uploads: bool = False,
    ) -> None:
        self.max_tokens = max_tokens
        self.ram = SegmentLru(ram_bytes, ram_bytes_per_key)
        self.disk = SegmentLru(disk_bytes if ram_bytes else 0, disk_bytes_per_key)
        self.checkpoints = SegmentLru(checkpoint_bytes)
        """Checkpoints in RAM, which have a budget of their own."""
        self.shares = TenantShares()
        self.writer = WriteBack(self, disk_bytes_per_day, disk_written)
        self.reader = SegmentReader(self, tree, size, checkpoint_size)
        self.uploads = UploadQueue(max_tokens, is_on=uploads and ram_bytes > 0)
        self.is_on_trial = False
        """True until the self-test of reuse has passed (`KVCache.is_on_trial`); nothing is saved until then."""
        self.now = 0.0
        self.counters = counters
        if disk_written is not None:
            counters.disk.total_written_bytes = disk_written.total_bytes
        self._tree = tree
        self._size = size
        self.busy: dict[int, Segment] = {}
        """Segments that are being read or written, by number."""
        self.unreadable: dict[int, Segment] = {}
        """Segments whose last read failed, by number."""
        self.load_pins: dict[int | str, frozenset[Segment]] = {}
        """Segments that a sequence, or a waiting request (by its id), is about to load; not evicted from RAM."""
        self.saves_again_at = 0.0
        """Time until which nothing is saved, because memory ran out."""
        self.loads_again_at = 0.0
        """Time until which nothing is loaded, because memory ran out."""
        self._n_uses = 0
        self._next_number = 0
        self._freed: list[int] = []
        self._used: dict[int, None] = {}
        """Numbers of the deepest segments on disk of the paths used since the last jobs, in the order of use."""
        self._jobs: list[disk_io.Job] = []

    # --- lookups ---

    def readable(self, parts: Sequence[SegmentPart]) -> list[SegmentPart]:
        """Return the leading parts that can be loaded, now or after reading them from disk."""
        found: list[SegmentPart] = []
        for part in parts if self.now >= self.loads_again_at else ():
            if not part.segment.state.is_loadable and not self.reader.may_read(part.segment):
                break
            found.append(part)
        return found

    def fits(self, node: Node, ranges: Sequence[tuple[int, int]]) -> bool:
        """True if these ranges of the path to a node would fit into RAM after evicting all that may be evicted.

        The shares of other tenants may not. False for a while after memory ran out.
        """
        if self.now < self.saves_again_at or not self.ram.capacity:
            return False
        end = max((end for _, end in ranges), default=0)
        path = {each.segment for each in node.path_to_root() if each.segment is not None and each.start < end}
        replaced = {s for s in path if any(start <= s.start and s.end <= end for start, end in ranges)}
        kept = path.union(self.busy.values(), *self.load_pins.values()) - replaced
        n_kept: Counter[str] = Counter()
        for s in kept:
            if s.state.uses_ram and not s.is_checkpoint and (s.state is not S.CLEAN or self._is_load_pinned(s)):
                n_kept[s.tenant] += s.n_bytes
        tenant, n_new = tenant_of(node.namespace), sum(self._size.of(end - start) for start, end in ranges)
        n_own = n_kept[tenant] + n_new
        if exceeds_limit(self.ram, tenant, n_own):
            return False
        return n_own + self.shares.kept_by_others(self.ram, tenant, n_new, n_kept) <= self.ram.capacity

    @property
    def due_at(self) -> float | None:
        """Time at which a write or upload is due, or a read times out; None for never."""
        times = (self.writer.due_at, self.reader.times_out_at, self.uploads.due_at)
        return min((each for each in times if each is not None), default=None)

    # --- changes ---

    def tick(self, now: float) -> None:
        """Advance the clock: time out reads, retry unreadable segments, start due writes."""
        before = self._load_conditions
        self.now = now
        self.shares.tick(now)
        self.reader.tick()
        # Lookups are stale: what is worth loading depends on the speed of the disk and on memory.
        self._tree.version += self._load_conditions != before
        self.writer.tick()

    def add(self, node: Node, start: int, end: int) -> Segment:
        """Create a segment for `[start, end)` of the path to a node; it must fit.

        It replaces segments within that range. Others are evicted from RAM for it, but not those above it on its
        path that are nowhere else.
        """
        if not self.fits(node, [(start, end)]):
            raise AssertionError(f"there is no room for [{start}, {end})")
        tenant = tenant_of(node.namespace)
        size = self._size.of(end - start)
        segment = Segment(self.new_number(), start, end, size, tenant=tenant, now=self.now)
        for each in self._tree.attach(segment, node):
            self.writer.replace(each, segment)
            self.transition(each, E.DROP, keeps_file=True)
        self.touch(segment.path_from_root)
        if not self._free_ram(tenant, segment.n_bytes, set(segment.path_from_root), may_take_shares=True):
            raise AssertionError("there was room")
        self.ram.put(segment)
        segment.ram_put_before = self.ram.n_bytes_put
        self.writer.queue(segment)
        self.uploads.put([segment])
        return segment

    def add_checkpoint(self, node: Node, n_bytes: int) -> Checkpoint:
        """Create a checkpoint after the last token of a node; there must be room for it in RAM."""
        checkpoint = Checkpoint(self.new_number(), node, n_bytes, now=self.now)
        self._tree.version += 1
        node.checkpoint = checkpoint
        self.touch(checkpoint.path_from_root)
        self.checkpoints.put(checkpoint)
        checkpoint.ram_put_before = self.checkpoints.n_bytes_put
        self.writer.queue(checkpoint)
        self.uploads.put([checkpoint])
        return checkpoint

    def new_number(self) -> int:
        """Return a number that no segment has had yet."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def touch(self, path: Sequence[Segment]) -> None:
        """Record that the segments of a path, given from the root on, are used now."""
        self._n_uses += 1
        for segment in path:
            segment.last_used = self._n_uses
        unwritten = next((segment for segment in path if not segment.state.uses_disk), None)
        if unwritten is not None:
            self.writer.queue(unwritten)
        self.uploads.put(path)
        last = next((segment for segment in reversed(path) if segment.state.uses_disk), None)
        if last is not None:
            self._used[last.number] = self._used.pop(last.number, None)

    def prefetch(self, seq: int, parts: Iterable[SegmentPart]) -> None:
        """Pin segments that a sequence is about to load, and start to read those that are only on disk."""
        segments = [part.segment for part in parts]
        self.load_pins[seq] = frozenset(segments)
        for segment in segments:
            if segment.state.uses_ram:
                continue
            if not self.reader.may_start or not self._free_ram(segment.tenant, segment.n_bytes):
                return
            self.reader.start(segment)

    def unpin(self, seq: int) -> None:
        """Remove the load pins of a sequence."""
        self.load_pins.pop(seq, None)

    def drop(self, segments: Iterable[Segment]) -> None:
        """Drop segments, children before their parents."""
        for segment in segments:
            self.transition(segment, E.DROP)

    def add_job(self, job: disk_io.Job) -> None:
        """Add a job, to be done after those added before."""
        self._jobs.append(job)

    def drop_lost(self) -> None:
        """Drop the checkpoints whose nodes were removed from the tree."""
        lost, self._tree.lost_checkpoints = self._tree.lost_checkpoints, []
        # If its save failed, a checkpoint is dropped already.
        self.drop(each for each in lost if each.state is not S.DROPPED)

    def take_freed(self) -> list[int]:
        """Return the numbers of segments whose bytes left RAM since the last call."""
        self.drop_lost()
        freed, self._freed = self._freed, []
        return freed

    def take_jobs(self) -> list[disk_io.Job]:
        """Return the disk jobs added since the last call."""
        self.drop_lost()
        jobs, self._jobs = self._jobs, []
        if self._used:
            jobs.append(disk_io.MarkUsed(tuple(self._used)))
            self._used.clear()
        return jobs

    def on_io(self, event: disk_io.IoEvent, now: float) -> Segment | None:
        """Handle the result of a job; returns a segment that was read and is still wanted in RAM."""
        self._tree.version += 1
        self.now = now
        match event:
            case disk_io.ReadStarted():
                self.reader.on_started()
            case disk_io.Written(number, ok):
                self.writer.on_written(self.busy.get(number), ok=ok)
            case disk_io.ReadDone(number, seconds):
                return self.reader.on_done(number, seconds)
            case disk_io.ReadFailed(number):
                self.reader.on_failed(number)
            case disk_io.Corrupt(number):
                self.reader.on_corrupt(number)
            case disk_io.SaveFailed(numbers):
                self._on_save_failed(numbers)
            case disk_io.LoadFailed():
                self.loads_again_at = now + pacing.RETRY_DELAY_S
            case disk_io.SlotSaved(numbers):
                self._freed += numbers
        return None

    def restore(self, found: Sequence[disk_io.SegmentMeta], first_number: int) -> list[int]:
        """Add the segments on disk, the least recently used first; new ones are numbered from `first_number` on.

        Segments that do not fit into the budget, or whose metadata is not plausible, are erased. Returns the
        numbers of those too large for RAM and of their descendants, which stay on disk but are not added.
        """
        self._next_number = first_number
        self._n_uses = len(found)
        too_large = self.reader.add_found(found)
        self.writer.trim()
        return too_large

    def transition(self, segment: Segment, event: E, *, keeps_file: bool = False) -> None:
        """Change the state of a segment, and update budgets, jobs and the tree accordingly."""
        before = segment.handle(event)
        after = segment.state
        self._tree.version += 1
        for lru, used, uses in (
            (self.ram_of(segment), before.uses_ram, after.uses_ram),
            (self.disk, before.uses_disk, after.uses_disk),
        ):
            if used and not uses:
                lru.remove(segment)
            elif uses and not used:
                lru.put(segment)
        if before.is_loadable and not after.is_loadable:
            self._freed.append(segment.number)
            self.uploads.remove(segment)
        if before.uses_disk and not after.uses_disk and event is not E.WRITE_FAILED and not keeps_file:
            self.add_job(disk_io.Erase((segment.number,)))
        for is_in, index in ((after.is_busy, self.busy), (after is S.UNREADABLE, self.unreadable)):
            index.pop(segment.number, None)
            if is_in:
                index[segment.number] = segment
        self.writer.on_transition(segment)
        if after is S.DROPPED:
            self._tree.detach(segment)

    def ram_of(self, segment: Segment) -> SegmentLru:
        """Return the part of RAM against which a segment counts."""
        return self.checkpoints if segment.is_checkpoint else self.ram

    def check(self, segments: set[Segment]) -> None:
        """Verify all invariants for the segments that the tree has; raises `AssertionError`."""
        lrus = self.ram, self.checkpoints, self.disk
        assert segments == {segment for lru in lrus for segment in lru}
        for lru in lrus:
            assert lru.n_bytes == sum(segment.n_bytes for segment in lru) <= lru.capacity
            assert lru.n_tokens == sum(segment.n_tokens for segment in lru)
            assert lru.n_bytes == sum(lru.used.values())
            assert not any(exceeds_limit(lru, *each) for each in lru.used.items())
        for segment in segments:
            state, parent = segment.state, segment.parent
            assert segment.n_tokens <= self.max_tokens
            assert (segment in self.ram_of(segment), segment in self.disk) == (state.uses_ram, state.uses_disk)
            assert parent is None or parent.rank > segment.rank, "would be evicted before its child"
            assert not (state.uses_disk and is_private(segment.namespace))
            is_written = parent is not None and parent.state.uses_disk and parent.state is not S.WRITING
            # A checkpoint's file refers to the file that its parent segment replaces, until the parent is written.
            is_written |= segment.is_checkpoint and parent is not None and bool(parent.replaces)
            assert not state.uses_disk or segment.start == 0 or is_written, "on disk without its parent"
            assert (segment.number in self.busy) == state.is_busy
            assert (segment.number in self.unreadable) == (state is S.UNREADABLE)
        self.writer.check(segments)
        self.uploads.check({segment for segment in segments if segment.state.is_loadable})

    # --- inside ---

    @property
    def _load_conditions(self) -> tuple[bool, float | None, bool, bool]:
        """Conditions of disk and memory that decide what is worth loading, and where a path can be continued."""
        is_short = self.now < self.loads_again_at, self.now < self.saves_again_at
        return self.reader.is_unresponsive, self.reader.us_per_token, *is_short

    def _is_load_pinned(self, segment: Segment) -> bool:
        return any(segment in pins for pins in self.load_pins.values())

    def _free_ram(
        self, tenant: str, n_bytes: int, path: Container[Segment] = (), *, may_take_shares: bool = False
    ) -> bool:
        """Evict segments from RAM until `n_bytes` fit; returns True if they do.

        Segments of `path` are evicted only if they are also on disk. With `may_take_shares`, tenants within their
        share lose segments too, if those beyond theirs have nothing to evict.
        """

        def may_evict(segment: Segment) -> bool:
            is_free = not segment.state.is_busy and not self._is_load_pinned(segment)
            return is_free and (segment not in path or segment.state is S.CLEAN)

        while losers := self.shares.losers(self.ram, tenant, n_bytes):
            oldest = self.ram.oldest(may_evict, losers)
            if oldest is None and may_take_shares and losers != (tenant,):
                oldest = self.ram.oldest(may_evict)
            if oldest is None:
                return False
            self.transition(oldest, E.EVICT_RAM)
        return True

    def _on_save_failed(self, numbers: frozenset[int]) -> None:
        """Drop segments that the backend had no memory to save, and save nothing for a while.

        Their children stay, and are found again once the gap is filled. A number that is not in RAM belongs to a
        slot that was to be saved to a file.
        """
        self.saves_again_at = self.now + pacing.RETRY_DELAY_S
        for number in numbers:
            segment = self.ram.get(number) or self.checkpoints.get(number)
            if segment is not None:
                self.transition(segment, E.DROP)
        self.drop_lost()
        # The backend never had their bytes, so it must not free them.
        self._freed = [each for each in self._freed if each not in numbers]
