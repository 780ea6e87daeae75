"""KVCache: the interface of the prefix cache to scheduler and engine.

                         request: match -> acquire a slot -> load -> append ... -> release
                                    |
    slot (sequence id) --> path in the radix tree --> node --> cells of the pool
                                                       |
                                                       +-----> segment --> RAM, disk (`tiers/`)

A plan changes the tree at once and records a KV operation for each change; the next step carries the operations out
in order, before it decodes. Disk jobs are handed out the same way, and their results come back through `on_io`.
What a decode really computed is reported by `append` and `invalidate`.

Calls of a step: tick, acquire and load for requests, offload_idle, evict if the step lacks cells, maintain, then
take the operations and jobs.

Callers use the methods of `KVCache`, and its values `settings` and `cells`. Five collaborators are handed over as a
whole: `remote` to the scheduler and to the worker that fetches and uploads, `ram_budget` to the watch of free
memory, `checkpoints` to the scheduler's `CheckpointTaker`, `pins` to the scheduler, and `dropper` to whoever drops
prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from llamaslot.base.advice import HitCurve, SizeAdvice
from llamaslot.base.kv_ops import Copy, Free, Load, Operation, Restore
from llamaslot.base.model import SegmentSize
from llamaslot.base.namespaces import is_private, is_shifted, tenant_of
from llamaslot.base.stats import (
    CacheProbe,
    CacheState,
    CacheStats,
    CellStats,
    RamStats,
    SequenceStats,
    TierStats,
)
from llamaslot.base.tokens import WIDTH, Tokens, packed, unpacked
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.disk_io import IoEvent, Job, SegmentMeta
from llamaslot.kvcache.dropping import Dropper
from llamaslot.kvcache.ghost_list import GhostList
from llamaslot.kvcache.loading import Loader, PublicPrefix, StateRestorer
from llamaslot.kvcache.match import Acquired, Deadlines, LoadResult, LoadStatus, Match, miss_reason
from llamaslot.kvcache.offloading import Offloader, OffloadPolicy
from llamaslot.kvcache.pins import Pins
from llamaslot.kvcache.pool import Pool, WindowCells
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.slot_snapshots import SlotSave, SlotSnapshot, SlotSnapshots, SnapshotPart
from llamaslot.kvcache.tiers.budget import RamBudget
from llamaslot.kvcache.tiers.checkpoints import Checkpoints
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.remote_tier import RemoteTier
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers
from llamaslot.kvcache.tree_listing import tree_listing

_MORE_BYTES = 2 * 2**30
"""RAM or disk that might be added, of which the advice says what it brings."""
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
        self._tree = RadixTree()
        self._sequences = Sequences(self._tree, settings)
        self._tiers = SegmentTiers(self._tree, settings)
        self._disk = DiskTier(self._tiers, self._tree, settings)
        self.ram_budget = RamBudget(self._tiers.ram.capacity, is_fixed=settings.budgets.ram_is_fixed)
        """Follows free memory; `tick` evicts what exceeds it."""
        self.checkpoints = Checkpoints(self._tree, self._sequences, settings.checkpoints, self._tiers)
        """Copies of partial states, for models that have one."""
        shared = self._tree, self._sequences, self._tiers
        self._offloader = Offloader(*shared, settings, self.checkpoints)
        self._loader = Loader(*shared, self._disk, self._offloader, settings)
        self._restorer = StateRestorer(*shared, self._disk, self.checkpoints, self._loader, settings)
        self._policy = OffloadPolicy(
            settings, *shared, self._disk, self._offloader, self.checkpoints, lambda: self.has_decodes
        )
        self._public = PublicPrefix(self._tree, self._tiers, self._disk, self._offloader)
        self.remote = RemoteTier(
            self._tree,
            self._tiers,
            self._disk,
            self.checkpoints,
            settings=settings,
            prefill_seconds=prefill_seconds,
        )
        """KV that several servers share."""
        self._pool = Pool(*shared, settings, self._offloader, self.checkpoints, self._restorer)
        self._window_cells = WindowCells(self._tree, self._sequences, self.checkpoints, self._offloader, settings)
        self.dropper = Dropper(*shared, self._offloader)
        """Drops prefixes everywhere."""
        self._snapshots = SlotSnapshots(self._tree, self._sequences, self._pool, self._offloader, self.checkpoints)
        self._ghosts = GhostList()
        self.pins = Pins(self._tree, self._tiers, settings)
        """Prefixes that are evicted last."""
        self._n_loaded = 0
        """Tokens loaded in this step."""
        self.has_decodes = False
        """True if requests decode in this step, so that it may save and load only as much as fits into `gap_ms`."""
        self.ignored = self._disk.adopt(on_disk, first_number)
        """Numbers of segments on disk that are too large to be used."""

    # --- lookups ---

    @property
    def cells(self) -> CellStats:
        """Used, idle, pinned and free cells, as of the operations recorded so far."""
        total, used, idle = self.settings.pool_cells, self._sequences.n_cells, self._tree.n_idle_tokens
        if not self.settings.shares_cells:
            idle += self._sequences.n_idle_duplicates
        return CellStats(total, used, idle, pinned=used - idle, free=total - used)

    def length(self, seq: int) -> int:
        """Number of tokens that a sequence holds."""
        return self._tree.length(seq)

    def continuation(self, seq: int, token: int, n: int) -> Tokens:
        """Return up to `n` tokens that followed a sequence's tokens and `token` before; empty if none are known."""
        return unpacked(self._tree.continuation(seq, token.to_bytes(WIDTH, "little"), n))

    def search(self, namespace: str, last: Tokens, n_least: int, n: int) -> tuple[int, Tokens]:
        """Return how many of the `last` tokens of a text occur in a namespace, and up to `n` that follow there.

        (0, no tokens) if fewer than `n_least` of them occur in the texts that were used last.
        """
        n_matched, follows = self._tree.search(namespace, packed(last), n_least, n)
        return n_matched, unpacked(follows)

    def match(self, namespace: str, tokens: bytes, last: Match | None = None) -> Match:
        """Return the longest cached prefix of `tokens`: `last` if the tree has not changed since that lookup."""
        if last is not None and last.version == self._tree.version and len(last.tokens) == len(tokens):
            return last
        match = self._restorer.cut(self._public.match(namespace, tokens))
        return match.cut(0, ()) if self.settings.is_on_trial else match

    def probe(self, namespace: str, tokens: bytes) -> CacheProbe:
        """Return the tiers in which a request with this prompt would find its KV now."""
        match = self.match(namespace, tokens[:-WIDTH])
        in_ram = on_disk = 0
        for part in self._loader.worth_loading(match):
            if part.segment.state.is_loadable:
                in_ram += part.end - part.start
            else:
                on_disk += part.end - part.start
        n_tokens = len(tokens) // WIDTH
        return CacheProbe(
            prompt_tokens=n_tokens,
            cells=match.n_resident,
            ram=in_ram,
            disk=on_disk,
            computed=n_tokens - match.n_cached,
            matched=match.n_matched,
            miss=miss_reason(match, self._ghosts, self.settings.min_shared) or None,
        )

    def can_hold(self, match: Match, n_tokens: int, running: Mapping[int, int]) -> bool:
        """True if a request of `n_tokens` fits into a unified pool beside the running ones.

        `running` has the expected length of each of these by its slot. Idle cells count as free, except those of
        the request's own prefix.
        """
        settings = self.settings
        if not self._window_cells.fits([n_tokens, *running.values()]):
            return False
        n_kept = match.n_resident - match.n_idle if settings.shares_cells else 0
        n_reserved = sum(n - self.length(slot) for slot, n in running.items())
        cells = self.cells
        n_missing = cells.pinned + n_reserved + n_tokens - n_kept - cells.total
        # The request may get tokens that running requests hold in cells that are idle duplicates now. Those become
        # pinned, so they cannot be counted as free.
        return n_missing <= 0 or n_missing + n_kept <= self._sequences.n_idle_duplicates

    def can_share(self, seq: int, n: int) -> bool:
        """True if another request can continue from the first `n` tokens of a running sequence once it has these.

        For a model with a partial state that takes a checkpoint, which the sequence must not have passed.
        """
        return not self.settings.has_states or (self.length(seq) <= n and self.checkpoints.can_take(n))

    def touch(self, matches: Iterable[Match]) -> None:
        """Mark prefixes as used now, so that they are evicted late."""
        now = self._sequences.advance()
        for match in matches:
            self._tree.touch(match.resident_end, now)

    # --- a running request ---

    def acquire(
        self, slots: Sequence[int], match: Match, *, is_new: bool = True, apart: Sequence[int] = ()
    ) -> Acquired:
        """Give the resident part of a match to the best of `slots`, all idle, and pin it against eviction.

        No step computes it together with the slots `apart`.
        Where sliding windows have few cells, idle sequences are evicted until the match's window fits.
        """
        self._window_cells.evict_for(match)
        match = self.match(match.namespace, match.tokens, match)
        miss = miss_reason(match, self._ghosts, self.settings.min_shared)
        if self.settings.is_on_trial:
            miss = "self_test_pending"
        self._tiers.shares.use(tenant_of(match.namespace), is_new=is_new)
        if self.settings.has_states:
            # Acquiring a slot may offload its old path and take its checkpoint. Neither may evict what this request
            # is about to load from RAM.
            self._tiers.load_pins[_NO_SEQ] = frozenset(part.segment for part in match.parts)
        slot, n_copied = self._pool.acquire(slots, match, apart)
        if pins := self._tiers.load_pins.pop(_NO_SEQ, None):
            self._tiers.load_pins[slot] = pins
        now = self._sequences.advance()
        self._tree.touch(self._sequences.end(slot), now, hits=1)
        self._tiers.touch(self._tree.match(match.namespace, match.tokens).segments)
        self.pins.use(now)
        if match.public is not None:
            self._public.mark_used(match.namespace, match.tokens)
        self._pool.ensure_free_id()
        n_resident = self.length(slot)
        n_cached = match.n_cached
        if not self.settings.unified and n_resident < min(match.n_resident, n_cached):
            # The resident prefix was not copied: computing it is faster. So only what segments have, too, is
            # loaded.
            parts = match.parts_from(n_resident)
            n_cached = min(parts[-1].end, n_cached) if parts else n_resident
        n_lost = 0
        if is_new and not is_private(match.namespace):
            n_lost = self._ghosts.count(match.namespace, match.tokens, n_cached)
        return Acquired(slot, n_cached, n_resident, n_copied, miss, n_lost)

    def load(self, seq: int, tokens: bytes) -> LoadResult:
        """Extend a running sequence by the rest of the cached prefix: copy resident cells, then load segments."""
        if self.settings.is_on_trial or not self._restorer.may_load(seq):
            return LoadResult(LoadStatus.DONE)
        match = self._public.match(self._sequences.end(seq).namespace, tokens)
        match = self._restorer.cut_to_pending(seq, match)
        n_copied = self._pool.copy_resident(seq, match)
        if not self.settings.unified and self.length(seq) < min(match.n_resident, match.n_cached):
            # Computing is faster than the copy. Later segments are loaded only if segments cover the gap as well.
            # Models with a partial state have none: only those that can cut a sequence save in a partitioned pool.
            start = self.length(seq)
            match = match.cut(start, match.parts_from(start)).before_tile()
        if n_copied:
            self._pool.deduplicate()
        # In a partitioned pool every load loads the whole sequence again (fact 3), so one large load is cheaper.
        is_limited = self.has_decodes and self.settings.unified
        limit = self.settings.max_tokens_in_gap(self.settings.cost.load_us) if is_limited else None
        limit = None if limit is None else max(0, limit - self._n_loaded)
        is_reading = self._restorer.is_reading(seq)
        loaded = self._loader.load(seq, match, limit, loads_all=self._restorer.is_waiting(seq))
        if is_reading and loaded.status is LoadStatus.DONE:
            loaded = replace(loaded, status=LoadStatus.READING)
        self._restorer.finish(seq)
        if loaded.status is LoadStatus.DONE:
            self._restorer.fall_back(seq)
        self._n_loaded += loaded.n_loaded
        self._tiers.counters.loaded_tokens += loaded.n_loaded
        return replace(loaded, n_copied=n_copied)

    def lacks_state(self, seq: int) -> bool:
        """True if a running sequence cannot be decoded yet, because its partial state is not restored."""
        return self._restorer.lacks_state(seq)

    def append(self, seq: int, tokens: Tokens, *, is_draft: bool = False) -> None:
        """Append tokens that a running sequence computed; with `is_draft`, all but the first were drafted."""
        self._sequences.append(seq, packed(tokens))
        if len(tokens) > 1 and not is_draft:
            self._sequences.clock += len(tokens)
        if self.settings.unified:
            # In a partitioned pool saving any part saves the whole sequence (fact 3): `release` does it once.
            self._public.save_if_public(seq, has_ended=False)

    def truncate(self, seq: int, keep: int) -> None:
        """Truncate a sequence to its first `keep` tokens, or to where a tile begins that they would cut."""
        self._sequences.truncate(seq, keep)

    def shift(self, seq: int, namespace: str, start: int, end: int) -> None:
        """Discard tokens `[start, end)` of a running sequence, which holds the rest in a shifted namespace then.

        That KV is not the KV of its tokens, so it is neither shared nor saved, and is gone once the slot is
        released. What was computed before the first shift stays cached. The sequence is empty if there are not
        enough cells for the rest.
        """
        if not is_shifted(self._sequences.end(seq).namespace):
            self.release(seq)
        self._pool.shift(seq, namespace, start, end)
        self._tiers.counters.context_shifts += 1

    def release(self, seq: int) -> None:
        """Unpin a slot whose request ended or was preempted; its KV stays cached if the model allows reuse, unless
        it was shifted.
        """
        self._tiers.load_pins.pop(seq, None)
        self.checkpoints.pending_restores.pop(seq, None)
        end = self._tree.end_node(seq)
        if end is None:
            return
        if not is_private(end.namespace):
            self._ghosts.add(end.namespace, end.prefix())
        if is_shifted(end.namespace):
            self._sequences.clear(seq)
            return
        if end.is_root:
            self._tree.release(seq)
        else:
            now = self._sequences.advance()
            self._tree.unpin(seq, now)
            self.pins.use(now)
            self._public.save_if_public(seq, has_ended=True)
        if not self.settings.can_reuse:
            self._sequences.clear(seq)

    def invalidate(self, seq: int) -> None:
        """Remove a sequence whose content is unknown after a failed decode."""
        self._tiers.load_pins.pop(seq, None)
        self.checkpoints.pending_restores.pop(seq, None)
        end = self._tree.end_node(seq)
        if end is not None:
            self._tree.touch(end, self._sequences.advance())
            self._tree.release(seq)
        self._sequences.reset(seq)

    # --- failed steps ---

    def on_save_failed(self, numbers: Collection[int], now: float) -> None:
        """Handle segments that the backend had no memory to save."""
        self._tiers.on_save_failed(numbers, now)
        self._offloader.free_evicted()

    def on_incomplete(self, operations: Iterable[Operation], seqs: Collection[int], now: float) -> None:
        """Handle operations that failed in some sequences; the caller invalidates these."""
        loads = (Load,) if self.settings.unified else (Load, Copy)
        for each in operations:
            if isinstance(each, loads) and each.dst in seqs:
                self._tiers.on_load_failed(now)
            elif isinstance(each, Restore) and each.dst in seqs:
                # Or it would be tried again and again.
                failed = self._tiers.checkpoints.get(each.checkpoint)
                self._tiers.drop([failed] if failed is not None else [])
        self._offloader.free_evicted()

    def on_step_failed(self, starts: Mapping[int, int]) -> None:
        """Handle a decode that left partial states unknown; `starts` has the tokens held before it by sequence."""
        self._sequences.states.fail(starts, {seq: self.length(seq) for seq in self._sequences.all})
        self._tree.version += 1

    def recover_states(self, seqs: Iterable[int]) -> None:
        """After a failed step, truncate running sequences that lost their state to their deepest checkpoint.

        Those that still wait for a state keep what they hold.
        """
        for seq in seqs:
            if not self._restorer.is_waiting(seq):
                self._restorer.fall_back(seq)

    # --- a step ---

    def tick(self, now: float, *, is_stopping: bool = False) -> None:
        """Begin a plan: remove duplicate cells, enforce the RAM budget, time out reads, start due writes.

        `is_stopping` makes every write due, because the server is shutting down.
        """
        self._pool.deduplicate()
        if is_stopping:
            self._policy.flush(now)
        self._tiers.keep_budget(self.ram_budget.n_bytes)
        self._disk.tick(now)
        self.remote.tick()
        if self.settings.budgets.ram_bytes:
            self.checkpoints.keep_budget(self.ram_budget.n_bytes / self.settings.budgets.ram_bytes)
        self._n_loaded = 0

    def offload_idle(self, n_prefill: int, wanted: Callable[[], Iterable[Match]]) -> None:
        """Offload idle prefixes that would slow `n_prefill` prompt tokens by more than saving and reloading costs.

        `wanted` returns the matches of waiting requests, which stay in the pool.
        """
        if n_prefill and self._policy.slows_prefill(n_prefill):
            self.touch(wanted())
            self._policy.offload_idle(n_prefill)

    def free_cells(self, n_cells: int, n_least: int) -> int:
        """Evict idle cells until a step can fill `n_cells`; returns how many it can fill.

        If windows have few cells, sequences without a state are evicted only until `n_least` are free.
        """
        if self.cells.free < n_cells:
            self.evict(n_cells - self.cells.free)
        self._window_cells.evict(n_cells, n_least=n_least)
        return self._window_cells.limit(self.cells.free)

    def limit_by_windows(self, n_tokens: int, n_granted: int) -> int:
        """Return how many of `n_tokens` fit into the windows' cells in addition to `n_granted` tokens."""
        return self._window_cells.limit(n_tokens, n_granted)

    def vacate(self) -> bool:
        """Offload all idle prefixes if RAM can take them without evicting anything; True if any were evicted."""
        settings, size, tiers = self.settings, self.settings.segment_size, self._tiers
        if not settings.offloads or size is None or not tiers.may_save:
            return False
        ram = tiers.ram
        if ram.n_bytes + size.of(self.cells.used) > ram.capacity:
            return False
        if any(ram.exceeds_limit(each, ram.used[each] + size.of(n)) for each, n in self._tree.n_tokens_of.items()):
            return False
        return self.checkpoints.have_room_for_ends and self._offloader.evict(self.cells.total) > 0

    @property
    def can_empty_pool(self) -> bool:
        """True if RAM can take what leaves the pool: the tier is on, and host memory is not short."""
        settings, tiers = self.settings, self._tiers
        return settings.offloads and tiers.may_save and tiers.ram.capacity >= settings.min_ram_for_idle

    def empty_pool(self) -> None:
        """Evict everything from the pool, to RAM as far as it fits. No request may be running."""
        self._pool.deduplicate()
        self._offloader.evict(self.cells.total)
        for seq in self._sequences.all:
            self._sequences.clear(seq)

    def set_layout(self, *, unified: bool, n_seqs: int) -> None:
        """Switch to a context of another layout, after `empty_pool`."""
        settings = self.settings
        settings.unified, settings.n_seqs = unified, n_seqs
        self._sequences.set_layout(settings)
        # Ends the record of ranges that were offloaded ahead, which names the sequences of the old layout.
        self._sequences.advance()
        self._tree.version += 1
        self._tiers.counters.layout_changes += 1

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
        return self._policy.deadlines()

    def take_operations(self) -> list[Operation]:
        """Return the KV operations that the backend must execute, in this order, before it decodes."""
        self._offloader.free_evicted()
        operations, self._sequences.operations = self._sequences.operations, []
        return operations

    def take_jobs(self) -> list[Job]:
        """Return the disk jobs to start once the operations taken before are done."""
        return self._tiers.take_jobs()

    def on_io(self, event: IoEvent, now: float) -> range | None:
        """Handle the result of a disk job; returns the positions of a segment that was read.

        The caller then hands its bytes to the backend. None if nothing was read, or if it is no longer wanted.
        """
        segment = self._disk.on_io(event, now)
        # If a segment was dropped, its node may be gone, and with it a checkpoint.
        self._offloader.free_evicted()
        return range(segment.start, segment.end) if segment is not None else None

    # --- slot files ---

    def save_slot(self, seq: int) -> SlotSave:
        """Record operations that save everything an idle slot holds. Raises `UnsavableSlotError`.

        The backend has the bytes from the end of the next operations until `free_saved`.
        """
        self._pool.deduplicate()
        return self._snapshots.save(seq)

    def free_saved(self, numbers: Iterable[int]) -> None:
        """Free the bytes of a saved slot with the next plan."""
        self._sequences.operations += map(Free, numbers)

    def load_slot(self, seq: int, snapshot: SlotSnapshot) -> dict[int, SnapshotPart] | None:
        """Replace the content of an idle slot by a snapshot; returns KV for the backend, by segment number.

        The backend needs that KV before the next operations. None if running requests leave too few cells.
        The slot's old path moves to a spare sequence.
        """
        self._pool.deduplicate()
        n_tokens = len(snapshot.tokens) // WIDTH
        self._window_cells.evict(min(n_tokens, self.settings.checkpoints.n_swa), kept=(seq,))
        return self._snapshots.load(seq, snapshot)

    # --- inspection ---

    def stats(self) -> CacheStats:
        """Statistics of the cache, in constant time; the scheduler adds what requests reused."""
        settings, ram, budget = self.settings, self._tiers.ram, self.ram_budget
        # Of a shared pool's ids, those that keep no idle prefix while all slots run: the scratch sequence, and for
        # models that can be truncated the id that stays free to move a path to.
        n_free = (1 + settings.can_trim) * settings.shares_cells
        n_spare = max(0, settings.n_seqs - settings.n_slots - n_free)
        n_used = sum(map(self._sequences.in_use, self._sequences.all))
        return structs.replace(
            self._tiers.counters,
            cells=self.cells,
            ram=RamStats(
                total_bytes=budget.n_bytes,
                used_bytes=ram.n_bytes,
                tokens=ram.n_tokens,
                segments=len(ram),
                max_bytes=budget.max_bytes,
                saved_bytes=self._tiers.counters.ram.saved_bytes,
                state=budget.state.value,
                reason=budget.reason,
            ),
            disk=self._disk.stats,
            remote=self.remote.stats,
            checkpoints=self.checkpoints.stats,
            sequences=SequenceStats(settings.n_slots, n_spare, n_used, settings.n_seqs),
            pins=self.pins.stats,
        )

    def listing(
        self, stats: CacheStats, top: int, detokenize: Callable[[Sequence[int]], bytes] | None
    ) -> CacheState:
        """Statistics, the `top` prefixes of the tree (as text too if `detokenize` is given), and all tenants."""
        listing = tree_listing(self._tree, stats, top, detokenize, self.pins.nodes())
        listing.tenants = self._tiers.tenant_stats()
        return listing

    def hit_curve(self, hit_rate: float) -> HitCurve:
        """Return the measured hit rate with those that are predicted for other sizes of RAM and disk.

        In time proportional to the tree.
        """
        size, ram, disk = self.settings.segment_size, self._tiers.ram, self._disk.stats
        if size is None or not size.per_token or not self._ghosts.n_tokens:
            # Without bytes per token (recurrent models), the size of a tier does not say how many tokens it keeps.
            return HitCurve(hit_rate)
        n_pool_only = sum(
            node.n_tokens
            for node in self._tree.nodes()
            if node.is_resident and (node.segment is None or node.segment not in ram)
        )
        n_in_ram = n_pool_only + _n_tokens(self.ram_budget.n_bytes, ram.n_bytes, ram.n_tokens, size)

        def rates(tier: TierStats, n_more: int, n_least: int) -> tuple[SizeAdvice, ...]:
            now = tier.total_bytes
            sizes = sorted({now // 2, now, now + _MORE_BYTES, now * 2, now * 4})
            n_kept = [n_more + _n_tokens(each, tier.used_bytes, tier.tokens, size) for each in sizes]
            return tuple(
                SizeAdvice(each, self._ghosts.hit_rate(max(n, n_least)), is_current=each == now)
                for each, n in zip(sizes, n_kept, strict=True)
            )

        of_ram = TierStats(self.ram_budget.n_bytes, ram.n_bytes, ram.n_tokens)
        return HitCurve(
            hit_rate,
            rates(of_ram, n_pool_only, 0),
            rates(disk, 0, n_in_ram) if disk.total_bytes else (),
        )

    def check(self, range_of: Callable[[int], range]) -> None:
        """Verify all invariants while no operation is pending; raises `AssertionError`.

        `range_of` returns the positions that a sequence holds in the backend.
        """
        assert not self._sequences.operations
        self._tiers.check(self._tree.check())
        self._restorer.check()
        self._sequences.duplicates.check()
        for seq in self._sequences.all:
            assert range_of(seq) == range(self.length(seq)), f"sequence {seq}"
            assert seq in self._sequences.slots or not self._tree.is_pinned(seq)
            assert self._tree.is_pinned(seq) or seq not in self._tiers.load_pins, f"sequence {seq} keeps segments"
        for node in self._tree.nodes():
            if is_shifted(node.namespace):
                assert node.n_pins == len(list(node.holders())) == 1, "shifted KV is shared or idle"
                assert node.segment is node.checkpoint is None, "shifted KV is saved"
        assert self.settings.scratch is None or range_of(self.settings.scratch) == range(0)
        assert 0 <= self.cells.used <= self.settings.pool_cells


def _n_tokens(n_bytes: int, used_bytes: int, used_tokens: int, size: SegmentSize) -> int:
    """Return how many tokens fit into a tier of `n_bytes`, in segments such as it has."""
    return int(n_bytes * used_tokens / used_bytes) if used_bytes else n_bytes // size.per_token
