"""KVCache: the interface of the prefix cache to scheduler and engine.

                         request: match -> acquire a slot -> load -> append ... -> release
                                    |
    slot (sequence id) --> path in the radix tree --> node --> cells of the pool
                                                       |
                                                       +-----> segment --> RAM, disk (`offload/`)

A plan changes the tree at once and records a KV operation for each change; the next step carries the operations out
in order, before it decodes. Disk jobs are handed out the same way, and their results come back through `on_io`.
What a decode really computed is reported by `append` and `invalidate`.

Calls of a step: tick, acquire and load for requests, offload_idle, evict if the step lacks cells, maintain, then
take the operations and jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from llamaslot.base.kv_ops import Operation, StateRecord
from llamaslot.base.model import SegmentSize
from llamaslot.base.namespaces import is_private, tenant_of
from llamaslot.base.stats import (
    CacheProbe,
    CacheState,
    CacheStats,
    CellStats,
    SequenceStats,
)
from llamaslot.base.tokens import WIDTH, Tokens, packed
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.ghost_list import GhostList
from llamaslot.kvcache.match import Acquired, Match
from llamaslot.kvcache.match_report import miss_reason, probe_of
from llamaslot.kvcache.offload.checkpoints import Checkpoints
from llamaslot.kvcache.offload.dropping import Dropper
from llamaslot.kvcache.offload.offloader import Loaded, LoadStatus, Offloader
from llamaslot.kvcache.offload.policy import Deadlines, OffloadPolicy
from llamaslot.kvcache.offload.public_prefix import PublicPrefix
from llamaslot.kvcache.offload.restoring import Restorer
from llamaslot.kvcache.offload.window_cells import WindowCells
from llamaslot.kvcache.pools.pool import Pool
from llamaslot.kvcache.pools.slot_snapshot import SlotSave, SlotSnapshot, SlotSnapshots, SnapshotPart
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.remote.remote_tier import RemoteTier
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.disk_io import IoEvent, Job, SegmentMeta
from llamaslot.kvcache.tiers.ram_budget import RamBudget
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from llamaslot.kvcache.tiers.tier_stats import disk_stats, ram_stats, tenant_stats
from llamaslot.kvcache.tree_listing import tree_listing

_NO_SEQ = -1
"""Key of the load pins of a request whose slot is not chosen yet."""


class KVCache:
    """Prefix cache of one context.

    `prefill_seconds` estimates the time to compute a number of tokens. `on_disk` lists the segments on disk at
    start, the least recently used first; new segments are numbered from `first_number` on.
    """

    def __init__(
        self,
        settings: CacheSettings,
        *,
        prefill_seconds: Callable[[int], float] = lambda _n: 0.0,
        on_disk: Sequence[SegmentMeta] = (),
        first_number: int = 0,
    ) -> None:
        self.settings = settings
        self._counters = CacheStats()
        """Counters; shared with the objects below, which increment them."""
        self._tree = RadixTree()
        self._sequences = Sequences(
            self._tree,
            n_slots=settings.n_slots,
            n_seqs=settings.n_path_seqs,
            states=StateRecord(settings.checkpoints.kind, settings.checkpoints.n_swa),
            shares_cells=settings.shares_cells,
        )
        self._tiers = SegmentTiers(
            self._tree,
            settings.ram_bytes if settings.offloads else 0,
            settings.segment_size or SegmentSize(0, 1),
            settings.segment_tokens,
            self._counters,
            disk_bytes=settings.disk_bytes,
            disk_bytes_per_day=settings.disk_bytes_per_day,
            disk_written=settings.disk_written,
            ram_bytes_per_key=settings.ram_bytes_per_key,
            disk_bytes_per_key=settings.disk_bytes_per_key,
            checkpoint_bytes=settings.checkpoints.ram_bytes,
            checkpoint_size=settings.checkpoints.size,
            uploads=settings.uploads,
        )
        self.ram_budget = RamBudget(self._tiers.ram.capacity, is_fixed=settings.ram_is_fixed)
        """Follows free memory; `tick` evicts what exceeds it."""
        self.checkpoints = Checkpoints(self._tree, self._sequences, settings.checkpoints, self._tiers)
        """Copies of partial states, for models that have one."""
        shared = self._tree, self._sequences, self._tiers
        self.restorer = Restorer(*shared, self.checkpoints, min_restored=lambda: settings.min_restored)
        """Gives sequences their partial states."""
        self._offloader = Offloader(*shared, settings, self._counters, lambda: self.cells.free, self.checkpoints)
        self.window_cells = WindowCells(self._tree, self._sequences, self.checkpoints, self._offloader, settings)
        """Cells of sliding-window layers, if these can run out."""
        self.remote = RemoteTier(
            self._tree,
            self._tiers,
            self.checkpoints,
            size=settings.segment_size or SegmentSize(0, 1),
            checkpoint_size=settings.checkpoints.size if self.checkpoints.has_states else None,
            seconds_to_compute=lambda n: n * settings.prefill_us / 1e6 or prefill_seconds(n),
        )
        """KV that several servers share."""
        self._policy = OffloadPolicy(settings, *shared, self._offloader, self.checkpoints, lambda: self.has_streams)
        self._public = PublicPrefix(self._tree, self._tiers, self._offloader)
        self.pool = Pool(
            self._tree,
            self._sequences,
            settings,
            self._counters,
            self._offloader,
            self.checkpoints,
            self.restorer,
        )
        self.dropper = Dropper(*shared, self._offloader)
        """Deletes prefixes in all tiers."""
        self._snapshots = SlotSnapshots(self._tree, self._sequences, self.pool, self._offloader, self.checkpoints)
        self._ghosts = GhostList()
        self._n_cached_at: dict[int, int] = {}
        """Tokens that were cached when each running slot was acquired."""
        self._n_loaded = 0
        """Tokens loaded in this step."""
        self.has_streams = False
        """True if streams run in this step, so that it may save and load only as much as fits into `gap_ms`."""
        self.ignored = self._tiers.restore(on_disk, first_number)
        """Numbers of segments on disk that are too large to be used."""

    @property
    def is_on_trial(self) -> bool:
        """True until the self-test of reuse has passed: computed KV stays in the pool but is not reused yet."""
        return self._tiers.is_on_trial

    @is_on_trial.setter
    def is_on_trial(self, value: bool) -> None:
        self._tiers.is_on_trial = value

    # --- lookups ---

    @property
    def cells(self) -> CellStats:
        """Used, idle, pinned and free cells, as of the operations recorded so far."""
        total, used, idle = self.settings.pool_cells, self.pool.n_used, self.pool.n_idle
        return CellStats(total, used, idle, pinned=used - idle, free=total - used)

    def length(self, seq: int) -> int:
        """Number of tokens that a sequence holds."""
        return self._tree.length(seq)

    def match(self, namespace: str, tokens: bytes, last: Match | None = None) -> Match:
        """Return the longest cached prefix of `tokens`: `last` if the tree has not changed since that lookup."""
        if last is not None and last.version == self._tree.version and len(last.tokens) == len(tokens):
            return last
        match = self.restorer.cut(self._public.match(namespace, tokens), self._offloader.worth_loading)
        return match.cut(0, ()) if self.is_on_trial else match

    def probe(self, namespace: str, tokens: bytes) -> CacheProbe:
        """Return the tiers in which a request with this prompt would find its KV now."""
        match = self.match(namespace, tokens[:-WIDTH])
        miss = miss_reason(match, self._ghosts, self.settings.min_shared)
        return probe_of(match, self._offloader.worth_loading(match), len(tokens) // WIDTH, miss)

    def touch(self, matches: Iterable[Match]) -> None:
        """Mark prefixes as used now, so that they are evicted late."""
        now = self._sequences.advance()
        for match in matches:
            self._tree.touch(match.resident_end, now)

    # --- a running request ---

    def acquire(self, slots: Sequence[int], match: Match, *, is_new: bool = True) -> Acquired:
        """Give the resident part of a match to the best of `slots`, all idle, and pin it against eviction."""
        miss = miss_reason(match, self._ghosts, self.settings.min_shared)
        if self.is_on_trial:
            miss = "self_test_pending"
        self._tiers.shares.use(tenant_of(match.namespace), is_new=is_new)
        if self.checkpoints.has_states:
            # Acquiring a slot may offload its old path and take its checkpoint. Neither may evict what this request
            # is about to load from RAM.
            self._tiers.load_pins[_NO_SEQ] = frozenset(part.segment for part in match.parts)
        slot, n_copied = self.pool.acquire(slots, match)
        if pins := self._tiers.load_pins.pop(_NO_SEQ, None):
            self._tiers.load_pins[slot] = pins
        self._tree.touch(self._sequences.end(slot), self._sequences.advance(), hits=1)
        self._tiers.touch(self._tree.match(match.namespace, match.tokens).segments)
        if match.public is not None:
            self._public.mark_used(match.tokens)
        self.pool.ensure_free_id()
        n_resident = self.length(slot)
        n_cached = match.n_cached
        if not self.settings.unified and n_resident < min(match.n_resident, n_cached):
            # The resident prefix was not copied: computing it is faster. So only what segments have, too, is
            # loaded.
            parts = match.parts_from(n_resident)
            n_cached = min(parts[-1].end, n_cached) if parts else n_resident
        self._n_cached_at[slot] = n_cached
        return Acquired(slot, n_cached, n_resident, n_copied, miss)

    def load(self, seq: int, tokens: bytes) -> Loaded:
        """Extend a running sequence by the rest of the cached prefix: copy resident cells, then load segments."""
        if self.is_on_trial or not self.restorer.may_load(seq):
            return Loaded(LoadStatus.DONE)
        match = self._public.match(self._sequences.end(seq).namespace, tokens)
        match = self.restorer.cut_to_pending(seq, match)
        n_copied = self.pool.copy_resident(seq, match)
        if not self.settings.unified and self.length(seq) < min(match.n_resident, match.n_cached):
            # Computing is faster than the copy. Later segments are loaded only if segments cover the gap as well.
            start = self.length(seq)
            match = match.cut(start, match.parts_from(start))
        if n_copied:
            self.pool.deduplicate()
        # In a partitioned pool every load loads the whole sequence again (fact 3), so one large load is cheaper.
        is_limited = self.has_streams and self.settings.unified
        limit = self.settings.max_tokens_in_gap(self.settings.load_us) if is_limited else None
        limit = None if limit is None else max(0, limit - self._n_loaded)
        is_reading = self.restorer.is_reading(seq)
        loaded = self._offloader.load(seq, match, limit, loads_all=self.restorer.is_waiting(seq))
        if is_reading and loaded.status is LoadStatus.DONE:
            loaded = replace(loaded, status=LoadStatus.READING)
        self.restorer.finish(seq)
        if loaded.status is LoadStatus.DONE:
            self.restorer.fall_back(seq)
        self._n_loaded += loaded.n_loaded
        self._counters.loaded_tokens += loaded.n_loaded
        return replace(loaded, n_copied=n_copied)

    def append(self, seq: int, tokens: Tokens) -> None:
        """Append tokens that a running sequence computed."""
        self.pool.append(seq, packed(tokens))
        if len(tokens) > 1:
            self._sequences.clock += len(tokens)
        if self.settings.unified:
            # In a partitioned pool saving any part saves the whole sequence (fact 3): `release` does it once.
            self._public.save_if_public(seq, has_ended=False)

    def truncate(self, seq: int, keep: int) -> None:
        """Truncate a sequence to its first `keep` tokens."""
        self._sequences.truncate(seq, keep)

    def release(self, seq: int) -> None:
        """Unpin a slot whose request ended or was preempted; its KV stays cached if the model allows reuse."""
        self._tiers.unpin(seq)
        self.restorer.cancel(seq)
        end = self._tree.end_node(seq)
        n_cached = self._n_cached_at.pop(seq, 0)
        if end is None:
            return
        if not is_private(end.namespace):
            self._ghosts.add(end.namespace, end.prefix(), n_cached)
        if end.is_root:
            self._tree.release(seq)
        else:
            self._tree.unpin(seq, self._sequences.advance())
            self._public.save_if_public(seq, has_ended=True)
        if not self.settings.can_reuse:
            self._sequences.clear(seq)

    def invalidate(self, seq: int) -> None:
        """Remove a sequence whose content is unknown after a failed decode."""
        self._tiers.unpin(seq)
        self.restorer.cancel(seq)
        end = self._tree.end_node(seq)
        if end is not None:
            self._tree.touch(end, self._sequences.advance())
            self._tree.release(seq)
        self._sequences.reset(seq)

    # --- a step ---

    def tick(self, now: float, *, is_stopping: bool = False) -> None:
        """Begin a plan: remove duplicate cells, enforce the RAM budget, time out reads, start due writes.

        `is_stopping` makes every write due, because the server is shutting down.
        """
        self.pool.deduplicate()
        if is_stopping:
            self._policy.flush(now)
        self._policy.keep_ram_budget(self.ram_budget.n_bytes)
        self._tiers.tick(now)
        self.remote.tick()
        if self.settings.ram_bytes:
            self.checkpoints.keep_budget(self.ram_budget.n_bytes / self.settings.ram_bytes)
        self._n_loaded = 0

    def offload_idle(self, n_prefill: int, wanted: Callable[[], Iterable[Match]]) -> None:
        """Offload idle prefixes that would slow `n_prefill` prompt tokens by more than saving and reloading costs.

        `wanted` returns the matches of waiting requests, which stay in the pool.
        """
        if n_prefill and self._policy.slows_prefill(n_prefill):
            self.touch(wanted())
            self._policy.offload_idle(n_prefill)

    def vacate(self) -> bool:
        """Offload all idle prefixes if RAM can take them without evicting anything; True if any were evicted."""
        settings, size = self.settings, self.settings.segment_size
        ram = self._tiers.ram
        if not settings.offloads or size is None or ram.n_bytes + size.of(self.cells.used) > ram.capacity:
            return False
        return self._offloader.evict(self.cells.total) > 0

    @property
    def can_empty_pool(self) -> bool:
        """True if RAM can take what leaves the pool: the tier is on, and host memory is not short."""
        settings, tiers = self.settings, self._tiers
        is_short = tiers.ram.capacity < settings.min_ram_for_idle or tiers.now < tiers.saves_again_at
        return settings.offloads and not is_short

    def empty_pool(self) -> None:
        """Evict everything from the pool, to RAM as far as it fits. No request may be running."""
        self.pool.deduplicate()
        self._offloader.evict(self.cells.total)
        for seq in self._sequences.all:
            self._sequences.clear(seq)

    def set_layout(self, *, unified: bool, n_seqs: int) -> None:
        """Switch to a context of another layout, after `empty_pool`."""
        settings = self.settings
        settings.unified, settings.n_seqs = unified, n_seqs
        self._sequences.set_layout(n_seqs=settings.n_path_seqs, shares_cells=settings.shares_cells)
        # Ends the record of ranges that were offloaded ahead, which names the sequences of the old layout.
        self._sequences.advance()
        self._tree.version += 1
        self._counters.layout_changes += 1

    def evict(self, n_cells: int) -> int:
        """Evict `n_cells` idle cells, or all there are; returns how many."""
        return self._offloader.evict(n_cells)

    def maintain(self, now: float, *, is_running: bool, is_busy: bool) -> Deadlines:
        """End a plan: enforce the budget of idle cells, offload ahead; returns when the cache needs the next plan.

        `is_busy` is True if requests run or wait.
        """
        self._policy.keep_idle_budget()
        if self.settings.copies_running and is_running:
            self._policy.offload_for_disk(now)
        self._policy.offload_while_idle(now, is_busy=is_busy)
        return self._policy.deadlines

    def take_operations(self) -> list[Operation]:
        """Return the KV operations that the backend must execute, in this order, before it decodes."""
        self._offloader.free_evicted()
        operations, self._sequences.operations = self._sequences.operations, []
        return operations

    def take_jobs(self) -> list[Job]:
        """Return the disk jobs to start once the operations taken before are done."""
        return self._tiers.take_jobs()

    def on_io(self, event: IoEvent, now: float) -> range | None:
        """Handle the result of a disk job or a save; returns the positions of a segment that was read.

        The caller then hands its bytes to the backend. None if nothing was read, or if it is no longer wanted.
        """
        segment = self._tiers.on_io(event, now)
        # If a segment was dropped, its node may be gone, and with it a checkpoint.
        self._offloader.free_evicted()
        return range(segment.start, segment.end) if segment is not None else None

    # --- slot files ---

    def save_slot(self, seq: int) -> SlotSave:
        """Record operations that save everything an idle slot holds. Raises `UnsavableSlotError`.

        The backend has the bytes from the end of the next operations until `SlotSaved` is reported.
        """
        self.pool.deduplicate()
        return self._snapshots.save(seq)

    def restore_slot(self, seq: int, snapshot: SlotSnapshot) -> dict[int, SnapshotPart] | None:
        """Replace the content of an idle slot by a snapshot; returns KV for the backend, by segment number.

        The backend needs that KV before the next operations. None if running requests leave too few cells.
        The slot's old path moves to a spare sequence.
        """
        self.pool.deduplicate()
        n_tokens = len(snapshot.tokens) // WIDTH
        self.window_cells.evict(min(n_tokens, self.settings.checkpoints.n_swa), kept=(seq,))
        return self._snapshots.restore(seq, snapshot)

    # --- inspection ---

    def stats(self) -> CacheStats:
        """Statistics of the cache, in constant time; the scheduler adds what requests reused."""
        settings = self.settings
        return structs.replace(
            self._counters,
            cells=self.cells,
            ram=ram_stats(self._tiers, self.ram_budget),
            disk=disk_stats(self._tiers),
            remote=self.remote.stats,
            checkpoints=self.checkpoints.stats,
            sequences=SequenceStats(settings.n_slots, settings.n_spare, self._sequences.n_in_use, settings.n_seqs),
        )

    def listing(
        self, stats: CacheStats, top: int, detokenize: Callable[[Sequence[int]], bytes] | None
    ) -> CacheState:
        """Statistics, the `top` prefixes of the tree (as text too if `detokenize` is given), and all tenants."""
        listing = tree_listing(self._tree, stats, top, detokenize)
        listing.tenants = tenant_stats(self._tree, self._tiers)
        return listing

    def check(self, range_of: Callable[[int], range]) -> None:
        """Verify all invariants while no operation is pending; raises `AssertionError`.

        `range_of` returns the positions that a sequence holds in the backend.
        """
        assert not self._sequences.operations
        self._tiers.check(self._tree.check())
        self.restorer.check()
        self._sequences.duplicates.check()
        for seq in self._sequences.all:
            assert range_of(seq) == range(self.length(seq)), f"sequence {seq}"
            assert seq in self._sequences.slots or not self._tree.is_pinned(seq)
            assert self._tree.is_pinned(seq) or seq not in self._tiers.load_pins, f"sequence {seq} keeps segments"
        assert self.settings.scratch is None or range_of(self.settings.scratch) == range(0)
        assert 0 <= self.cells.used <= self.settings.pool_cells
