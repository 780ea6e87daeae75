"""Pins: prefixes that are evicted last in every tier (`POST /cache/warm`).

They are not held in cells: the oldest request always finishes only because all that is idle can be evicted for
it. Whenever the pool records a use, it counts as one of each pinned prefix too, and before each eviction from
RAM or from disk they count as used (`SegmentTiers.use_pinned`). Rules that precede last use still apply: tenants'
shares, and that segments also on disk leave RAM first. A request that needs all of RAM or disk still evicts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamaslot.base.stats import PinStats
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.nodes import Node
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers

MAX_PINS = 16
"""Most pinned prefixes: each is looked up when a request begins, and when it ends."""
MAX_PINNED_FRACTION = 0.5
"""Fraction of the pool's cells that all pinned prefixes may take together."""


@dataclass(eq=False)
class Pins:
    """Pinned prefixes of all namespaces."""

    _tree: RadixTree
    _tiers: SegmentTiers
    _settings: CacheSettings

    def why_not(self, namespace: str, tokens: bytes, pending: int, pending_tokens: int) -> str:
        """Return why a prefix cannot be pinned beside `pending` others that will be; empty if it can."""
        stats = self.stats
        if (namespace, tokens) in self._tiers.pinned_paths:
            return ""
        if stats.prefixes + pending >= MAX_PINS:
            return f"there are {stats.prefixes + pending} pinned prefixes, and the limit is {MAX_PINS}"
        n_tokens = stats.tokens + pending_tokens + len(tokens) // WIDTH
        if n_tokens > stats.max_tokens:
            return f"all pinned prefixes would have {n_tokens} tokens, and the limit is {stats.max_tokens}"
        return ""

    def add(self, namespace: str, tokens: bytes) -> None:
        """Pin a prefix."""
        self._tiers.pinned_paths.add((namespace, tokens))

    def remove(self, namespace: str, tokens: bytes) -> None:
        """Unpin a prefix, if it is pinned."""
        self._tiers.pinned_paths.discard((namespace, tokens))

    def clear(self) -> None:
        """Unpin everything."""
        self._tiers.pinned_paths.clear()

    def use(self, now: int) -> None:
        """Mark what the pool has of pinned prefixes as used at `now`, on the tree's clock."""
        for namespace, tokens in self._tiers.pinned_paths:
            self._tree.touch(self._tree.match(namespace, tokens).resident_end, now)

    def nodes(self) -> set[Node]:
        """Return the nodes with tokens of pinned prefixes."""
        return {
            node
            for namespace, tokens in self._tiers.pinned_paths
            for node in self._tree.match(namespace, tokens).matched_end.path_to_root()
        }

    @property
    def stats(self) -> PinStats:
        """The number of pins and of their tokens."""
        n_tokens = sum(len(tokens) for _, tokens in self._tiers.pinned_paths) // WIDTH
        return PinStats(
            len(self._tiers.pinned_paths), n_tokens, int(MAX_PINNED_FRACTION * self._settings.pool_cells)
        )
