"""Offload policy: when idle prefixes leave the pool, and when they are copied to RAM in advance.

- Idle cells slow prefill in a unified pool, because attention scans it up to the highest used cell (fact 5). A
  prefix is offloaded once it has slowed the prompt tokens computed since its last use by more time than saving and
  loading it takes.
- Freed cells are scanned too if a used cell lies above them. The policy does not know where cells lie. It assumes
  that the cells it frees in a step, unless the prompt fills them again, lie below all remaining idle prefixes, and
  multiplies `offload_after` by idle / (idle + free).
- Idle prefixes keep at most `idle_cells`.
- While the server is idle, idle prefixes are copied to RAM, so that evicting them for the next prompt is quick.
- With a disk or a remote tier, KV of running requests is copied to RAM as well, a segment at a time, to be written
  or uploaded from there.
- While memory is short (`ram_budget.py`), idle prefixes stay in the pool until their cells are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.offload.offloader import Offloader
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.checkpoints import Checkpoints
from llamaslot.kvcache.tiers.disk_tier import DiskTier
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times, in seconds, at which the cache has work of its own to do; None for never."""

    idle: float | None = None
    """While nothing runs."""
    running: float | None = None
    """While requests run."""


@dataclass(eq=False)
class OffloadPolicy:
    """Decides by `settings`; times are seconds on the caller's clock."""

    _settings: CacheSettings
    _tree: RadixTree
    _sequences: Sequences
    _tiers: SegmentTiers
    _disk: DiskTier
    _offloader: Offloader
    _checkpoints: Checkpoints
    _has_decodes: Callable[[], bool]
    """Returns True if decoding requests wait for this step, and so for what it saves."""
    _next_write_at: float = 0.0
    _was_busy: bool = False
    """True if requests ran or waited at the last plan."""
    _idle_work_at: float | None = None
    """Time at which to offload idle prefixes ahead; None if there is nothing to do."""
    _is_flushing: bool = False

    def slows_prefill(self, n_prefill: int) -> bool:
        """True if some idle prefix should be offloaded before a prefill of `n_prefill` tokens."""
        cutoff = self._offload_cutoff(n_prefill)
        return cutoff is not None and self._tree.eviction.plan(1, cutoff).n_cells > 0

    def offload_idle(self, n_prefill: int) -> None:
        """Evict, and so offload, idle prefixes that would slow this prefill by more than saving and loading costs.

        Each eviction moves the cutoff, so this repeats until nothing is below it.
        """
        # Without memory for segments, evicted prefixes would be lost, so freed cells do not lower the cutoff then.
        limit, n_freed = self._at_most(self._tree.n_idle_tokens), 0
        while n_freed < limit:
            cutoff = self._offload_cutoff(n_prefill, max(n_freed - n_prefill, 0) if self._tiers.may_save else 0)
            n_evicted = self._offloader.evict(limit - n_freed, cutoff) if cutoff is not None else 0
            if not n_evicted:
                return
            n_freed += n_evicted

    def keep_idle_budget(self) -> None:
        """Evict idle prefixes that exceed the budget of idle cells."""
        budget = self._settings.idle_cells
        if self._settings.shares_cells and budget is not None and self._tree.n_idle_tokens > budget:
            self._offloader.evict(self._at_most(self._tree.n_idle_tokens - budget))

    def offload_for_disk(self, now: float) -> None:
        """While requests run, offload a segment each `write_interval_ms`: only what is in RAM can be written."""
        if now < self._next_write_at:
            return
        self._next_write_at = now + self._settings.write_interval_ms / 1e3
        if not self._disk.has_backlog:
            n_tokens = self._at_most(self._settings.segment_tokens)
            self._offloader.offload_ahead(n_tokens, with_running=True)

    def offload_while_idle(self, now: float, *, is_busy: bool) -> None:
        """After `idle_delay_ms` without requests, offload idle prefixes ahead, one segment or checkpoint a call."""
        if is_busy:
            self._was_busy, self._idle_work_at = True, None
        elif self._was_busy:
            self._was_busy, self._idle_work_at = False, now + self._settings.idle_delay_ms / 1e3
        if self._idle_work_at is None or now < self._idle_work_at or self._disk.has_backlog:
            return
        n_done = 0
        if self._settings.offloads_ahead:
            n_done = self._offloader.offload_ahead(self._settings.ahead_tokens, with_running=False)
            n_done = n_done or self._checkpoints.take_ahead()
        if not n_done:
            self._idle_work_at = None

    def flush(self, now: float) -> None:
        """Offload and write everything without delay, because the server is shutting down."""
        if not self._is_flushing:
            # Offload again what was offloaded ahead: it may have left RAM since, or its save may have failed.
            self._sequences.advance()
        self._is_flushing = True
        self._was_busy, self._idle_work_at = False, now
        self._disk.flush()
        self._tiers.uploads.flush()

    @property
    def deadlines(self) -> Deadlines:
        """Times at which something is due."""
        if not self._settings.offloads:
            return Deadlines(self._idle_work_at)
        times = (self._disk.due_at, self._tiers.uploads.due_at)
        due_at = min((each for each in times if each is not None), default=None)
        idle_work_at = None if self._disk.has_backlog else self._idle_work_at
        idle = min((each for each in (idle_work_at, due_at) if each is not None), default=None)
        if not self._settings.copies_running:
            return Deadlines(idle)
        return Deadlines(idle, self._next_write_at if due_at is None else min(self._next_write_at, due_at))

    def _at_most(self, n_tokens: int) -> int:
        """Return `n_tokens`, or fewer if saving that many would delay decoding requests too long."""
        limit = self._settings.max_tokens_in_gap(self._settings.save_us) if self._has_decodes() else None
        return n_tokens if limit is None else min(n_tokens, limit)

    def _offload_cutoff(self, n_prefill: int, n_free: int = 0) -> int | None:
        """Logical time; idle prefixes last used before it are due to be offloaded. None: offload none.

        The clock counts computed prompt tokens, and each use. Idle cells may lie above `n_free` free ones.
        """
        after = self._settings.offload_after
        if after is None or not self._settings.offloads or not self._settings.unified:
            # In a partitioned pool attention does not scan the cells of other sequences, so idle ones slow nothing.
            return None
        if self._tiers.ram.capacity < min(self._settings.ram_bytes, self._settings.min_ram_for_idle):
            # Memory is short, so what leaves the pool would soon be lost.
            return None
        n_idle = self._tree.n_idle_tokens
        idle_share = n_idle / (n_idle + n_free) if n_idle else 1.0
        return self._sequences.clock + min(n_prefill - round(after * idle_share), 0)
