"""Checkpoints: partial states that are copied to host memory, and the order in which they are evicted from it.

Checkpoints are taken
1. where a step of a running request ends (`scheduler/checkpoint_taker.py`);
2. when a sequence is about to lose its last token, and its state with it (`take_at_end`);
3. in advance of that, for idle sequences while the server is idle (`take_ahead`), so that evicting them is cheap.

They are evicted from RAM
- if they exceed the budget of bytes (`--checkpoint-ram`): those of tenants with more than their share first; then
  those that are neither a fork nor the deepest of their path; then those that are also on disk; then the least
  recently used. Each rule breaks the ties that the rules before it leave (`evict_for`);
- if a path has too many (`--ctx-checkpoints`): the one whose neighbours are closest together, relative to their
  distance from the end of the path (`_thin_path`). The deepest stays, and forks go last.

Checkpoints about to be restored are never evicted. `StateRestorer` decides which are restored, and when.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from llamaslot.base.kv_ops import Take
from llamaslot.base.namespaces import is_private
from llamaslot.base.stats import CheckpointStats
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.cache_settings import CheckpointSettings
from llamaslot.kvcache.nodes import Checkpoint, Node, Segment, SegmentEvent, checkpoints_on
from llamaslot.kvcache.nodes import SegmentState as S
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers


class Checkpoints:
    """Checkpoints of one tree, within a budget of bytes; none for a model without a partial state."""

    def __init__(
        self, tree: RadixTree, sequences: Sequences, settings: CheckpointSettings, tiers: SegmentTiers
    ) -> None:
        self.settings = settings
        self._states = sequences.states
        self.has_states = self._states.has_states
        """True for a model with a partial state."""
        self.pending_restores: dict[int, Checkpoint] = {}
        """Checkpoint to restore into each sequence once that has all tokens before it; not evicted until then."""
        self.counters = CheckpointStats()
        self._ahead_at = -1
        self._taken_ahead: set[int] = set()
        """Sequences that got a checkpoint in advance since the clock stood at `_ahead_at`."""
        self._tree = tree
        self._sequences = sequences
        self._tiers = tiers

    @property
    def stats(self) -> CheckpointStats:
        """Checkpoints in RAM now, and counters since the start."""
        lru = self._tiers.checkpoints
        return structs.replace(self.counters, total_bytes=lru.capacity, used_bytes=lru.n_bytes, count=len(lru))

    @property
    def n_to_take(self) -> int:
        """Checkpoints that the recorded operations will take before the next step."""
        return sum(isinstance(each, Take) for each in self._sequences.operations)

    def has_at_end(self, seq: int) -> bool:
        """Return True if there is a checkpoint after the last token of a sequence."""
        node = self._tree.end_node(seq)
        return node is not None and node.checkpoint is not None

    @property
    def have_room_for_ends(self) -> bool:
        """True if the ends of all idle sequences can get checkpoints without evicting any."""
        ends = {self._sequences.end(seq) for seq in self._sequences.all if self._may_take_at_end(seq)}
        n_bytes = sum(self.settings.size.of(end.end) for end in ends if not self._is_near(end))
        return self._tiers.checkpoints.n_bytes + n_bytes <= self._tiers.checkpoints.capacity

    def cached(self, namespace: str, tokens: bytes) -> list[Checkpoint]:
        """Checkpoints on the path of some tokens, the deepest first, whether or not a sequence holds the path."""
        return checkpoints_on(self._tree.match(namespace, tokens).whole_end)

    def can_take(self, n: int) -> bool:
        """Return True if a checkpoint after `n` tokens can fit into the budget, and memory has not just run out."""
        return self._tiers.may_save and self.settings.size.of(n) <= self._tiers.checkpoints.capacity

    def take(self, seq: int, *, only_redundant: bool = False) -> Checkpoint | None:
        """Return the checkpoint at the end of a live sequence, taken now if there is none; None if it does not fit.

        Others are evicted for it; with `only_redundant` only those that are also on disk, or neither a fork nor the
        deepest of their path.
        """
        node = self._sequences.end(seq)
        if node.checkpoint is not None:
            self._tiers.touch(node.checkpoint.path_from_root)
            return node.checkpoint
        n_bytes = self.settings.size.of(node.end)
        if not self.can_take(node.end) or not self.evict_for(n_bytes, node.tenant, only_redundant=only_redundant):
            return None
        checkpoint = self._tiers.add_checkpoint(node, n_bytes)
        self._sequences.operations.append(Take(checkpoint.number, seq, node.end))
        self.counters.taken += 1
        self._thin_path(node)
        return checkpoint

    def take_at_end(self, seq: int, *, only_redundant: bool = False) -> bool:
        """Take a checkpoint of an idle sequence before it loses its state, if that may be needed again.

        The sequence's last token must stay cached, or the checkpoint is dropped with it. True if one was taken.
        """
        node = self._tree.end_node(seq)
        if node is None or not self._may_take_at_end(seq):
            return False
        has_other = any(other != seq and self._states.is_live(other) for other in node.end_of)
        return not has_other and self._take_unless_near(seq, only_redundant=only_redundant)

    def take_before_end_is_evicted(self, seq: int) -> None:
        """Take a checkpoint before the end of this sequence is evicted, if that may be needed again.

        All sequences that end there lose their states, so any live one of them will do.
        """
        live = next(filter(self._states.is_live, sorted(self._sequences.end(seq).end_of)), None)
        if live is not None and self._may_take_at_end(live):
            self._take_unless_near(live)

    def take_ahead(self) -> int:
        """Take a checkpoint of one idle sequence ahead of its eviction; returns how many were taken, 0 if done.

        Only redundant ones are evicted for it, and until another request runs each sequence gets at most one.
        Otherwise checkpoints that do not fit together would evict each other for as long as the server is idle.
        """
        if self._ahead_at != self._sequences.clock:
            self._ahead_at, self._taken_ahead = self._sequences.clock, set()
        for seq in self._sequences.all:
            is_idle = self._sequences.in_use(seq) and not self._tree.is_pinned(seq)
            if is_idle and seq not in self._taken_ahead and self.take_at_end(seq, only_redundant=True):
                self._taken_ahead.add(seq)
                return 1
        return 0

    def add(self, namespace: str, tokens: bytes, sizes: Mapping[int, int]) -> dict[int, int]:
        """Add checkpoints from a file (bytes by position); returns the numbers of those added, by position.

        A sequence must hold the tokens. If not all fit, the shallowest are left out.
        """
        wanted: dict[int, int] = {}
        for end, n_bytes in sorted(sizes.items(), reverse=True):
            last = self._tree.match(namespace, tokens[: end * WIDTH]).whole_end
            has_one = last.end == end and last.checkpoint is not None
            if not has_one and self.can_take(end) and len(wanted) < self.settings.limits.on_path:
                wanted[end] = n_bytes
        tenant = self._tree.match(namespace, tokens).matched_end.tenant
        while wanted and not self.evict_for(sum(wanted.values()), tenant):
            wanted.popitem()
        added: dict[int, int] = {}
        for end, n_bytes in reversed(wanted.items()):
            node = self._tree.insert(namespace, tokens[: end * WIDTH])
            added[end] = self._tiers.add_checkpoint(node, n_bytes).number
            self._thin_path(node)
        return added

    def evict_for(self, n_bytes: int, tenant: str = "", *, only_redundant: bool = False) -> bool:
        """Evict checkpoints from RAM until `n_bytes` of a tenant fit; False if too many have to stay.

        Tenants with more than their share lose theirs first.
        """
        self._tiers.drop_lost()
        lru = self._tiers.checkpoints
        if lru.n_bytes + n_bytes <= lru.capacity:
            return True
        self._tiers.use_pinned()
        pinned = self._pinned
        n_pinned = sum(each.n_bytes for each in lru if each in pinned)
        if n_bytes and n_pinned + n_bytes > lru.capacity:
            return False
        everything = [each for each in lru if isinstance(each, Checkpoint)]
        # Their paths continue to a deeper checkpoint, in RAM or on disk.
        interior = {each for each in everything if not (each.is_fork or each.is_deepest)}
        # Those that are also on disk (CLEAN) can be read again.
        order = sorted(everything, key=lambda each: (each not in interior, each.state is not S.CLEAN, each.rank))
        rest = [each for each in order if each not in pinned]
        if only_redundant:
            rest = [each for each in rest if each in interior or each.state is S.CLEAN]
            if lru.n_bytes - sum(each.n_bytes for each in rest) + n_bytes > lru.capacity:
                return False
        while rest and lru.n_bytes + n_bytes > lru.capacity:
            losers = self._tiers.shares.losers(lru, tenant, n_bytes)
            first = next((each for each in rest if each.tenant in losers), rest[0])
            rest.remove(first)
            self._evict(first)
        return lru.n_bytes + n_bytes <= lru.capacity

    def keep_budget(self, fraction: float) -> None:
        """Shrink the budget to a fraction while memory is short, and evict from RAM what exceeds it."""
        lru = self._tiers.checkpoints
        before, lru.capacity = lru.capacity, int(fraction * self.settings.limits.ram_bytes)
        self.evict_for(0)
        # Checkpoints that have to stay may exceed the budget.
        lru.capacity = max(lru.capacity, lru.n_bytes)
        # Lookups are stale: whether a checkpoint that is only on disk can be restored depends on this capacity.
        self._tree.version += lru.capacity != before

    # --- inside ---

    @property
    def _pinned(self) -> set[Segment]:
        """Segments and checkpoints that must stay: about to be loaded or restored, or being read or written."""
        return self._tiers.in_use.union(self.pending_restores.values())

    def _may_take_at_end(self, seq: int) -> bool:
        """True if a sequence is live, and its prefix may be used again."""
        node = self._tree.end_node(seq)
        if not self.has_states or node is None or node.is_root or not self._states.is_live(seq):
            return False
        return not is_private(node.namespace)

    def _take_unless_near(self, seq: int, *, only_redundant: bool = False) -> bool:
        node = self._sequences.end(seq)
        return not self._is_near(node) and self.take(seq, only_redundant=only_redundant) is not None

    def _is_near(self, node: Node) -> bool:
        """True if a checkpoint is so close above the end of a path that another one is not worth taking."""
        above = next(iter(checkpoints_on(node)), None)
        return above is not None and node.end - above.end < self.settings.min_end_gap

    def _thin_path(self, node: Node) -> None:
        """Evict one checkpoint of a path that has too many: the one whose neighbours are closest together.

        Distances are relative to the distance from the end of the path, so the remaining ones are spaced wider
        towards the root. The deepest stays, and so do those about to be restored. Forks go if nothing else can.
        """
        path = [each for each in checkpoints_on(node) if each.state.is_loadable]
        if len(path) <= self.settings.limits.on_path:
            return
        pinned = self._pinned
        bounds = [*(each.end for each in path), 0]
        sparable = [
            ((bounds[i - 1] - bounds[i + 1]) / (bounds[0] - bounds[i + 1]), each)
            for i, each in enumerate(path)
            if i and each not in pinned and not each.is_fork
        ]
        candidates = sparable or [(each.last_used, each) for each in path[1:] if each not in pinned]
        if candidates:
            self._evict(min(candidates, key=lambda item: item[0])[1])

    def _evict(self, checkpoint: Checkpoint) -> None:
        self._tiers.transition(checkpoint, SegmentEvent.EVICT_RAM)
        self.counters.evicted += 1
