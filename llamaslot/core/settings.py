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
    unified: bool = True
    """Whether slots share one pool; else each has `n_ctx_slot` cells of its own."""
    reuse: bool = True
    """Whether a sequence may be trimmed and continued."""
    gap_ms: float = 100.0
    """Time between two tokens of a stream that prefill beside it may use."""
    eog: frozenset[int] = frozenset()
    """Tokens that end a generation."""
