"""The limits that every plan keeps to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The limits that plans keep to."""

    n_slots: int
    n_ctx: int
    """Cells in the pool."""
    n_ctx_slot: int
    """Tokens that one slot may hold."""
    n_ubatch: int
    """Tokens that one step may compute; at least `n_slots`."""
    n_seqs: int
    """Sequence ids: the slots' first, then reserved ones; where cells are shared, one of those stays free."""
    unified: bool = True
    """Whether slots share one pool; else each has `n_ctx_slot` cells of its own."""
    reuse: bool = True
    """Whether a sequence may be trimmed and continued."""
    idle_cells: int | None = None
    """Cells that idle prefixes may occupy; None for all that nothing else needs."""
    idle_life: int | None = None
    """Prompt tokens computed since its last use after which an idle prefix is given up; None for no such end."""
    min_shared: int = 64
    """Tokens from which on a shared prefix is worth waiting for, and a tail worth a sequence id."""
    may_move: bool = True
    """Whether idle prefixes are moved at all: without flash attention llama.cpp saves them far too slowly."""
    repack_gain: int = 1024
    """Cells by which the highest used one must fall for idle prefixes to be moved; see `core/repacking.py`."""
    stream_copy_ms: float = 0.0
    """What it takes to copy all cells of one sequence to another, where each has its own; 0 where it cannot be."""
    gap_ms: float = 100.0
    """Time between two tokens of a stream that prefill beside it may use."""
    eog: frozenset[int] = frozenset()
    """Tokens that end a generation."""

    @property
    def n_reserved(self) -> int:
        """Sequence ids that may keep idle prefixes when all slots are taken."""
        return max(0, self.n_seqs - self.n_slots - self.shares)

    @property
    def shares(self) -> bool:
        """Whether sequences may share cells."""
        return self.unified and self.reuse

    @property
    def copies(self) -> bool:
        """Whether a sequence may become a copy of another one instead."""
        return not self.unified and self.reuse and self.stream_copy_ms > 0
