"""Settings of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamaslot.base.model import CheckpointSize, SegmentSize, StateKind
from llamaslot.kvcache.tiers.disk_io import WriteTotals

MAX_SEGMENT_TOKENS = 512
"""Most tokens of a segment. Segments are loaded whole; at this size, loading one for a part of it costs little."""
MIN_POOLS_IN_RAM = 2
"""Smallest RAM tier, in pools, with which idle prefixes are offloaded early: a smaller one would lose prefixes that
could have stayed in cells.
"""
_NO_SIZE = CheckpointSize(0)


@dataclass(slots=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints of a model with a partial state, whose prefixes are reused through them.

    Fixed except for costs, which `CacheSettings.learn` may set later.
    """

    kind: StateKind = StateKind.NONE
    """NONE for a model without a partial state, which needs no checkpoints."""
    n_swa: int = 0
    """Tokens of a sliding window; 0 without one."""
    n_window_cells: int | None = None
    """Cells of sliding-window layers; None if they always suffice for the windows of all sequences."""
    size: CheckpointSize = _NO_SIZE
    """Bytes of a checkpoint, by its position."""
    ram_bytes: int = 0
    """Budget of host memory for checkpoints."""
    max_on_path: int = 32
    """Most checkpoints on one path (`--ctx-checkpoints`)."""
    step_tokens: int = 1024
    """Tokens between checkpoints in a long prompt (`--checkpoint-min-step`)."""
    min_gap: int = 64
    """Tokens: closer to another checkpoint, none is taken, because computing so few tokens again is cheap."""
    min_end_gap: int = 16
    """The same at the end of a conversation. Smaller, because its next turn will begin exactly there."""
    take_ms: float = 0.0
    restore_ms: float = 0.0
    """Milliseconds to take and to restore a checkpoint; 0 if not measured."""


