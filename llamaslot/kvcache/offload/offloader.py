"""Offload of KV from the pool to segments, and loading it back.

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
"""Time to read a token from disk over the time to compute it, until a read was measured."""


class LoadStatus(Enum):
    """Progress of a load."""

    DONE = "nothing more to load"
    MORE = "more in another step"
    READING = "more once the disk has answered"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load."""

    status: LoadStatus
    n_copied: int = 0
    """Tokens copied from other sequences."""
    n_loaded: int = 0
    """Tokens loaded from RAM."""
    n_read: int = 0
    """Of `n_loaded`, those that were read from disk for it."""
    n_fetched: int = 0
    """Of `n_loaded`, those that were fetched from the remote tier for it."""
    n_public: int = 0
    """Of `n_loaded`, those from segments of the public namespace."""


@dataclass(eq=False)
class Offloader:
    """Moves KV between the pool and `tiers`. Without RAM it does nothing but count what is evicted.

    `n_free` counts the free cells of the pool.
    """

    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _settings: CacheSettings
    _counters: CacheStats
    _n_free: Callable[[], int]
    _checkpoints: Checkpoints
    _ahead_at: int = -1
    _offloaded_ahead: set[tuple[int, int, int]] = field(default_factory=set)
    """Ranges that were offloaded ahead, by sequence, since the clock stood at `_ahead_at`: each is offloaded once,
    so that it ends where RAM is smaller than the pool.
    """

    # --- to segments ---

    def evict(self, n_cells: int, before: int | None = None) -> int:
        """Evict `n_cells` idle cells, or all there are, last used before a logical time; returns how many.

        They are offloaded as far as they fit into RAM. Tenants keep their share of the cells, as far as others have
        more than theirs, except where `before` says how old an idle prefix may be.
        """
        excess = None
        if before is None:
            beyond = self._tiers.shares.excess(self._tree.n_tokens_of, self._settings.pool_cells)
            # If none has more than its share, all leaves would only be set aside, and then be taken by last use.
            excess = beyond if max(beyond.values(), default=0) > 0 else None
        n_wanted = self._n_free() + n_cells
        plan = self._tree.eviction.plan(n_cells, before, excess)
        for seq, start, end in plan.evicted:
            self.offload_evicted(seq, start, end)
        for seq, keep in sorted(plan.keeps.items(), key=lambda item: item[1] == 0):
            # Heirs first: a node must not lose its last holder before its heir ends there.
            self._sequences.truncate(seq, keep)
        if plan.n_cells < n_cells and before is None:
            self._evict_duplicates(n_wanted)
        return plan.n_cells

    def can_free(self, n_cells: int, n_kept_duplicates: int) -> bool:
        """True if `n_cells` are free or idle; of idle duplicate cells, so many may have to stay."""
        if not self._settings.unified:
            return True
        n_missing = n_cells - self._n_free() - self._tree.n_idle_tokens
        duplicates = self._sequences.duplicates.n_idle_cells(self._tree.is_pinned)
        return n_missing <= max(0, duplicates - n_kept_duplicates)

    def free_cells(self, n_cells: int) -> bool:
        """Evict idle cells until `n_cells` are free, unless even all of them are too few; True if they are free.

        In a partitioned pool a sequence has cells for all that it may hold.
        """
        if not self._settings.unified:
            return True
        n_missing = n_cells - self._n_free()
        if 0 < n_missing <= self._n_idle():
            self.evict(n_missing)
        return self._n_free() >= n_cells

    def offload_evicted(self, seq: int, start: int, end: int) -> None:
        """Offload `[start, end)` of a sequence, which no sequence will hold any more, as far as it fits."""
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

        `with_running` includes what running requests hold, but for private namespaces and for the last, partial
        range, which still grows: it would be replaced again and again.
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
        """Save what no segment covers of a sequence; it stays resident.

        `with_partial` includes the last range if it is less than a segment.
        """
        end = self._sequences.end(seq).end
        self._offload(seq, self._missing_of_path(seq, end, with_partial=with_partial), end)

    def tenants_beyond_ids(self) -> set[str]:
        """Tenants that have more than their share of the sequence ids."""
        sequences = self._sequences
        used = Counter(sequences.end(each).tenant for each in sequences.all if sequences.in_use(each))
        return {name for name, n in self._tiers.shares.excess(used, len(sequences.all)).items() if n > 0}

    # --- from segments ---

    def worth_loading(self, match: Match) -> Sequence[SegmentPart]:
        """The segments after the resident part of a match that are worth loading.

        A segment is loaded whole, so the last one is left out if too little of it is wanted, unless a state can
        only be restored after it. Nothing is worth it if all together takes longer to load than to compute. In a
        partitioned pool what is resident is saved and loaded with it.
        """
        parts = self._tiers.readable(match.parts) if match.parts else []
        if parts and not self._checkpoints.has_states and not self._pays(parts[-1:]):
            parts.pop()
        return parts if self._pays(parts, 0 if self._settings.unified else 2 * match.n_resident) else []

    def load(self, seq: int, match: Match, max_tokens: int | None, *, loads_all: bool = False) -> Loaded:
        """Load what segments have after the tokens of a sequence, about `max_tokens` at most.

        That is what is worth loading. With `loads_all` it is the whole match, because the sequence waits for a
        checkpoint at its end: a small rest would not be worth loading by itself.
        """
        parts = self._tiers.readable(match.parts) if loads_all else self.worth_loading(match)
        if not parts:
            self._tiers.unpin(seq)
            return Loaded(LoadStatus.DONE)
        self._tiers.prefetch(seq, parts)
        self.free_evicted()
        status = LoadStatus.DONE
        # Until a save is carried out, it is not known whether there is memory for it.
        saving = {each.segment for each in self._sequences.operations if isinstance(each, Save)}
        n_loaded = n_read = n_fetched = n_public = 0
        if not self._settings.unified:
            # Each further load would load all that the sequence holds again: all parts are waited for.
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
        """True unless there was no memory to load something a moment ago."""
        return self._tiers.now >= self._tiers.loads_again_at

    # --- operations ---

    def free_evicted(self) -> None:
        """Record that the backend frees the segments that left RAM."""
        self._sequences.operations += map(Free, self._tiers.take_freed())

    # --- inside ---

    def _n_idle(self) -> int:
        """Cells that `evict` can free: of idle nodes, and duplicates that only idle sequences hold."""
        return self._tree.n_idle_tokens + self._sequences.duplicates.n_idle_cells(self._tree.is_pinned)

    def _evict_duplicates(self, n_free: int) -> None:
        """Clear idle sequences with cells of their own for what running ones hold, until so many are free.

        Their nodes are in use, so that no eviction finds them.
        """
        holders = self._sequences.duplicates.idle_holders(self._tree.is_pinned)
        for seq in sorted(holders, key=self._sequences.rank):
            if self._n_free() >= n_free:
                return
            self._checkpoints.take_at_end(seq)
            self._sequences.clear(seq)

    def _pays(self, parts: Sequence[SegmentPart], n_moved: int = 0) -> bool:
        """True if it takes less time to load parts, and `n_moved` tokens with them, than to compute them."""
        n_wanted = sum(part.end - part.start for part in parts)
        n_loaded = sum(part.segment.n_tokens for part in parts) + n_moved
        n_read = sum(part.segment.n_tokens for part in parts if not part.segment.state.is_loadable)
        return n_wanted > self._settings.load_cost * n_loaded + self._read_cost * n_read

    @property
    def _read_cost(self) -> float:
        """Time to read a token from disk over the time to compute it."""
        read_us = self._tiers.reader.us_per_token
        prefill_us = self._settings.prefill_us
        return read_us / prefill_us if read_us and prefill_us else _UNKNOWN_READ_COST

    def _node_at(self, seq: int, end: int) -> Node:
        """The node on the path of a sequence that has the token before `end`."""
        return next(node for node in self._sequences.end(seq).path_to_root() if node.start < end)

    def _missing(self, seq: int, start: int, end: int) -> list[tuple[int, int]]:
        """Ranges of a sequence that no segment covers and that overlap `[start, end)`.

        They are cut from the start of the node, so that they stay the same when its end is evicted bit by bit.
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
        """Offload ranges of a sequence, about `max_tokens`, if RAM has room for its whole path up to `end`; returns
        those that were.

        The node is looked up for each range, for adding a segment may split and join nodes.
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
            segment = self._tiers.add(self._node_at(seq, stop), start, stop)
            self.free_evicted()
            self._sequences.operations.append(Save(segment.number, seq, start, stop))
            self._counters.ram.saved_bytes += segment.n_bytes
            done.append((start, stop))
        return done


def _n_tokens(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in ranges)


def _missing(node: Node, start: int, end: int, max_tokens: int) -> list[tuple[int, int]]:
    """Ranges to offload, each as large as possible, so that segments cover `[start, end)` of the path to a
    node.

    A range that continues a partial segment starts with it, and replaces it.
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
    """Ranges of at most `max_tokens` that cover `[start, end)`, and the partial segment that ends at `start`."""
    if start >= end:
        return []
    first = last.start if last is not None and last.is_partial(max_tokens) else start
    return [(at, min(at + max_tokens, end)) for at in range(first, end, max_tokens)]
