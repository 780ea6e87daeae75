"""Cells of sliding-window layers, which can be too few for the windows of all sequences.

llama.cpp gives these layers cells for one window per sequence and one micro-batch, but no more than the pool has.
In a small pool they run out before the cells of the other layers do, because sequences share those, while each live
sequence has its own window (fact 32).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.match import Match
from llamaslot.kvcache.offload.checkpoints import Checkpoints
from llamaslot.kvcache.offload.offloader import Offloader
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences


@dataclass(eq=False)
class WindowCells:
    """Counts the cells of window layers, and evicts idle sequences when they run out."""

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