@dataclass(slots=True, kw_only=True)
class CacheSettings:
    """Size and policy of the cache. Costs are microseconds per token, 0 if unknown.

    Fixed except for the layout with its sequences (`KVCache.set_layout`), and for costs and what follows from them:
    if they could not be measured at start, `learn` sets them later.
    """

    n_slots: int
    n_cells: int
    """Cells of the pool."""
    n_seqs: int
    """Sequence ids: slots first, then spare ones; if cells are shared, the last one is the scratch sequence."""
    unified: bool = True
    """True if all sequences share one pool; False if each has its own part, a stream of llama.cpp's (fact 3)."""
    part_cells: int = 0
    """Cells of a slot while the pool is partitioned, if the layout may change at run time; 0 if it is fixed."""
    context_ms: float = 0.0
    """Milliseconds to create the context, which a change of the layout takes besides saving and loading."""
    can_trim: bool = True
    """True if a sequence can be truncated and then continued."""
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    """For models that cannot be truncated; without checkpoints nothing of them is reused."""
    idle_cells: int | None = None
    """Most cells that idle prefixes may keep; None for no limit."""
    offload_after: int | None = None
    """Prompt tokens computed since its last use after which an idle prefix is offloaded; None for never."""
    ram_bytes: int = 0
    disk_bytes: int = 0
    """Budgets of the tiers; 0 for none."""
    ram_is_fixed: bool = True
    """False if the budget of RAM follows free memory, up to `ram_bytes`."""
    ram_bytes_per_key: int = 0
    disk_bytes_per_key: int = 0
    """Quotas of each API key in the tiers; 0 for none."""
    disk_bytes_per_day: int = 0
    """Bytes that may be written to disk a day; 0 for any number."""
    has_remote: bool = False
    """True if a store that several servers share is configured."""
    disk_written: WriteTotals | None = None
    """Bytes that earlier servers wrote to the disk tier; None without one."""
    segment_size: SegmentSize | None = None
    """Bytes of offloaded tokens; None if nothing can be offloaded."""
    segment_tokens: int = MAX_SEGMENT_TOKENS
    prefill_us: float = 0.0
    save_us: float = 0.0
    load_us: float = 0.0
    foreign_us: float = 0.0
    """Microseconds by which each cell of other sequences slows the computation of a token in a unified pool."""
    min_shared: int = 64
    """Shortest shared prefix worth waiting for; also the shortest unshared tail that keeps a sequence id."""
    gap_ms: float
    """Most time that saving and loading may add between two tokens of a decoding request."""
    write_interval_ms: float = 200.0
    """While requests run, one segment is offloaded ahead in each such interval, to be written to disk."""
    idle_delay_ms: float = 50.0
    """Time without requests after which idle prefixes are offloaded ahead. Not 0, because the next turn of a
    conversation often follows at once and would have to wait.
    """

    def set_costs(self, measured: CacheSettings) -> None:
        """Take over the costs that were measured after the start."""
        self.offload_after = measured.offload_after
        self.prefill_us, self.save_us, self.load_us = measured.prefill_us, measured.save_us, measured.load_us
        self.foreign_us = measured.foreign_us
        self.checkpoints.take_ms = measured.checkpoints.take_ms
        self.checkpoints.restore_ms = measured.checkpoints.restore_ms

    @property
    def pool_cells(self) -> int:
        """All cells. In a partitioned pool each spare sequence has as many as a slot."""
        return self.n_cells if self.unified else self.seq_cells * self.n_seqs

    @property
    def seq_cells(self) -> int:
        """Most cells that one sequence may use."""
        return self.n_cells if self.unified else self.part_cells or self.n_cells // self.n_slots

    @property
    def min_ram_for_idle(self) -> int:
        """Smallest budget of RAM with which idle prefixes are offloaded early, in bytes."""
        return MIN_POOLS_IN_RAM * self.segment_size.of(self.n_cells) if self.segment_size is not None else 0

    @property
    def has_states(self) -> bool:
        """True for a model with a partial state."""
        return self.checkpoints.kind is not StateKind.NONE

    @property
    def can_reuse(self) -> bool:
        """True if prefixes are reused."""
        return self.can_trim or self.has_states

    @property
    def shares_cells(self) -> bool:
        """True if sequences may share cells."""
        return self.unified and self.can_reuse

    @property
    def n_path_seqs(self) -> int:
        """Sequence ids that may hold a path: all but the scratch sequence."""
        return max(self.n_slots, self.n_seqs - 1) if self.shares_cells else self.n_seqs

    @property
    def scratch(self) -> int | None:
        """Id of the scratch sequence, through which KV is saved and loaded; None without one."""
        return self.n_seqs - 1 if self.shares_cells and self.n_seqs > self.n_slots else None

    @property
    def saves(self) -> bool:
        """True if KV can be saved to host memory and loaded."""
        has_way = self.scratch is not None if self.unified else self.can_trim
        return has_way and self.segment_size is not None

    @property
    def n_spare(self) -> int:
        """Ids that can keep idle prefixes while all slots run.

        In a shared pool the scratch sequence does not count, nor, for models that can be truncated, the id that
        stays free to move a path to.
        """
        return max(0, self.n_seqs - self.n_slots - (1 + self.can_trim) * self.shares_cells)

    @property
    def offloads(self) -> bool:
        """True if KV that leaves the pool is kept in RAM."""
        return self.saves and self.ram_bytes > 0

    @property
    def writes(self) -> bool:
        """True if offloaded prefixes are written to disk."""
        return self.offloads and self.disk_bytes > 0

    @property
    def uploads(self) -> bool:
        """True if offloaded prefixes are uploaded to the remote tier."""
        return self.offloads and self.has_remote

    @property
    def offloads_ahead(self) -> bool:
        """True if idle prefixes are offloaded before their cells are needed."""
        leaves_early = self.offload_after is not None and self.unified
        return self.offloads and (leaves_early or self.writes or self.uploads)

    @property
    def copies_running(self) -> bool:
        """True if KV of running requests is copied to RAM, to be written or uploaded from there.

        Not in a partitioned pool, where saving one segment means saving its whole sequence.
        """
        return self.unified and (self.writes or self.uploads)

    @property
    def ahead_tokens(self) -> int:
        """Most tokens that one step offloads ahead while the server is idle."""
        return self.segment_tokens if self.unified else self.seq_cells

    @property
    def load_cost(self) -> float:
        """Time to load a token divided by the time to compute it; 0 if unknown."""
        return self.load_us / self.prefill_us if self.prefill_us else 0.0

    def move_us(self, n_saved: int, n_loaded: int) -> float:
        """Return the microseconds to save `n_saved` tokens and load `n_loaded`; unknown costs count as 0."""
        return self.save_us * n_saved + self.load_us * n_loaded

    def pays_to_move(self, n_wanted: int, us: float) -> bool:
        """True if computing `n_wanted` tokens takes longer than `us`, the time to move them, or is not known."""
        return not self.prefill_us or n_wanted * self.prefill_us > us

    @property
    def min_restored(self) -> int:
        """Number of tokens whose computation takes as long as restoring a checkpoint."""
        return round(1e3 * self.checkpoints.restore_ms / self.prefill_us) if self.prefill_us else 0

    @property
    def max_takes_in_gap(self) -> int | None:
        """Most checkpoints that one step may take while requests decode; None for no limit."""
        return int(self.gap_ms / self.checkpoints.take_ms) if self.checkpoints.take_ms else None

    def max_tokens_in_gap(self, us_per_token: float) -> int | None:
        """Most tokens that one step may save or load while requests decode, at this cost each; None: no limit."""
        return max(1, int(1e3 * self.gap_ms / us_per_token)) if us_per_token else None
