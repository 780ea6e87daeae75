"""Offload policy: decides when idle prefixes leave the pool, and when they are offloaded ahead of that.

- Idle cells slow prefill in a unified pool, for attention scans it up to the highest used cell (fact 5). A prefix
  is offloaded once the prompt tokens computed since its last use have cost more time than to save and load it.
- Freed cells are scanned too if a used cell lies above them. The policy does not know where cells lie, so it
  assumes that all idle prefixes lie above those that it frees in the same step and that the prompt does not fill
  again, and multiplies `offload_after` by idle / (idle + free).
- Idle prefixes keep at most `idle_cells`.
- While nothing runs, idle prefixes are copied to RAM, so that the next prompt finds them offloaded already.
- With a disk or a remote tier, what running requests hold is copied to RAM as well, a segment at a time, to be
  written or uploaded from there.
- While memory is short (`ram_budget.py`), segments leave RAM, and idle prefixes stay in the pool until their
  cells are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamaslot.kvcache.cache_settings import CacheSettings
from llamaslot.kvcache.offload.checkpoints import Checkpoints
from llamaslot.kvcache.offload.offloader import Offloader
from llamaslot.kvcache.radix_tree import RadixTree
from llamaslot.kvcache.segment import Segment, SegmentEvent, SegmentRank, SegmentState
from llamaslot.kvcache.sequences import Sequences
from llamaslot.kvcache.tiers.segment_tiers import SegmentTiers


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times at which the cache has work although no request asks for it, in seconds; None for never."""

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
    _offloader: Offloader
    _checkpoints: Checkpoints
    _has_streams: Callable[[], bool]
    """Returns True if a stream would wait for what is saved in this step."""
    _next_write_at: float = 0.0
    _was_busy: bool = False
    """True if anything ran since idle prefixes were last offloaded ahead."""
    _idle_work_at: float | None = None
    """Time to offload idle prefixes ahead; None if there is nothing to do."""
    _is_flushing: bool = False

    def slows_prefill(self, n_prefill: int) -> bool:
        """True if some idle prefix should be offloaded before `n_prefill` prompt tokens are computed."""
        cutoff = self._offload_cutoff(n_prefill)
        return cutoff is not None and self._tree.eviction.plan(1, cutoff).n_cells > 0

    def offload_idle(self, n_prefill: int) -> None:
        """Evict, and so offload, the idle prefixes that would slow this prefill by more than loading them costs.

        Each eviction moves the cutoff, so this repeats until nothing more is due.
        """
        # While memory for segments is short, nothing is evicted before it has to be, for it would be lost.
        can_save = self._tiers.now >= self._tiers.saves_again_at
        limit, n_freed = self._at_most(self._tree.n_idle_tokens), 0
        while n_freed < limit:
            cutoff = self._offload_cutoff(n_prefill, max(n_freed - n_prefill, 0) if can_save else 0)
            n_evicted = self._offloader.evict(limit - n_freed, cutoff) if cutoff is not None else 0
            if not n_evicted:
                return
            n_freed += n_evicted

    def keep_idle_budget(self) -> None:
        """Evict what idle prefixes hold beyond their budget."""
        budget = self._settings.idle_cells
        if self._settings.shares_cells and budget is not None and self._tree.n_idle_tokens > budget:
            self._offloader.evict(self._at_most(self._tree.n_idle_tokens - budget))

    def keep_ram_budget(self, n_bytes: int) -> None:
        """Evict from RAM what exceeds `n_bytes`: those that are on disk too first, then others.

        What is being read, written or loaded stays, so this is to be called again until that has ended.
        """
        ram = self._tiers.ram
        if ram.n_bytes > n_bytes:
            kept = {*self._tiers.busy.values()}.union(*self._tiers.load_pins.values())
            evictable = [segment for segment in ram if segment not in kept]
            for segment in sorted(evictable, key=_order_when_short):
                if ram.n_bytes <= n_bytes:
                    break
                self._tiers.transition(segment, SegmentEvent.EVICT_RAM)
        # Lookups say what can be read from disk, which needs room in RAM.
        self._tree.version += ram.capacity != max(n_bytes, ram.n_bytes)
        ram.capacity = max(n_bytes, ram.n_bytes)

    def offload_for_disk(self, now: float) -> None:
        """While requests run: offload a segment ahead now and then, since only what is in RAM can be written."""
        if now < self._next_write_at:
            return
        self._next_write_at = now + self._settings.write_interval_ms / 1e3
        if not self._tiers.writer.has_backlog:
            n_tokens = self._at_most(self._settings.segment_tokens)
            self._offloader.offload_ahead(n_tokens, with_running=True)

    def offload_while_idle(self, now: float, *, is_busy: bool) -> None:
        """Offload idle prefixes ahead, a segment per call, after `idle_delay_ms` without requests."""
        if is_busy:
            self._was_busy, self._idle_work_at = True, None
        elif self._was_busy:
            self._was_busy, self._idle_work_at = False, now + self._settings.idle_delay_ms / 1e3
        if self._idle_work_at is None or now < self._idle_work_at or self._tiers.writer.has_backlog:
            return
        n_done = 0
        if self._settings.offloads_ahead:
            n_done = self._offloader.offload_ahead(self._settings.ahead_tokens, with_running=False)
            n_done = n_done or self._checkpoints.take_ahead()
        if not n_done:
            self._idle_work_at = None

    def flush(self, now: float) -> None:
        """Offload and write everything at once: the server is shutting down."""
        if not self._is_flushing:
            # What was offloaded ahead may have left RAM since, or there was no memory to save it.
            self._sequences.advance()
        self._is_flushing = True
        self._was_busy, self._idle_work_at = False, now
        self._tiers.writer.flush()
        self._tiers.uploads.flush()

    @property
    def deadlines(self) -> Deadlines:
        """Times at which something is due."""
        if not self._settings.offloads:
            return Deadlines(self._idle_work_at)
        due_at = self._tiers.due_at
        idle_work_at = None if self._tiers.writer.has_backlog else self._idle_work_at
        idle = min((each for each in (idle_work_at, due_at) if each is not None), default=None)
        if not self._settings.copies_running:
            return Deadlines(idle)
        return Deadlines(idle, self._next_write_at if due_at is None else min(self._next_write_at, due_at))

    def _at_most(self, n_tokens: int) -> int:
        """Limit `n_tokens` to what can be saved without delaying streams for too long."""
        limit = self._settings.max_tokens_in_gap(self._settings.save_us) if self._has_streams() else None
        return n_tokens if limit is None else min(n_tokens, limit)

    def _offload_cutoff(self, n_prefill: int, n_free: int = 0) -> int | None:
        """Logical time; idle prefixes last used before it are offloaded. None if offloading is off.

        The clock counts computed prompt tokens, and each use. Idle cells may lie above `n_free` free ones.
        """
        after = self._settings.offload_after
        if after is None or not self._settings.offloads or not self._settings.unified:
            # In a partitioned pool idle cells slow no request.
            return None
        if self._tiers.ram.capacity < min(self._settings.ram_bytes, self._settings.min_ram_for_idle):
            # Memory is short: what leaves the pool would be lost soon.
            return None
        n_idle = self._tree.n_idle_tokens
        idle_share = n_idle / (n_idle + n_free) if n_idle else 1.0
        return self._sequences.clock + min(n_prefill - round(after * idle_share), 0)


def _order_when_short(segment: Segment) -> tuple[bool, SegmentRank]:
    """Sort key of eviction while memory is short."""
    return segment.state is not SegmentState.CLEAN, segment.rank
