"""Offload of KV from the pool to segments in RAM, and when that is done. `loading.py` loads it back.

Each token is offloaded once, however many sequences hold it. The policy:

- Idle cells slow prefill in a unified pool, because attention scans it up to the highest used cell (fact 5). A
  prefix is offloaded once it has slowed the prompt tokens computed since its last use by more time than saving and
  loading it takes.
- Freed cells are scanned too if a used cell lies above them. The policy does not know where cells lie. It assumes
  that the cells it frees in a step, unless the prompt fills them again, lie below all remaining idle prefixes, and
  multiplies `offload_after` by idle / (idle + free).
- Idle prefixes keep at most `idle_cells`.
- While the server is idle, idle prefixes are copied to RAM, so that evicting them for the next prompt is quick.
- With a disk or a remote tier, KV of running requests is copied to RAM as well, a segment at a time, to be written
  or uploaded from there.
- While memory is short (`RamBudget`), idle prefixes stay in the pool until their cells are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamaslot.base.kv_ops import Free, Save
from llamaslot.base.namespaces import is_private
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.match import Deadlines
from llamaslot.kvcache.nodes import Node, Segment
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.checkpoints import Checkpoints
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers


@dataclass(eq=False)
class Offloader:
    """Evicts idle cells, and saves their KV to segments.

    Without a RAM tier it only evicts, and counts evicted tokens.
    """

    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _settings: CacheSettings
    _checkpoints: Checkpoints
    _ahead_at: int = -1
    _offloaded_ahead: set[tuple[int, int, int]] = field(default_factory=set)
    """Sequence and range of what was offloaded ahead since the clock stood at `_ahead_at`. None is offloaded twice:
    otherwise, if RAM is smaller than the pool, ranges would evict each other without end.
    """

    def evict(self, n_cells: int, before: int | None = None) -> int:
        """Evict `n_cells` idle cells, or as many as there are; returns how many, without the rests of tiles.

        They are offloaded as far as they fit into RAM. `before` limits this to prefixes last used before that
        logical time. Without it, tenants with more than their share of the cells lose theirs first.
        """
        excess = None
        if before is None:
            beyond = self._tiers.shares.excess(self._tree.n_tokens_of, self._settings.pool_cells)
            # If no tenant has more than its share, plain LRU gives the same result faster.
            excess = beyond if max(beyond.values(), default=0) > 0 else None
        n_wanted = self._n_free + n_cells
        plan = self._tree.eviction.plan(n_cells, before, excess)
        for seq, start, end in plan.evicted:
            # What would be left of a tile goes too.
            is_last = plan.keeps[seq] == start
            self.offload_evicted(seq, self._sequences.before_tile(seq, start) if is_last else start, end)
        for seq, keep in sorted(plan.keeps.items(), key=lambda item: item[1] == 0):
            # Heirs, which keep tokens, come first: a node must not lose its last holder before its heir ends there.
            self._sequences.truncate(seq, keep)
        if plan.n_cells < n_cells and before is None:
            self._evict_duplicates(n_wanted)
        return plan.n_cells

    def can_free(self, n_cells: int, n_kept_duplicates: int) -> bool:
        """True if `n_cells` are free or idle, though `n_kept_duplicates` idle duplicates may have to stay."""
        if not self._settings.unified:
            return True
        n_missing = n_cells - self._n_free - self._tree.n_idle_tokens
        return n_missing <= max(0, self._sequences.n_idle_duplicates - n_kept_duplicates)

    def free_cells(self, n_cells: int) -> bool:
        """Evict idle cells until `n_cells` are free, or none if that is impossible; True if enough are free.

        In a partitioned pool that is always so, since each sequence has cells for as many tokens as it may hold.
        """
        if not self._settings.unified:
            return True
        n_missing = n_cells - self._n_free
        if 0 < n_missing <= self._tree.n_idle_tokens + self._sequences.n_idle_duplicates:
            self.evict(n_missing)
        return self._n_free >= n_cells

    def offload_evicted(self, seq: int, start: int, end: int) -> None:
        """Offload `[start, end)` of a sequence, which is about to leave the pool, as far as it fits into RAM."""
        if start == end:
            return
        n_missing = n = end - start
        if self._tiers.ram.capacity:
            self._offload(seq, self._missing(seq, start, end), end)
            n_missing = sum(b - max(a, start) for a, b in self._missing(seq, start, end))
            if not n_missing and end == self._tree.length(seq):
                self._checkpoints.take_before_end_is_evicted(seq)
        self._tiers.counters.evicted_tokens += n_missing
        self._tiers.counters.offloaded_tokens += n - n_missing

    def offload_ahead(self, max_tokens: int, *, with_running: bool) -> int:
        """Save about `max_tokens` resident tokens that no segment covers; they stay resident. Returns how many.

        `with_running` includes what running requests hold, except for private namespaces and for the last range if
        it is partial: it still grows, and would be saved again and again.
        """
        if self._ahead_at != self._sequences.clock:
            self._ahead_at, self._offloaded_ahead = self._sequences.clock, set()
        tree = self._tree
        n_done = 0
        for seq in self._sequences.all:
            node = tree.end_node(seq)
            runs = tree.is_pinned(seq)
            if node is None or (runs and (not with_running or is_private(node.namespace))):
                continue
            ranges = self._missing_of_path(seq, with_partial=not runs)
            if not self._offloaded_ahead.isdisjoint((seq, *each) for each in ranges):
                continue
            done = self._offload(seq, ranges, node.end, max_tokens - n_done)
            self._offloaded_ahead.update((seq, *each) for each in done)
            n_done += _n_tokens(done)
            if n_done >= max_tokens:
                break
        return n_done

    def offload_path(self, seq: int, *, with_partial: bool) -> None:
        """Save the part of a sequence that no segment covers; it stays resident.

        `with_partial` includes the last range even if it does not fill a segment.
        """
        ranges = self._missing_of_path(seq, with_partial=with_partial)
        self._offload(seq, ranges, self._tree.length(seq))

    def free_evicted(self) -> None:
        """Record operations by which the backend frees the segments that left RAM."""
        self._sequences.operations += map(Free, self._tiers.take_freed())

    # --- inside ---

    @property
    def _n_free(self) -> int:
        """Free cells of the pool."""
        return self._settings.pool_cells - self._sequences.n_cells

    def _evict_duplicates(self, n_free: int) -> None:
        """Clear idle sequences that have duplicates of cells of running ones, until `n_free` cells are free.

        An eviction plan does not find them, because running requests pin their nodes.
        """
        holders = self._sequences.duplicates.idle_holders()
        for seq in sorted(holders, key=self._sequences.rank):
            if self._n_free >= n_free:
                return
            self._checkpoints.take_at_end(seq)
            self._sequences.clear(seq)

    def _node_at(self, seq: int, end: int) -> Node:
        """Return the node on the path of a sequence that has the token before position `end`."""
        return next(node for node in self._sequences.end(seq).path_to_root() if node.start < end)

    def _missing(self, seq: int, start: int, end: int) -> list[tuple[int, int]]:
        """Ranges of a sequence that no segment covers and that overlap `[start, end)`.

        They are counted from the start of the node, so that evicting its end bit by bit yields the same ranges.
        """
        node = self._node_at(seq, end)
        return [
            each for each in _missing(node, min(start, node.start), end, self._tiers.max_tokens) if each[1] > start
        ]

    def _missing_of_path(self, seq: int, *, with_partial: bool) -> list[tuple[int, int]]:
        """Ranges of a sequence that no segment covers."""
        end = self._sequences.end(seq)
        ranges = _missing(end, 0, end.end, self._tiers.max_tokens)
        if not with_partial:
            ranges = [(start, stop) for start, stop in ranges if stop - start == self._tiers.max_tokens]
        return ranges

    def _offload(
        self, seq: int, ranges: Sequence[tuple[int, int]], end: int, max_tokens: int | None = None
    ) -> Sequence[tuple[int, int]]:
        """Offload ranges of a sequence, about `max_tokens`, and return those that were offloaded.

        None are if RAM cannot hold the whole path up to `end`: a path with a gap cannot be loaded beyond the gap.
        """
        if not ranges or self._settings.is_on_trial:
            return ()
        node = self._node_at(seq, end)
        if not self._tiers.fits(node, _missing(node, 0, end, self._tiers.max_tokens)):
            return ()
        done: list[tuple[int, int]] = []
        for start, stop in ranges:
            if max_tokens is not None and _n_tokens(done) >= max_tokens:
                break
            # Adding a segment may split and join nodes, so the node is looked up for each range.
            segment = self._tiers.add(self._node_at(seq, stop), start, stop)
            self.free_evicted()
            self._sequences.operations.append(Save(segment.number, seq, start, stop))
            self._tiers.counters.ram.saved_bytes += segment.n_bytes
            done.append((start, stop))
        return done


def _n_tokens(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in ranges)


def _missing(node: Node, start: int, end: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return the ranges to offload so that segments cover `[start, end)` of the path to a node.

    Each is as large as possible. One that continues a partial segment begins where that does, and replaces it.
    """
    ranges: list[tuple[int, int]] = []
    at = start
    last: Segment | None = None
    path = [each for each in node.path_to_root() if each.start < end][::-1]
    for each in path:
        segment = each.segment
        if segment is None:
            continue
        ranges += _cut(at, each.start, last, max_tokens)
        at = max(at, each.end)
        last = segment if segment.end == each.end == at else None
    return ranges + _cut(at, end, last, max_tokens)


