"""Segments in RAM and on disk: budgets, every change of a segment's state, and the queue of uploads.

`SEGMENT_TABLE` in `nodes.py` has the states and their transitions; this module has the consequences of each
transition for budgets, jobs and the radix tree. `disk_tier.py` decides when segments are written to disk and read
back, `UploadQueue` when those in RAM are uploaded to the remote tier:

    full segment, fork                      due at once
    partial segment                         due after `PARTIAL_DELAY_S`: the next turn usually replaces it sooner
    checkpoint that `is_worth_storing`      the same: the next turn usually takes a deeper one sooner
    other checkpoints                       never due
    segment of a private request            never due

A segment that leaves RAM leaves that queue.

Each tier evicts the least recently used segments first, beginning with those of tenants that have more than their
share (`budget.py`). Using a segment uses its ancestors too, so no segment is evicted before its children.
Checkpoints are segments, but have their own budget of RAM.

Nothing here knows cells, sequences or llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import count
from typing import Literal

from llamaslot.base.model import SegmentSize
from llamaslot.base.namespaces import is_private, tenant_of
from llamaslot.base.stats import CacheStats, TenantStats
from llamaslot.kvcache import disk_io
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.nodes import Checkpoint, Node, Segment, checkpoints_on
from llamaslot.kvcache.nodes import SegmentEvent as E
from llamaslot.kvcache.nodes import SegmentState as S
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers import pacing
from llamaslot.kvcache.tiers.budget import SegmentLru, TenantShares

RETRY_UPLOAD_S = 1.0
"""Delay before a retry if earlier KV of the same block is not in RAM yet: it is usually offloaded soon."""
_MAX_TRIES = 5
"""Most tries of such a segment. After them it is queued again only at its next use."""
OFFER_AGAIN_S = 600.0
"""Time after an upload from which the next use queues the segment again: the store may have lost it meanwhile, and
if not, the upload extends its TTL.
"""
_MAX_UPLOADS = 2
"""Most uploads at a time. Few, so that the next segment is chosen as late as possible."""


class UploadQueue:
    """Segments to upload, of `max_tokens` each if they are full. Empty without a remote tier."""

    def __init__(self, max_tokens: int, *, is_on: bool) -> None:
        self.is_on = is_on
        self._max_tokens = max_tokens
        self._waiting: dict[Segment, None] = {}
        self._sending: dict[int, Segment] = {}
        self._stored: dict[Segment, float] = {}
        """Segments in RAM that the store has, and the time from which their next use queues them again."""
        self._now = 0.0
        self._postponed: dict[Segment, tuple[int, float]] = {}
        """Segments of incomplete blocks, with the number of tries and the time of the next one."""
        self._paused_until = 0.0
        self._is_flushing = False

    @property
    def due_at(self) -> float | None:
        """Time of the next upload; None if there is none, or if `_MAX_UPLOADS` are in progress."""
        if not self._waiting or len(self._sending) >= _MAX_UPLOADS:
            return None
        if self._now < self._paused_until:
            # A shortcut: all segments in RAM may be waiting, and every step asks for this.
            return self._paused_until
        return max(self._paused_until, min(map(self._due_at, self._waiting)))

    @property
    def is_sending(self) -> bool:
        """True while a segment is being uploaded."""
        return bool(self._sending)

    def put(self, segments: Iterable[Segment]) -> None:
        """Queue those of the segments that are in RAM, unless the store has them."""
        for segment in segments if self.is_on else ():
            is_stored = self._now < self._stored.get(segment, 0.0) or segment.number in self._sending
            if segment.state.is_loadable and not is_stored and self._may_send(segment):
                self._stored.pop(segment, None)
                self._waiting.setdefault(segment)

    def remove(self, segment: Segment) -> None:
        """Forget a segment that left RAM."""
        self._waiting.pop(segment, None)
        self._postponed.pop(segment, None)
        self._stored.pop(segment, None)

    def flush(self) -> None:
        """Make every upload due at once: the server is shutting down."""
        self._is_flushing = True

    def pause(self, until: float) -> None:
        """Upload nothing until a time, because the store does not answer; it may also have lost its content."""
        self._paused_until = max(until, self._paused_until)
        self.offer_all_again()

    def offer_all_again(self) -> None:
        """Queue every segment again at its next use, because the store may have lost its content."""
        self._stored.clear()

    def take_due(self, now: float) -> list[Segment]:
        """Return the segments to upload now; each must be reported to `on_uploaded` or `postpone`."""
        self._now = now
        taken: list[Segment] = []
        while self._waiting and now >= self._paused_until and len(self._sending) < _MAX_UPLOADS:
            segment = next((each for each in self._waiting if self._due_at(each) <= now), None)
            if segment is None:
                break
            del self._waiting[segment]
            if self._may_send(segment):
                self._sending[segment.number] = segment
                taken.append(segment)
        return taken

    def on_uploaded(self, number: int, now: float, *, ok: bool) -> None:
        """Handle the end of an upload; after a failure nothing is uploaded for `RETRY_DELAY_S`."""
        segment = self._sending.pop(number)
        if not ok:
            self.pause(now + pacing.RETRY_DELAY_S)
            self.put([segment])
        elif segment.state.is_loadable:
            self._postponed.pop(segment, None)
            self._stored[segment] = now + OFFER_AGAIN_S

    def postpone(self, segment: Segment, now: float) -> None:
        """Retry later, because earlier KV of the same block is not in RAM."""
        del self._sending[segment.number]
        n_tries = self._postponed.get(segment, (0, 0.0))[0] + 1
        if n_tries < _MAX_TRIES:
            self._postponed[segment] = n_tries, now + RETRY_UPLOAD_S
            self._waiting[segment] = None
        else:
            # Its next use queues it again.
            self._postponed.pop(segment, None)

    def _due_at(self, segment: Segment) -> float:
        waits = segment.is_partial(self._max_tokens) and not self._is_flushing
        at = segment.offloaded_at + (pacing.PARTIAL_DELAY_S if waits else 0.0)
        if self._is_flushing or segment not in self._postponed:
            return at
        return max(at, self._postponed[segment][1])

    def check(self, in_ram: set[Segment]) -> None:
        """Verify that waiting and stored segments are in RAM; raises `AssertionError`."""
        assert self._waiting.keys() <= in_ram
        assert self._stored.keys() <= in_ram
        assert self._stored.keys().isdisjoint(self._waiting)

    def _may_send(self, segment: Segment) -> bool:
        if is_private(segment.namespace):
            return False
        return not isinstance(segment, Checkpoint) or segment.is_worth_storing


class SegmentTiers:
    """All segments, in RAM and on disk.

    Offloaded KV goes to RAM first, so without RAM there is no disk tier either. Times are seconds on the caller's
    clock.
    """

    def __init__(self, tree: RadixTree, settings: CacheSettings) -> None:
        budgets, offloads = settings.budgets, settings.offloads
        self.max_tokens = settings.segment_tokens
        self.size = settings.segment_size or SegmentSize(0, 1)
        self.ram = SegmentLru(budgets.ram_bytes * offloads, budgets.ram_bytes_per_key)
        self.disk = SegmentLru(settings.disk_bytes * offloads, budgets.disk_bytes_per_key)
        self.checkpoints = SegmentLru(settings.checkpoints.limits.ram_bytes)
        """Checkpoints in RAM, which have a budget of their own."""
        self.shares = TenantShares()
        self.uploads = UploadQueue(self.max_tokens, is_on=settings.uploads)
        self.dirty: dict[int, Segment] = {}
        """Segments that wait to be written, by number, in the order in which they came."""
        self.busy: dict[int, Segment] = {}
        """Segments that are being read or written, by number."""
        self.unreadable: dict[int, Segment] = {}
        """Segments whose last read failed, by number."""
        self.load_pins: dict[int | str, frozenset[Segment]] = {}
        """Segments that a sequence, or a waiting request (by its id), is about to load; not evicted from RAM."""
        self.pinned_paths: set[tuple[str, bytes]] = set()
        """Namespaces and packed tokens of prefixes that are evicted last (`Pins`)."""
        self.replaced_files: dict[int, tuple[str, int]] = {}
        """Tenant and bytes of files that stay until their replacement is written, by number."""
        self.now = 0.0
        self.n_uses = 0
        """Logical time of segments: uses of a path so far."""
        self.numbers = count()
        """Numbers that no segment has had yet."""
        self.counters = CacheStats()
        """Counters of the whole cache, which its parts increment."""
        self.jobs: list[disk_io.Job] = []
        """Disk jobs for the next step, to be done in this order."""
        self._tree = tree
        self._saves_again_at = 0.0
        self._loads_again_at = 0.0
        self._freed: list[int] = []
        self._used: dict[int, None] = {}
        """Numbers of the deepest segments on disk of the paths used since the last jobs, in the order of use."""

    # --- lookups ---

    @property
    def may_save(self) -> bool:
        """False for a while after a save failed for lack of memory."""
        return self.now >= self._saves_again_at

    @property
    def may_load(self) -> bool:
        """False for a while after a load failed for lack of memory."""
        return self.now >= self._loads_again_at

    def fits(self, node: Node, ranges: Sequence[tuple[int, int]]) -> bool:
        """True if these ranges of the path to a node would fit into RAM after evicting all that may be evicted.

        The shares of other tenants may not. False for a while after memory ran out.
        """
        if not self.may_save or not self.ram.capacity:
            return False
        end = max((end for _, end in ranges), default=0)
        path = {each.segment for each in node.path_to_root() if each.segment is not None and each.start < end}
        replaced = {s for s in path if any(start <= s.start and s.end <= end for start, end in ranges)}
        kept = path.union(self.in_use) - replaced
        n_kept: Counter[str] = Counter()
        for s in kept:
            if s.state.uses_ram and not s.is_checkpoint and (s.state is not S.CLEAN or self._is_load_pinned(s)):
                n_kept[s.tenant] += s.n_bytes
        tenant, n_new = tenant_of(node.namespace), sum(self.size.of(end - start) for start, end in ranges)
        n_own = n_kept[tenant] + n_new
        if self.ram.exceeds_limit(tenant, n_own):
            return False
        return n_own + self.shares.kept_by_others(self.ram, tenant, n_new, n_kept) <= self.ram.capacity

    @property
    def in_use(self) -> set[Segment]:
        """Segments and checkpoints that are being read or written, or are about to be loaded."""
        return {*self.busy.values()}.union(*self.load_pins.values())

    def ram_of(self, segment: Segment) -> SegmentLru:
        """Return the part of RAM against which a segment counts."""
        return self.checkpoints if segment.is_checkpoint else self.ram

    def may_write(self, segment: Segment) -> bool:
        """True if a segment may be on disk: its parent must be there already."""
        if not self.disk.capacity or is_private(segment.namespace):
            return False
        if isinstance(segment, Checkpoint) and not segment.is_worth_storing:
            return False
        parent = segment.parent
        return segment.start == 0 or (
            parent is not None and parent.state.uses_disk and parent.state is not S.WRITING
        )

    def tenant_stats(self) -> tuple[TenantStats, ...]:
        """Return what each tenant has in the pool and in the tiers."""
        n_requests = self.shares.n_requests
        cells, ram, disk = self._tree.n_tokens_of, self.ram.used, self.disk.used
        names = sorted({*n_requests, *+cells, *ram, *disk})
        return tuple(TenantStats(each, cells[each], ram[each], disk[each], n_requests[each]) for each in names)

    # --- changes ---

    def tick(self, now: float) -> None:
        """Advance the clock."""
        before = self.may_save, self.may_load
        self.now = now
        self.shares.tick(now)
        # Lookups are stale: memory decides what is worth loading, and where a path can be continued.
        self._tree.version += (self.may_save, self.may_load) != before

    def add(self, node: Node, start: int, end: int) -> Segment:
        """Create a segment for `[start, end)` of the path to a node; it must fit.

        It replaces segments within that range. Others are evicted from RAM for it, but not those above it on its
        path that are nowhere else.
        """
        if not self.fits(node, [(start, end)]):
            raise AssertionError(f"there is no room for [{start}, {end})")
        tenant = tenant_of(node.namespace)
        size = self.size.of(end - start)
        segment = Segment(next(self.numbers), start, end, size, tenant=tenant, now=self.now)
        for each in self._tree.attach(segment, node):
            # The file of the replaced segment stays until the new one is written.
            segment.replaces += each.replaces
            each.replaces = []
            if each.state.uses_disk:
                segment.replaces.append(each.number)
                self.replaced_files[each.number] = each.tenant, each.n_bytes
            self.transition(each, E.DROP, keeps_file=True)
        self.touch(segment.path_from_root)
        if not self.free_ram(tenant, segment.n_bytes, set(segment.path_from_root), may_take_shares=True):
            raise AssertionError("there was room")
        self._put(segment)
        return segment

    def add_checkpoint(self, node: Node, n_bytes: int) -> Checkpoint:
        """Create a checkpoint after the last token of a node; there must be room for it in RAM."""
        checkpoint = Checkpoint(next(self.numbers), node, n_bytes, now=self.now)
        self._tree.version += 1
        node.checkpoint = checkpoint
        self.touch(checkpoint.path_from_root)
        self._put(checkpoint)
        return checkpoint

    def _put(self, segment: Segment) -> None:
        """Count a new segment against RAM, and queue it to be written and uploaded."""
        lru = self.ram_of(segment)
        lru.put(segment)
        segment.ram_put_before = lru.n_bytes_put
        self.queue_write(segment)
        self.uploads.put([segment])

    def touch(self, path: Sequence[Segment]) -> None:
        """Record that the segments of a path, given from the root on, are used now."""
        self.n_uses += 1
        for segment in path:
            segment.last_used = self.n_uses
        unwritten = next((segment for segment in path if not segment.state.uses_disk), None)
        if unwritten is not None:
            self.queue_write(unwritten)
        self.uploads.put(path)
        last = next((segment for segment in reversed(path) if segment.state.uses_disk), None)
        if last is not None:
            self._used[last.number] = self._used.pop(last.number, None)

    def use_pinned(self) -> None:
        """Make what there is of pinned prefixes the most recently used: before an eviction."""
        self.n_uses += 1
        for namespace, tokens in self.pinned_paths:
            match = self._tree.match(namespace, tokens)
            for each in (*match.segments, *checkpoints_on(match.whole_end)):
                each.last_used = self.n_uses

    def queue_write(self, segment: Segment) -> None:
        """Queue a segment to be written, unless it is on disk already or its parent is not."""
        if segment.state is S.RAM and self.may_write(segment):
            self.transition(segment, E.QUEUE)

    def free_ram(
        self, tenant: str, n_bytes: int, path: Container[Segment] = (), *, may_take_shares: bool = False
    ) -> bool:
        """Evict segments from RAM until `n_bytes` of a tenant fit; returns True if they do.

        Segments of `path` are evicted only if they are also on disk. With `may_take_shares`, tenants within their
        share lose segments too, if those beyond theirs have nothing to evict.
        """

        def may_evict(segment: Segment) -> bool:
            is_free = not segment.state.is_busy and not self._is_load_pinned(segment)
            return is_free and (segment not in path or segment.state is S.CLEAN)

        if self.shares.losers(self.ram, tenant, n_bytes):
            self.use_pinned()
        while losers := self.shares.losers(self.ram, tenant, n_bytes):
            oldest = self.ram.oldest(may_evict, losers)
            if oldest is None and may_take_shares and losers != (tenant,):
                oldest = self.ram.oldest(may_evict)
            if oldest is None:
                return False
            self.transition(oldest, E.EVICT_RAM)
        return True

    def keep_budget(self, n_bytes: int) -> None:
        """Evict from RAM what exceeds `n_bytes`: first segments that are also on disk, then others, by rank.

        Segments that are being read, written or loaded stay, so this is repeated with each plan.
        """
        if self.ram.n_bytes > n_bytes:
            self.use_pinned()
            kept = self.in_use
            evictable = [segment for segment in self.ram if segment not in kept]
            for segment in sorted(evictable, key=lambda each: (each.state is not S.CLEAN, each.rank)):
                if self.ram.n_bytes <= n_bytes:
                    break
                self.transition(segment, E.EVICT_RAM)
        # Lookups are stale: whether a segment can be read from disk depends on the capacity of RAM.
        self._tree.version += self.ram.capacity != max(n_bytes, self.ram.n_bytes)
        self.ram.capacity = max(n_bytes, self.ram.n_bytes)

    def empty(self, tier: Literal["ram", "disk"]) -> None:
        """Evict all segments and checkpoints from RAM or from disk, except those in use and above them."""
        # A sequence may be about to load a segment that was dropped meanwhile.
        used = [each for each in self.in_use if each.state is not S.DROPPED]
        kept = {above for each in used for above in each.path_from_root}
        held = [*self.ram, *self.checkpoints] if tier == "ram" else [*self.disk]
        for segment in sorted(held, key=lambda each: each.rank):
            if segment not in kept:
                self.transition(segment, E.EVICT_RAM if tier == "ram" else E.EVICT_DISK)

    def drop(self, segments: Iterable[Segment]) -> None:
        """Drop segments, children before their parents."""
        for segment in segments:
            self.transition(segment, E.DROP)

    def drop_lost(self) -> None:
        """Drop the checkpoints whose nodes were removed from the tree."""
        lost, self._tree.lost_checkpoints = self._tree.lost_checkpoints, []
        # If its save failed, a checkpoint is dropped already.
        self.drop(each for each in lost if each.state is not S.DROPPED)

    def erase_replaced(self, segment: Segment) -> None:
        """Erase the files that a segment replaces."""
        if segment.replaces:
            self.jobs.append(disk_io.Erase(tuple(segment.replaces)))
        for number in segment.replaces:
            del self.replaced_files[number]
        segment.replaces = []

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
            self.jobs.append(disk_io.Erase((segment.number,)))
        for is_in, index in (
            (after is S.DIRTY, self.dirty),
            (after.is_busy, self.busy),
            (after is S.UNREADABLE, self.unreadable),
        ):
            index.pop(segment.number, None)
            if is_in:
                index[segment.number] = segment
        if after is S.DROPPED:
            if segment.replaces:
                # The files of its checkpoints still refer to the replaced files, which are erased now.
                for each in segment.children:
                    if each.is_checkpoint and each.state.uses_disk:
                        self.transition(each, E.EVICT_DISK)
            self.erase_replaced(segment)
            self._tree.detach(segment)

    # --- results ---

    def on_save_failed(self, numbers: Collection[int], now: float) -> None:
        """Drop segments that the backend had no memory to save, and save nothing for a while.

        Their children stay, and are found again once the gap is filled. A number that is not in RAM belongs to a
        slot that was to be saved to a file.
        """
        self._tree.version += 1
        self.now = now
        self._saves_again_at = now + pacing.RETRY_DELAY_S
        for number in numbers:
            segment = self.ram.get(number) or self.checkpoints.get(number)
            if segment is not None:
                self.transition(segment, E.DROP)
        self.drop_lost()
        # The backend never had their bytes, so it must not free them.
        self._freed = [each for each in self._freed if each not in numbers]

    def on_load_failed(self, now: float) -> None:
        """Load nothing for a while, because the backend had no memory to load a segment."""
        self._tree.version += 1
        self.now = now
        self._loads_again_at = now + pacing.RETRY_DELAY_S

    # --- work for the next step ---

    def take_freed(self) -> list[int]:
        """Return the numbers of segments whose bytes left RAM since the last call."""
        self.drop_lost()
        freed, self._freed = self._freed, []
        return freed

    def take_jobs(self) -> list[disk_io.Job]:
        """Return the disk jobs added since the last call."""
        self.drop_lost()
        jobs, self.jobs = self.jobs, []
        if self._used:
            jobs.append(disk_io.MarkUsed(tuple(self._used)))
            self._used.clear()
        return jobs

    # --- invariants ---

    def check(self, segments: set[Segment]) -> None:
        """Verify all invariants for the segments that the tree has; raises `AssertionError`."""
        lrus = self.ram, self.checkpoints, self.disk
        assert segments == {segment for lru in lrus for segment in lru}
        for lru in lrus:
            lru.check()
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
            assert (segment.number in self.dirty) == (state is S.DIRTY)
            assert (segment.number in self.busy) == state.is_busy
            assert (segment.number in self.unreadable) == (state is S.UNREADABLE)
        numbers = {segment.number for segment in segments}
        assert self.dirty.keys() | self.busy.keys() | self.unreadable.keys() <= numbers
        self.uploads.check({segment for segment in segments if segment.state.is_loadable})

    def _is_load_pinned(self, segment: Segment) -> bool:
        return any(segment in pins for pins in self.load_pins.values())
