"""Loading: when cached KV is loaded from RAM or disk rather than computed, and how it gets into the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from llamaslot.base.kv_ops import Save
from llamaslot.base.stats import CacheStats
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.match import Match, SegmentPart
from llamaslot.kvcache.offload.offloader import Offloader
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.disk_tier import DiskTier
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
class Loader:
    """Extends sequences by segments, if loading these is faster than computing their tokens."""

    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _disk: DiskTier
    _offloader: Offloader
    _settings: CacheSettings
    _counters: CacheStats

    def worth_loading(self, match: Match) -> Sequence[SegmentPart]:
        """Segments after the resident part of a match that are worth loading.

        A segment is loaded whole, so the last one is left out if too little of it is needed; not for models with a
        partial state, which may have to be restored at its end. Nothing is worth loading if all parts together take
        longer to load than to compute. In a partitioned pool the resident part is saved and loaded along with them.
        """
        parts = self._disk.readable(match.parts) if match.parts else []
        if parts and not self._settings.has_states and not self._pays(parts[-1:]):
            parts.pop()
        return parts if self._pays(parts, 0 if self._settings.unified else 2 * match.n_resident) else []

    def load(self, seq: int, match: Match, max_tokens: int | None, *, loads_all: bool = False) -> Loaded:
        """Extend a sequence by the segments that are worth loading, about `max_tokens` at most.

        With `loads_all` it is all segments of the match, because the sequence waits for a checkpoint at its end,
        and a small rest would not be worth loading by itself.
        """
        parts = self._disk.readable(match.parts) if loads_all else self.worth_loading(match)
        if not parts:
            self._tiers.unpin(seq)
            return Loaded(LoadStatus.DONE)
        self._disk.prefetch(seq, parts)
        self._offloader.free_evicted()
        status = LoadStatus.DONE
        # Segments with a planned save cannot be loaded yet, because the save may fail for lack of memory.
        saving = {each.segment for each in self._sequences.operations if isinstance(each, Save)}
        n_loaded = n_read = n_fetched = n_public = 0
        if not self._settings.unified:
            # Each load would load the whole sequence again (fact 3), so this waits until all parts are in RAM.
            if any(part.segment.number in saving for part in parts):
                return Loaded(LoadStatus.MORE)
            if self._disk.reading and not all(part.segment.state.is_loadable for part in parts):
                return Loaded(LoadStatus.READING)
        for part in parts:
            segment = part.segment
            if (max_tokens is not None and n_loaded >= max_tokens) or segment.number in saving:
                status = LoadStatus.MORE
                break
            if not segment.state.is_loadable:
                status = LoadStatus.READING if self._disk.reading else LoadStatus.DONE
                break
            if not self._offloader.free_cells(segment.n_tokens) or not segment.state.is_loadable:
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

    def _pays(self, parts: Sequence[SegmentPart], n_moved: int = 0) -> bool:
        """True if loading these parts, and moving `n_moved` tokens for it, is faster than computing them."""
        read_us, prefill_us = self._disk.us_per_token, self._settings.cost.prefill_us
        read_cost = read_us / prefill_us if read_us and prefill_us else _UNKNOWN_READ_COST
        n_wanted = sum(part.end - part.start for part in parts)
        n_loaded = sum(part.segment.n_tokens for part in parts) + n_moved
        n_read = sum(part.segment.n_tokens for part in parts if not part.segment.state.is_loadable)
        return n_wanted > self._settings.load_cost * n_loaded + read_cost * n_read
