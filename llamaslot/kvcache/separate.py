"""The ledger where each sequence has cells of its own: a partitioned pool, or a model that cannot be cut.

A sequence may become a copy of another one as a whole, where that beats computing. llama.cpp carries such a copy
out with the next decode, so until then neither of the two takes part in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamaslot.base.kv_ops import CopyStream, Operation
from llamaslot.base.tokens import WIDTH
from llamaslot.kvcache.ledger import Ledger
from llamaslot.kvcache.tree import Match


class SeparateLedger(Ledger):
    """See `Ledger`; `copy_pays` says whether copying a whole sequence beats computing so many tokens."""

    def __init__(
        self, *, n_slots: int, n_seqs: int, n_cells: int, copy_pays: Callable[[int], bool] = lambda _n: False
    ) -> None:
        super().__init__(n_slots=n_slots, n_seqs=n_seqs, n_cells=n_cells)
        self._copy_pays = copy_pays
        self._copying: set[int] = set()
        """Sequences that take part in a copy before the next decode."""

    @property
    def n_used(self) -> int:
        """See `Ledger.n_used`."""
        return sum(self.length(seq) for seq in self._ids)

    def claim(self, choices: Sequence[int], space: str, tokens: bytes) -> tuple[int, int]:
        """See `Ledger.claim`: the slot that holds most of it, or a copy of a sequence that holds more."""
        match = self.tree.match(space, tokens)
        held = self.tree.shared(match, choices)
        seq = self._choose(choices, held)
        own = held[seq]
        source = self._source(match, own) if seq not in self._copying else None
        if own < self.length(seq) and not self.tree.is_covered(seq):
            # A slot takes part in one copy at a time: what is wanted now goes before what may be.
            self._park(seq, self.length(seq) - own, is_copying=source is not None)
        if source is not None:
            own = 0
        self.truncate(seq, own)
        n = match.n if source is not None else own
        if source is not None:
            self._copy(source, seq, n)
        match = self.tree.match(space, tokens[: n * WIDTH])
        if not own:
            self.tree.hold(seq, match)
        self.tree.pin(seq)
        self.touch(match, hits=1)
        return seq, n

    def copy_pays(self, n_tokens: int) -> bool:
        """See `Ledger.copy_pays`."""
        return n_tokens > 0 and self._copy_pays(n_tokens)

    def waits_for_copy(self, choices: Sequence[int], space: str, tokens: bytes) -> bool:
        """Whether a copy is worth it, but each sequence to copy is in another one until the next decode."""
        match = self.tree.match(space, tokens)
        own = max(self.tree.shared(match, choices).values())
        return self.copy_pays(match.n - own) and self._source(match, own) is None

    def take_operations(self) -> list[Operation]:
        """See `Ledger.take_operations`."""
        self._copying.clear()
        return super().take_operations()

    def _choose(self, choices: Sequence[int], held: dict[int, int]) -> int:
        """The longest match; while a slot is empty, none that would lose over half."""
        empty = [seq for seq in choices if not self.length(seq)]
        kept = [seq for seq in choices if held[seq] and 2 * held[seq] >= self.length(seq)]
        candidates = (kept or empty) if empty else choices
        return max(candidates, key=lambda seq: (held[seq], -self._last_used(seq), -seq))

    def _source(self, match: Match, own: int) -> int | None:
        """A sequence from which to copy the whole match, if that beats computing what is behind `own`."""
        if not self.copy_pays(match.n - own):
            return None
        return next((seq for seq in self.tree.holders(match.node) if seq not in self._copying), None)

    def _copy(self, src: int, dst: int, keep: int) -> None:
        self._operations.append(CopyStream(src, dst, keep))
        self._copying |= {src, dst}
        self.counts.n_copied_tokens += keep

    def _park(self, seq: int, n_tokens: int, *, is_copying: bool) -> None:
        """Let a reserved sequence hold what an idle slot holds, of which so many tokens would be lost."""
        may_copy = not is_copying and seq not in self._copying and self.copy_pays(n_tokens)
        idle = [each for each in self._reserved if each not in self._copying] if may_copy else []
        if not idle:
            self.counts.n_lost_tokens += n_tokens
            return
        target = min(idle, key=lambda each: (self._tail(each), self._last_used(each)))
        self.counts.n_lost_tokens += self._tail(target)
        self.clear(target)
        tip = self.tree.tip(seq)
        assert tip is not None
        self._copy(seq, target, tip.end)
        self.tree.hold(target, Match(tip, tip.end))
        self.counts.n_parked += 1