def _cut(start: int, end: int, last: Segment | None, max_tokens: int) -> list[tuple[int, int]]:
    """Ranges of at most `max_tokens` for `[start, end)`, including a partial segment that ends at `start`."""
    if start >= end:
        return []
    first = last.start if last is not None and last.is_partial(max_tokens) else start
    return [(at, min(at + max_tokens, end)) for at in range(first, end, max_tokens)]


@dataclass(eq=False)
class OffloadPolicy:
    """Decides by `settings`; times are seconds on the caller's clock."""

    _settings: CacheSettings
    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _disk: DiskTier
    _offloader: Offloader
    _checkpoints: Checkpoints
    _has_decodes: Callable[[], bool]
    """Returns True if streams wait for this step, and so for what it saves."""
    _next_write_at: float = 0.0
    _was_busy: bool = False
    """True if requests ran or waited at the last plan."""
    _idle_work_at: float | None = None
    """Time at which to offload idle prefixes ahead; None if there is nothing to do."""
    _is_flushing: bool = False

    def slows_prefill(self, n_prefill: int) -> bool:
        """True if some idle prefix should be offloaded before a prefill of `n_prefill` tokens."""
        cutoff = self._offload_cutoff(n_prefill)
        return cutoff is not None and self._tree.eviction.plan(1, cutoff).n_cells > 0

    def offload_idle(self, n_prefill: int) -> None:
        """Evict, and so offload, idle prefixes that would slow this prefill by more than saving and loading costs.

        Each eviction moves the cutoff, so this repeats until nothing is below it.
        """
        # Without memory for segments, evicted prefixes would be lost, so freed cells do not lower the cutoff then.
        limit, n_freed = self._at_most(self._tree.n_idle_tokens), 0
        while n_freed < limit:
            cutoff = self._offload_cutoff(n_prefill, max(n_freed - n_prefill, 0) if self._tiers.may_save else 0)
            n_evicted = self._offloader.evict(limit - n_freed, cutoff) if cutoff is not None else 0
            if not n_evicted:
                return
            n_freed += n_evicted

    def keep_idle_budget(self) -> None:
        """Evict idle prefixes that exceed the budget of idle cells."""
        budget = self._settings.budgets.idle_cells
        if self._settings.shares_cells and budget is not None and self._tree.n_idle_tokens > budget:
            self._offloader.evict(self._at_most(self._tree.n_idle_tokens - budget))

    def offload_for_disk(self, now: float) -> None:
        """While requests run, offload a segment each `write_interval_ms`: only what is in RAM can be written."""
        if now < self._next_write_at:
            return
        self._next_write_at = now + self._settings.write_interval_ms / 1e3
        if not self._disk.has_backlog:
            n_tokens = self._at_most(self._settings.segment_tokens)
            self._offloader.offload_ahead(n_tokens, with_running=True)

    def offload_while_idle(self, now: float, *, is_busy: bool) -> None:
        """After `idle_delay_ms` without requests, offload idle prefixes ahead, one segment or checkpoint a call."""
        if is_busy:
            self._was_busy, self._idle_work_at = True, None
        elif self._was_busy:
            self._was_busy, self._idle_work_at = False, now + self._settings.idle_delay_ms / 1e3
        if self._idle_work_at is None or now < self._idle_work_at or self._disk.has_backlog:
            return
        n_done, settings = 0, self._settings
        leaves_early = settings.budgets.offload_after is not None and settings.unified
        if settings.offloads and (leaves_early or settings.writes or settings.uploads):
            n_tokens = settings.segment_tokens if settings.unified else settings.seq_cells
            n_done = self._offloader.offload_ahead(n_tokens, with_running=False) or self._checkpoints.take_ahead()
        if not n_done:
            self._idle_work_at = None

    def flush(self, now: float) -> None:
        """Offload and write everything without delay, because the server is shutting down."""
        if not self._is_flushing:
            # Offload again what was offloaded ahead: it may have left RAM since, or its save may have failed.
            self._sequences.advance()
        self._is_flushing = True
        self._was_busy, self._idle_work_at = False, now
        self._disk.flush()
        self._tiers.uploads.flush()

    def deadlines(self) -> Deadlines:
        """Return when something is due."""
        if not self._settings.offloads:
            return Deadlines(self._idle_work_at)
        times = (self._disk.due_at, self._tiers.uploads.due_at)
        due_at = min((each for each in times if each is not None), default=None)
        idle_work_at = None if self._disk.has_backlog else self._idle_work_at
        idle = min((each for each in (idle_work_at, due_at) if each is not None), default=None)
        if not self._settings.copies_running:
            return Deadlines(idle, due_at)
        return Deadlines(idle, self._next_write_at if due_at is None else min(self._next_write_at, due_at))

    def _at_most(self, n_tokens: int) -> int:
        """Return `n_tokens`, or fewer if saving that many would delay streams too long."""
        limit = self._settings.max_tokens_in_gap(self._settings.cost.first_save_us) if self._has_decodes() else None
        return n_tokens if limit is None else min(n_tokens, limit)

    def _offload_cutoff(self, n_prefill: int, n_free: int = 0) -> int | None:
        """Logical time; idle prefixes last used before it are due to be offloaded. None: offload none.

        The clock counts computed prompt tokens, and each use. Idle cells may lie above `n_free` free ones.
        """
        after = self._settings.budgets.offload_after
        if after is None or not self._settings.offloads or not self._settings.unified:
            # In a partitioned pool attention does not scan the cells of other sequences, so idle ones slow nothing.
            return None
        if self._tiers.ram.capacity < min(self._settings.budgets.ram_bytes, self._settings.min_ram_for_idle):
            # Memory is short, so what leaves the pool would soon be lost.
            return None
        n_idle = self._tree.n_idle_tokens
        idle_share = n_idle / (n_idle + n_free) if n_idle else 1.0
        return self._sequences.clock + min(n_prefill - round(after * idle_share), 0)
