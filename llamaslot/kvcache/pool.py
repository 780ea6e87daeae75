"""Pool of cells: which slot a request gets, how it gets the cells of its cached prefix, and whether cells suffice.

In a unified pool all sequences share the cells: copying a prefix costs nothing, and a token takes one cell however
many sequences hold it. One spare id is always kept free, so that a slot's old path can be moved to it first, and
then the least useful of all idle paths loses its id.

In a partitioned pool each slot has its own cells, as many as a request in it may have tokens. A copy takes cells
and time, and what a slot drops goes to RAM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from llamaslot.base.kv_ops import Remove, Shift
from llamaslot.base.namespaces import is_private, is_shifted
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.loading import StateRestorer
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.offloading import Offloader
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.checkpoints import Checkpoints
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers


@dataclass(eq=False)
class Pool:
    """Cells of the context. Sequences are given by their ids, tokens are packed."""

    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _settings: CacheSettings
    _offloader: Offloader
    _checkpoints: Checkpoints
    _restorer: StateRestorer

    def acquire(self, slots: Sequence[int], match: Match, apart: Sequence[int] = ()) -> tuple[int, int]:
        """Choose one of `slots`, give it a match's resident part, and pin it; returns it and the tokens copied.

        Chosen is
        1. the slot with the longest path among those whose whole path is part of the match (an empty slot has 0
           tokens), else
        2. a slot whose path other sequences hold too, so that nothing is lost, else
        3. the slot that holds most of the match; of several, the least recently used. Its old path moves to a spare
           sequence.

        In a partitioned pool, where copies take time, 3 is also chosen if that takes less time than 1 or 2. Of
        slots that hold as much of the match, the one farthest from those `apart` is chosen: they run in other
        steps, and llama.cpp computes adjacent slots in one pass (fact 3).
        """
        held = self._sequences.held(match, slots)
        seq = self._choose(slots, held, min(match.n_resident, match.n_cached), apart)
        own = held[seq]
        self._restorer.begin(seq, own, match)
        self.claim(seq, own, match.namespace)
        # Nodes may have been split or joined since the lookup.
        now = self._tree.match(match.namespace, match.tokens)
        n_copied = self.copy_resident(seq, replace(now, n_cached=match.n_cached))
        self._restorer.finish(seq)
        return seq, n_copied

    def claim(self, seq: int, own: int, namespace: str) -> None:
        """Pin an idle slot, and truncate it to its first `own` tokens; its old path moves unless others hold it."""
        if own < self._tree.length(seq):
            if self._sequences.is_covered(seq):
                self._checkpoints.take_at_end(seq)
            else:
                self._move_to_spare(seq, own)
        self._sequences.truncate(seq, own)
        if not own:
            self._tree.hold(seq, namespace)
        self._tree.pin(seq)

    def copy_resident(self, seq: int, match: Match) -> int:
        """Copy a match's resident cells of other sequences to a sequence; returns how many, 0 if that is slower."""
        start, end = self._tree.length(seq), min(match.n_resident, match.n_cached)
        if end <= start or not self._settings.can_reuse:
            return 0
        node = match.resident_end
        while end <= node.start and node.parent is not None:
            node = node.parent
        source = next(node.holders())
        if end == node.end and self._sequences.states.copies_live:
            source = next(filter(self._sequences.states.is_live, sorted(node.end_of)), source)
        if not self._settings.unified:
            source = min(node.holders(), key=self._tree.length)
            # A copy between parts saves both sequences, joins them in host memory, and loads the target (fact 3).
            us = self._settings.move_us(self._tree.length(source) + start, end)
            if not self._settings.pays_to_move(end - start, us) or not self._tiers.may_load:
                return 0
        self._sequences.copy(source, seq, end, match.tokens)
        self._tiers.counters.copied_tokens += end - start
        return end - start

    def shift(self, seq: int, namespace: str, start: int, end: int) -> None:
        """Discard tokens `[start, end)` of a slot; it holds the rest in another namespace, pinned.

        Its old path stays: other sequences hold it, or it moves as if another request got the slot. Private and
        shifted paths do not. If there are not enough cells for the rest, the slot is empty, to be computed again.
        """
        sequences, old = self._sequences, self._sequences.end(seq)
        tokens, is_first = old.prefix(), not is_shifted(old.namespace)
        if not is_private(old.namespace) and not sequences.is_covered(seq):
            self._move_to_spare(seq, 0)
        sequences.leave(seq)
        rest = tokens[: start * WIDTH] + tokens[end * WIDTH :]
        fits = self._offloader.free_cells(len(rest) // WIDTH)
        # Other sequences may hold cells of the old path. None holds any of a shifted one.
        sequences.operations.append(Shift(seq, start, end, copies=is_first) if fits else Remove(seq, 0))
        self._tree.hold(seq, namespace)
        self._tree.pin(seq)
        if fits:
            self._tree.extend(seq, rest)
        self.ensure_free_id()

    def deduplicate(self) -> None:
        """Remove duplicate cells, and free spare ids whose paths other sequences hold."""
        self._sequences.operations += self._sequences.duplicates.resolve()
        self._release_covered()

    def _move_to_spare(self, seq: int, keep: int) -> None:
        """Move the path of a slot, which is about to drop all but `keep` tokens, to a spare id, or offload it."""
        sequences = self._sequences
        target = next((each for each in sequences.all if not sequences.in_use(each)), None)
        end = sequences.end(seq)
        # In a partitioned pool a copy takes as long as saving, and the path would have to be saved later anyway.
        saves = self._settings.offloads and not self._settings.unified
        # A single slot's only spare id would have to be freed again at once, since one must stay free.
        if target is None or len(sequences.all) <= 2 or saves:
            start = max(end.end - sequences.n_own(seq), keep)
            us = 0.0 if self._settings.unified else self._settings.move_us(end.end, end.end)
            if self._settings.pays_to_move(end.end - start, us):
                self._offloader.offload_evicted(seq, start, end.end)
            else:
                self._tiers.counters.evicted_tokens += end.end - start
            return
        if not sequences.states.copies_live:
            self._checkpoints.take_at_end(seq)
        sequences.copy_to_unused(seq, target)
        self._tiers.counters.moved_prefixes += 1

    def ensure_free_id(self) -> None:
        """Make sure that a spare id is free.

        If none is, an idle path is evicted: those of tenants with more than their share of the ids first, then
        those with fewer than `min_shared` tokens of their own, then the least recently used.
        """
        sequences = self._sequences
        self._release_covered()
        if not sequences.spare or not all(map(sequences.in_use, sequences.spare)):
            return
        idle = [seq for seq in sequences.all if sequences.in_use(seq) and not self._tree.is_pinned(seq)]
        used = Counter(sequences.end(seq).tenant for seq in sequences.all if sequences.in_use(seq))
        excess = self._tiers.shares.excess(used, len(sequences.all))

        def order(seq: int) -> tuple[bool, bool, float]:
            is_long = sequences.n_own(seq) >= self._settings.min_shared
            return excess[sequences.end(seq).tenant] <= 0, is_long, sequences.rank(seq)

        victim: int = min(idle, key=order)
        end = sequences.end(victim).end
        self._offloader.offload_evicted(victim, end - sequences.n_own(victim), end)
        sequences.clear(victim)
        self._tiers.counters.dropped_prefixes += 1
        if victim in sequences.slots:
            moved = sequences.spare[-1]
            self._move_to_spare(moved, 0)
            sequences.clear(moved)

    def _choose(self, slots: Sequence[int], held: dict[int, int], n_resident: int, apart: Sequence[int]) -> int:
        def distance(seq: int) -> int:
            return 0 if self._settings.unified else min((abs(seq - each) for each in apart), default=0)

        def order(seq: int) -> tuple[int, int, float]:
            return held[seq], distance(seq), -self._sequences.rank(seq)

        def order_of_whole(seq: int) -> tuple[int, bool, int, int, int]:
            is_live = self._sequences.states.is_live(seq)
            return held[seq], is_live, distance(seq), self._n_running_beside(seq), -seq

        longest = max(slots, key=order)
        if whole := [seq for seq in slots if held[seq] == self._tree.length(seq)]:
            chosen = max(whole, key=order_of_whole)
        else:
            chosen = max(filter(self._sequences.is_covered, slots), key=order, default=longest)
        if self._settings.unified:
            return chosen
        return min(chosen, longest, key=lambda seq: self._cost(seq, held[seq], n_resident))

    def _n_running_beside(self, seq: int) -> int:
        """Number of running neighbours of a slot in a partitioned pool.

        A slot beside running ones makes steps faster, as in `acquire`.
        """
        if self._settings.unified:
            return 0
        return sum(each in self._sequences.slots and self._tree.is_pinned(each) for each in (seq - 1, seq + 1))

    def _cost(self, seq: int, own: int, n_resident: int) -> float:
        """Microseconds that choosing a slot of a partitioned pool costs, if it holds `own` of `n_resident` tokens:
        to get the missing tokens now, and to get the slot's old path back later, if nothing else holds it.
        """
        settings, length = self._settings, self._tree.length(seq)
        missing, tail = max(n_resident - own, 0), 0
        if length > own and not self._sequences.is_covered(seq):
            tail = min(self._sequences.n_own(seq), length - own)
        bring = settings.move_us(n_resident + own, n_resident)
        bring_back = settings.move_us(length, length)
        return min(settings.cost.prefill_us * missing, bring) + min(settings.cost.prefill_us * tail, bring_back)

    def _release_covered(self) -> None:
        for seq in self._sequences.spare:
            if self._sequences.in_use(seq) and self._sequences.is_covered(seq):
                self._sequences.clear(seq)


@dataclass(eq=False)
class WindowCells:
    """Counts the cells of sliding-window layers, and evicts idle sequences when they run out.

    llama.cpp gives these layers cells for one window per sequence and one micro-batch, but no more than the pool
    has. In a small pool they run out before the cells of the other layers do, because sequences share those, while
    each live sequence has its own window (fact 32).
    """

    _tree: RadixTree
    _sequences: Sequences
    _checkpoints: Checkpoints
    _offloader: Offloader
    _settings: CacheSettings

    @property
    def n_free(self) -> int | None:
        """Free cells, without the one that saving a segment needs; None if there are always enough."""
        chosen = self._settings.checkpoints
        if chosen.n_window_cells is None:
            return None
        lengths = {seq: self._tree.length(seq) for seq in self._sequences.all}
        # A sequence that has lost its state keeps a single cell.
        used = sum(min(n, chosen.n_swa if self._sequences.states.is_live(seq) else 1) for seq, n in lengths.items())
        return chosen.n_window_cells - 1 - used

    def limit(self, n_tokens: int, n_granted: int = 0) -> int:
        """Return how many of `n_tokens` a step may compute in addition to `n_granted` tokens."""
        free = self.n_free
        return n_tokens if free is None else max(0, min(n_tokens, free - n_granted))

    def fits(self, lengths: Sequence[int]) -> bool:
        """True if sequences of these lengths can run side by side."""
        chosen = self._settings.checkpoints
        if chosen.n_window_cells is None:
            return True
        n_used = sum(min(n, chosen.n_swa) for n in lengths)
        # Besides the windows: one cell for each sequence id (saving needs one, idle ones keep one), and one for the
        # next token of each running sequence.
        return n_used + self._settings.n_seqs + len(lengths) <= chosen.n_window_cells

    def evict(self, n_cells: int, *, n_least: int = 0, kept: Container[int] = ()) -> None:
        """Evict idle sequences that are not in `kept`, least recently used first, until `n_cells` are free.

        Those without a state free only one cell each, so they go last, and only until `n_least` are free.
        """
        sequences, is_live = self._sequences, self._sequences.states.is_live
        for seq in sorted(sequences.all, key=lambda seq: (not is_live(seq), sequences.rank(seq))):
            free = self.n_free
            if free is None or free >= (n_cells if is_live(seq) else n_least):
                return
            is_idle = self._tree.length(seq) > 0 and not self._tree.is_pinned(seq)
            if is_idle and seq not in kept:
                end = sequences.end(seq).end
                self._offloader.offload_evicted(seq, end - sequences.n_own(seq), end)
                if sequences.is_covered(seq):
                    self._checkpoints.take_at_end(seq)
                sequences.clear(seq)

    def evict_for(self, match: Match) -> None:
        """Evict idle sequences until the window of a match fits, but none that end on its path."""
        on_path = {seq for node in match.resident_end.path_to_root() for seq in node.end_of}
        self.evict(min(match.n_cached, self._settings.checkpoints.n_swa), kept=on_path)
