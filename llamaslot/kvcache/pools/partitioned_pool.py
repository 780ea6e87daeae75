"""Partitioned pool: each sequence has cells of its own, as it has where a model's KV cannot be trimmed.

A sequence may become a copy of another one as a whole, if that beats computing. llama.cpp carries such a copy out
with the next decode (fact 3), so until then neither of the two may take part in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamaslot.base.kv_ops import CopyStream
from llamaslot.base.stats import CacheStats
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.pools.pool import Sharing
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences


@dataclass(eq=False)
class PartitionedPool:
    """Implements `Pool`; `prefill_seconds` estimates the time to compute a number of tokens."""

    _tree: RadixTree
    _sequences: Sequences
    _settings: CacheSettings
    _counters: CacheStats
    _prefill_seconds: Callable[[int], float]

    @property
    def n_used(self) -> int:
        """Cells in use: the lengths of all sequences."""
        return sum(map(self._tree.length, self._sequences.all))

    @property
    def n_idle(self) -> int:
        """Cells of the sequences that no request runs in."""
        idle = (seq for seq in self._sequences.all if not self._tree.is_pinned(seq))
        return sum(map(self._tree.length, idle))

    @property
    def n_idle_duplicates(self) -> int:
        """None: all cells of idle sequences count as idle."""
        return 0

    def acquire(self, slots: Sequence[int], match: Match) -> tuple[int, int]:
        """Choose the slot that holds most of a match; copy a sequence that holds more to it, if that pays."""
        held = self._sequences.held(match, slots)
        seq = self._choose(slots, held)
        own = held[seq]
        source = self._source(match, own) if seq not in self._copying else None
        if own < self._tree.length(seq) and not self._sequences.is_covered(seq):
            # llama.cpp allows one stream copy per sequence and decode: copying the match to this slot comes before
            # saving the old path to a spare sequence.
            if source is not None:
                self._counters.evicted_tokens += self._tree.length(seq) - own
            else:
                self.move_to_spare(seq, own)
        if source is None:
            self._sequences.truncate(seq, own)
            if not own:
                self._tree.hold(seq, match.namespace)
            self._tree.pin(seq)
            return seq, 0
        self._sequences.clear(seq)
        self._copy(source, seq, match.n_resident)
        # Clearing may have joined nodes.
        match = self._tree.match(match.namespace, match.tokens[: match.n_resident * WIDTH])
        self._tree.hold(seq, match.namespace, match.resident_end, match.n_resident)
        self._tree.pin(seq)
        return seq, match.n_resident

    def copy_resident(self, _seq: int, _match: Match) -> int:
        """Return 0: cells of a partitioned pool cannot be shared."""
        return 0

    def append(self, seq: int, tokens: bytes) -> None:
        """Append tokens that a running sequence computed."""
        self._tree.extend(seq, tokens)

    def deduplicate(self) -> None:
        """Do nothing: no two sequences have the same cells."""

    def sharing(self, match: Match, slots: Sequence[int], n_in_flight: int) -> Sharing:
        """Share if copying a sequence beats computing what the best of `slots` lacks."""
        own = max(self._sequences.held(match, slots).values())
        n_missing = max(n_in_flight, match.n_resident) - own
        if n_missing <= 0 or not self._is_copy_worth(n_missing):
            return Sharing.COMPUTE
        if n_in_flight <= match.n_resident:
            is_blocked = self._is_match_worth_copying(match, own) and self._source(match, own) is None
            return Sharing.WAIT if is_blocked else Sharing.COMPUTE
        return Sharing.SHARE

    def ensure_free_id(self) -> None:
        """Do nothing: a spare sequence can be overwritten at any time."""

    def move_to_spare(self, seq: int, keep: int) -> None:
        """Copy an idle slot, which is about to drop all but `keep` tokens, to a spare sequence."""
        sequences = self._sequences
        n_lost = self._tree.length(seq) - keep
        may_copy = seq not in self._copying and self._is_copy_worth(n_lost)
        targets = [each for each in sequences.spare if each not in self._copying] if may_copy else []
        if not targets:
            self._counters.evicted_tokens += n_lost
            return
        target = min(targets, key=lambda each: (sequences.n_own(each), sequences.rank(each)))
        self._counters.evicted_tokens += sequences.n_own(target)
        sequences.clear(target)
        end = sequences.end(seq)
        self._copy(seq, target, end.end)
        self._tree.hold(target, end.namespace, end, end.end)
        self._counters.moved_prefixes += 1

    def _choose(self, slots: Sequence[int], held: dict[int, int]) -> int:
        """The longest match, then the lowest rank; while a slot is empty, none that would lose over half."""
        empty = [seq for seq in slots if not self._tree.length(seq)]
        kept = [seq for seq in slots if held[seq] and 2 * held[seq] >= self._tree.length(seq)]
        candidates = (kept or empty) if empty else slots
        return max(candidates, key=lambda seq: (held[seq], -self._sequences.rank(seq), -seq))

    @property
    def _copying(self) -> set[int]:
        """Sequences that take part in a copy before the next decode."""
        copies = [each for each in self._sequences.operations if isinstance(each, CopyStream)]
        return {seq for each in copies for seq in (each.src, each.dst)}

    def _is_copy_worth(self, n_tokens: int) -> bool:
        """True if copying a whole sequence beats computing `n_tokens`."""
        settings = self._settings
        return settings.copies_streams and self._prefill_seconds(n_tokens) > settings.stream_copy_ms / 1e3

    def _is_match_worth_copying(self, match: Match, own: int) -> bool:
        return match.n_resident > own and self._is_copy_worth(match.n_resident - own)

    def _source(self, match: Match, own: int) -> int | None:
        """A sequence from which to copy the whole match, if that beats computing what `own` tokens lack of it."""
        if not self._is_match_worth_copying(match, own):
            return None
        return next((seq for seq in match.resident_end.holders() if seq not in self._copying), None)

    def _copy(self, src: int, dst: int, keep: int) -> None:
        self._sequences.operations.append(CopyStream(src, dst, keep))
        self._counters.copied_tokens += keep
