"""Offload of KV from the pool to segments in RAM, and loading it back.

Each token is offloaded once, however many sequences hold it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from llamaslot.base.kv_ops import Free, Save
from llamaslot.base.namespaces import is_private
from llamaslot.base.stats import CacheStats
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.match import Match, SegmentPart
from llamaslot.kvcache.node import Node
from llamaslot.kvcache.offload.checkpoints import Checkpoints
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.segment import Segment
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers

_UNKNOWN_READ_COST = 1 / 8
"""Assumed time to read a token from disk divided by the time to compute it, until a read is measured."""


class LoadStatus(Enum):
    """Progress of a load."""

    DONE = "nothing more to load"
    MORE = "more in another step"
    READING = "more once a read from disk is done"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load."""

    status: LoadStatus
    n_copied: int = 0
    """Tokens copied from other sequences."""
    n_loaded: int = 0
    """Tokens loaded from RAM."""
    n_read: int = 0
    """Of `n_loaded`, those that had to be read from disk first."""
    n_fetched: int = 0
    """Of `n_loaded`, those that had to be fetched from the remote tier first."""
    n_public: int = 0
    """Of `n_loaded`, those from segments of the public namespace."""


@dataclass(eq=False)
class Offloader:
    """Moves KV between the pool and the tiers. Without a RAM tier it only evicts, and counts evicted tokens."""

    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _settings: CacheSettings
    _counters: CacheStats
    _n_free: Callable[[], int]
    """Returns the number of free cells in the pool."""
    _checkpoints: Checkpoints
    _ahead_at: int = -1
    _offloaded_ahead: set[tuple[int, int, int]] = field(default_factory=set)
    """Sequence and range of what was offloaded ahead since the clock stood at `_ahead_at`. None is offloaded twice:
    otherwise, if RAM is smaller than the pool, ranges would evict each other without end.
    """

    # --- to segments ---

    def evict(self, n_cells: int, before: int | None = None) -> int:
        """Evict `n_cells` idle cells, or as many as there are; returns how many.

        They are offloaded as far as they fit into RAM. `before` limits this to prefixes last used before that
        logical time. Without it, tenants with more than their share of the cells lose theirs first.
        """
        excess = None
        if before is None:
            beyond = self._tiers.shares.excess(self._tree.n_tokens_of, self._settings.pool_cells)
            # If no tenant has more than its share, plain LRU gives the same result faster.
            excess = beyond if max(beyond.values(), default=0) > 0 else None
        n_wanted = self._n_free() + n_cells
        plan = self._tree.eviction.plan(n_cells, before, excess)
        for seq, start, end in plan.evicted:
            self.offload_evicted(seq, start, end)
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
        n_missing = n_cells - self._n_free() - self._tree.n_idle_tokens
        duplicates = self._sequences.duplicates.n_idle_cells(self._tree.is_pinned)
        return n_missing <= max(0, duplicates - n_kept_duplicates)

    def free_cells(self, n_cells: int) -> bool:
        """Evict idle cells until `n_cells` are free, or none if that is impossible; True if enough are free.

        In a partitioned pool that is always so, since each sequence has cells for as many tokens as it may hold.
        """
        if not self._settings.unified:
            return True
        n_missing = n_cells - self._n_free()
        if 0 < n_missing <= self._n_idle():
            self.evict(n_missing)
        return self._n_free() >= n_cells

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
        self._counters.evicted_tokens += n_missing
        self._counters.offloaded_tokens += n - n_missing

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
            end = node.end
            ranges = self._missing_of_path(seq, end, with_partial=not runs)
            if not self._offloaded_ahead.isdisjoint((seq, *each) for each in ranges):
                continue
            done = self._offload(seq, ranges, end, max_tokens - n_done)
            self._offloaded_ahead.update((seq, *each) for each in done)
            n_done += _n_tokens(done)
            if n_done >= max_tokens:
                break
        return n_done

    def offload_path(self, seq: int, *, with_partial: bool) -> None:
        """Save the part of a sequence that no segment covers; it stays resident.

        `with_partial` includes the last range even if it does not fill a segment.
        """
        end = self._sequences.end(seq).end
        self._offload(seq, self._missing_of_path(seq, end, with_partial=with_partial), end)

    def tenants_beyond_ids(self) -> set[str]:
        """Tenants with more than their share of the sequence ids."""
        sequences = self._sequences
        used = Counter(sequences.end(each).tenant for each in sequences.all if sequences.in_use(each))
        return {name for name, n in self._tiers.shares.excess(used, len(sequences.all)).items() if n > 0}

    # --- from segments ---

    def worth_loading(self, match: Match) -> Sequence[SegmentPart]:
        """Segments after the resident part of a match that are worth loading.

        A segment is loaded whole, so the last one is left out if too little of it is needed; not for models with a
        partial state, which may have to be restored at its end. Nothing is worth loading if all parts together take
        longer to load than to compute. In a partitioned pool the resident part is saved and loaded along with them.
        """
        parts = self._tiers.readable(match.parts) if match.parts else []
        if parts and not self._checkpoints.has_states and not self._pays(parts[-1:]):
            parts.pop()
        return parts if self._pays(parts, 0 if self._settings.unified else 2 * match.n_resident) else []

    def load(self, seq: int, match: Match, max_tokens: int | None, *, loads_all: bool = False) -> Loaded:
        """Extend a sequence by the segments that are worth loading, about `max_tokens` at most.

        With `loads_all` it is all segments of the match, because the sequence waits for a checkpoint at its end,
        and a small rest would not be worth loading by itself.
        """
        parts = self._tiers.readable(match.parts) if loads_all else self.worth_loading(match)
        if not parts:
            self._tiers.unpin(seq)
            return Loaded(LoadStatus.DONE)
        self._tiers.prefetch(seq, parts)
        self.free_evicted()
        status = LoadStatus.DONE
        # Segments with a planned save cannot be loaded yet, because the save may fail for lack of memory.
        saving = {each.segment for each in self._sequences.operations if isinstance(each, Save)}
        n_loaded = n_read = n_fetched = n_public = 0
        if not self._settings.unified:
            # Each load would load the whole sequence again (fact 3), so this waits until all parts are in RAM.
            if any(part.segment.number in saving for part in parts):
                return Loaded(LoadStatus.MORE)
            if self._tiers.reader.n_pending and not all(part.segment.state.is_loadable for part in parts):
                return Loaded(LoadStatus.READING)
        for part in parts:
            segment = part.segment
            if (max_tokens is not None and n_loaded >= max_tokens) or segment.number in saving:
                status = LoadStatus.MORE
                break
            if not segment.state.is_loadable:
                status = LoadStatus.READING if self._tiers.reader.n_pending else LoadStatus.DONE
                break
            if not self.free_cells(segment.n_tokens) or not segment.state.is_loadable:
                break
            start = self._tree.length(seq)
            self._sequences.load(segment.number, seq, part.end, match.tokens)
            n_loaded += part.end - start
            if match.public is not None and segment.is_public:
                n_public += part.end - start
            n_read += (part.end - start) * (segment.source == "disk")
            n_fetched += (part.end - start) * (segment.source == "remote")
            segment.source = ""
        if status is LoadStatus.DONE:
            self._tiers.unpin(seq)
        self._counters.public_tokens += n_public
        return Loaded(status, 0, n_loaded, n_read, n_fetched, n_public)

    @property
    def may_load(self) -> bool:
        """False for a while after a load failed for lack of memory."""
        return self._tiers.now >= self._tiers.loads_again_at

    # --- operations ---

    def free_evicted(self) -> None:
        """Record operations by which the backend frees the segments that left RAM."""
        self._sequences.operations += map(Free, self._tiers.take_freed())

    # --- inside ---

    def _n_idle(self) -> int:
        """Cells that `evict` can free: those of idle nodes, and duplicates that only idle sequences hold."""
        return self._tree.n_idle_tokens + self._sequences.duplicates.n_idle_cells(self._tree.is_pinned)

    def _evict_duplicates(self, n_free: int) -> None:
        """Clear idle sequences that have duplicates of cells of running ones, until `n_free` cells are free.

        An eviction plan does not find them, because running requests pin their nodes.
        """
        holders = self._sequences.duplicates.idle_holders(self._tree.is_pinned)
        for seq in sorted(holders, key=self._sequences.rank):
            if self._n_free() >= n_free:
                return
            self._checkpoints.take_at_end(seq)
            self._sequences.clear(seq)

    def _pays(self, parts: Sequence[SegmentPart], n_moved: int = 0) -> bool:
        """True if loading these parts, and moving `n_moved` tokens for it, is faster than computing them."""
        n_wanted = sum(part.end - part.start for part in parts)
        n_loaded = sum(part.segment.n_tokens for part in parts) + n_moved
        n_read = sum(part.segment.n_tokens for part in parts if not part.segment.state.is_loadable)
        return n_wanted > self._settings.load_cost * n_loaded + self._read_cost * n_read

    @property
    def _read_cost(self) -> float:
        """Time to read a token from disk divided by the time to compute it."""
        read_us = self._tiers.reader.us_per_token
        prefill_us = self._settings.prefill_us
        return read_us / prefill_us if read_us and prefill_us else _UNKNOWN_READ_COST

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

    def _missing_of_path(self, seq: int, end: int, *, with_partial: bool) -> list[tuple[int, int]]:
        """Ranges of the first `end` tokens of a sequence that no segment covers."""
        ranges = _missing(self._node_at(seq, end), 0, end, self._tiers.max_tokens) if end else []
        if not with_partial:
            ranges = [(start, stop) for start, stop in ranges if stop - start == self._tiers.max_tokens]
        return ranges

    def _offload(
        self, seq: int, ranges: Sequence[tuple[int, int]], end: int, max_tokens: int | None = None
    ) -> Sequence[tuple[int, int]]:
        """Offload ranges of a sequence, about `max_tokens`, and return those that were offloaded.

        None are if RAM cannot hold the whole path up to `end`: a path with a gap cannot be loaded beyond the gap.
        """
        if not ranges or self._tiers.is_on_trial:
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
            self._counters.ram.saved_bytes += segment.n_bytes
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
