"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from llamaslot.base.model import StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Limits that every plan keeps; those of the cache are in `CacheSettings`."""

    n_ctx_slot: int
    """Tokens that one slot may hold."""
    n_ubatch: int
    """Tokens that one step may compute; at least one per slot."""
    gap_ms: float
    """About how long prefill may make the time between two tokens of a stream."""
    step_cost: StepCost | None = None
    """Measured cost of small steps; None if it is not known."""
    eog: frozenset[int] = frozenset()
    """Tokens that end a generation."""
