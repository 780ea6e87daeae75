"""Settings of the prefix cache: facts about the context, budgets, and measured costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from llamaslot.base.backend import Backend
from llamaslot.base.model import (
    CheckpointLimits,
    CheckpointSize,
    KvCost,
    ModelInfo,
    SegmentSize,
    StateCost,
    StateKind,
)
from llamaslot.kvcache.disk_io import SegmentDisk, WriteTotals

MAX_SEGMENT_TOKENS = 512
"""Most tokens of a segment. Segments are loaded whole; at this size, loading one for a part of it costs little."""
MIN_POOLS_IN_RAM = 2
"""Smallest RAM tier, in pools, with which idle prefixes are offloaded early: a smaller one would lose prefixes that
could have stayed in cells.
"""
_NO_CHECKPOINTS = CheckpointLimits(ram_bytes=0, on_path=32, step=1024)
_NO_SIZE = CheckpointSize(0)
_UNKNOWN_KV_COST = KvCost(0, 1.0, 0.0, 0.0, 0.0, 0.0)
_UNKNOWN_STATE_COST = StateCost(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of what the cache may use, chosen once at start from flags and free memory."""

    ram_bytes: int = 0
    """Host memory for prefixes; 0 if nothing is offloaded."""
    ram_is_fixed: bool = True
    """False if less than `ram_bytes` is used while memory is short."""
    ram_bytes_per_key: int = 0
    disk_bytes_per_key: int = 0
    """Quotas of each API key in the RAM and disk tiers; 0 for none."""
    disk_bytes_per_day: int = 0
    """Bytes that may be written to disk a day; 0 for no limit."""
    idle_cells: int | None = None
    """Most cells that idle prefixes may keep; None for no limit."""
    offload_after: int | None = None
    """Prompt tokens computed since its last use after which an idle prefix is offloaded; None for never."""
    offloads_by_cost: bool = False
    """True if `offload_after` follows from measured costs."""
    checkpoints: CheckpointLimits | None = None
    """None for a model without checkpoints."""

    def with_costs(self, info: ModelInfo) -> Budgets:
        """Return the budgets with the `offload_after` that follows from the model's measured costs, if it does."""
        cost, pool_bytes = info.kv_cost, info.segment_size.of(info.n_ctx) if info.segment_size is not None else 0
        if not self.offloads_by_cost or cost is None or self.ram_bytes < max(1, MIN_POOLS_IN_RAM * pool_bytes):
            return self
        return replace(self, offload_after=cost.break_even_tokens)


_NO_BUDGETS = Budgets()


@dataclass(slots=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints of a model with a partial state, whose prefixes are reused through them.

    Fixed except for the cost, which `CacheSettings.set_costs` may set later.
    """

    kind: StateKind = StateKind.NONE
    """NONE for a model without a partial state, which needs no checkpoints."""
    n_swa: int = 0
    """Tokens of a sliding window; 0 without one."""
    n_window_cells: int | None = None
    """Cells of sliding-window layers; None if they always suffice for the windows of all sequences."""
    size: CheckpointSize = _NO_SIZE
    """Bytes of a checkpoint, by its position."""
    limits: CheckpointLimits = _NO_CHECKPOINTS
    cost: StateCost = _UNKNOWN_STATE_COST
    """0 if not measured."""
    min_gap: ClassVar[int] = 64
    """Tokens: closer to another checkpoint, none is taken, because computing so few tokens again is cheap."""
    min_end_gap: ClassVar[int] = 16
    """The same at the end of a conversation. Smaller, because its next turn will begin exactly there."""


@dataclass(slots=True, kw_only=True)
class CacheSettings:
    """Size and policy of the cache.

    Fixed except for the layout with its sequences (`KVCache.set_layout`), `is_on_trial`, and costs and what follows
    from them: if no earlier start has kept them, `set_costs` sets them later.
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
    budgets: Budgets = _NO_BUDGETS
    disk_bytes: int = 0
    """Budget of the disk tier; 0 for none."""
    has_remote: bool = False
    """True if a store that several servers share is configured."""
    disk_written: WriteTotals | None = None
    """Bytes that earlier servers wrote to the disk tier; None without one."""
    segment_size: SegmentSize | None = None
    """Bytes of offloaded tokens; None if nothing can be offloaded."""
    segment_tokens: ClassVar[int] = MAX_SEGMENT_TOKENS
    cost: KvCost = _UNKNOWN_KV_COST
    """0 if not measured."""
    min_shared: ClassVar[int] = 64
    """Shortest shared prefix worth waiting for; also the shortest unshared tail that keeps a sequence id."""
    is_on_trial: bool = False
    """True until the self-test of reuse has passed: KV stays in the pool, but is neither offloaded nor reused."""
    gap_ms: float
    """Most time that saving and loading may add between two tokens of a decoding request."""
    write_interval_ms: ClassVar[float] = 200.0
    """While requests run, one segment is offloaded ahead in each such interval, to be written to disk."""
    idle_delay_ms: ClassVar[float] = 50.0
    """Time without requests after which idle prefixes are offloaded ahead. Not 0, because the next turn of a
    conversation often follows at once and would have to wait.
    """

    def set_costs(self, info: ModelInfo) -> None:
        """Take over the costs that were measured after the start."""
        self.budgets = self.budgets.with_costs(info)
        self.cost = info.kv_cost or _UNKNOWN_KV_COST
        self.checkpoints.cost = info.state_cost or _UNKNOWN_STATE_COST

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
    def offloads(self) -> bool:
        """True if KV that leaves the pool is kept in RAM."""
        return self.saves and self.budgets.ram_bytes > 0

    @property
    def writes(self) -> bool:
        """True if offloaded prefixes are written to disk."""
        return self.offloads and self.disk_bytes > 0

    @property
    def uploads(self) -> bool:
        """True if offloaded prefixes are uploaded to the remote tier."""
        return self.offloads and self.has_remote

    @property
    def copies_running(self) -> bool:
        """True if KV of running requests is copied to RAM, to be written or uploaded from there.

        Not in a partitioned pool, where saving one segment means saving its whole sequence.
        """
        return self.unified and (self.writes or self.uploads)

    @property
    def load_cost(self) -> float:
        """Time to load a token divided by the time to compute it; 0 if unknown."""
        return self.cost.load_us / self.cost.prefill_us if self.cost.prefill_us else 0.0

    def move_us(self, n_saved: int, n_loaded: int) -> float:
        """Return the microseconds to save `n_saved` tokens and load `n_loaded`; unknown costs count as 0."""
        return self.cost.first_save_us * n_saved + self.cost.load_us * n_loaded

    def pays_to_move(self, n_wanted: int, us: float) -> bool:
        """True if computing `n_wanted` tokens takes longer than `us`, the time to move them, or is not known."""
        return not self.cost.prefill_us or n_wanted * self.cost.prefill_us > us

    @property
    def min_restored(self) -> int:
        """Number of tokens whose computation takes as long as restoring a checkpoint."""
        prefill_us = self.cost.prefill_us
        return round(1e3 * self.checkpoints.cost.restore_ms / prefill_us) if prefill_us else 0

    @property
    def max_takes_in_gap(self) -> int | None:
        """Most checkpoints that one step may take while requests decode; None for no limit."""
        take_ms = self.checkpoints.cost.take_ms
        return int(self.gap_ms / take_ms) if take_ms else None

    def max_tokens_in_gap(self, us_per_token: float) -> int | None:
        """Most tokens that one step may save or load while requests decode, at this cost each; None: no limit."""
        return max(1, int(1e3 * self.gap_ms / us_per_token)) if us_per_token else None


def cache_settings(
    backend: Backend,
    budgets: Budgets,
    disk: SegmentDisk | None,
    *,
    gap_ms: float,
    has_remote: bool = False,
    has_slot_files: bool = False,
) -> CacheSettings:
    """Return the settings of the cache for a backend, a disk, and optionally a remote store and slot files."""
    info = backend.info
    return CacheSettings(
        n_slots=info.n_slots,
        n_cells=info.n_ctx,
        n_seqs=backend.n_seqs,
        unified=info.unified,
        part_cells=part_cells(info, budgets, has_slot_files=has_slot_files),
        context_ms=info.context_ms,
        can_trim=info.can_trim,
        checkpoints=checkpoint_settings(info, backend.n_seqs, budgets.checkpoints or _NO_CHECKPOINTS),
        budgets=budgets,
        disk_bytes=disk.capacity if disk is not None else 0,
        has_remote=has_remote,
        disk_written=disk.written if disk is not None else None,
        segment_size=info.segment_size,
        cost=info.kv_cost or _UNKNOWN_KV_COST,
        gap_ms=gap_ms,
    )


def part_cells(info: ModelInfo, budgets: Budgets, *, has_slot_files: bool) -> int:
    """Return the cells of a slot while the pool is partitioned; 0 if the layout is fixed.

    The layout is fixed if slots can be saved to files, since each change empties them; if RAM cannot hold
    `MIN_POOLS_IN_RAM` pools; and if an API key may not keep a whole pool in RAM.
    """
    if not info.part_cells or has_slot_files or info.segment_size is None:
        return 0
    pool = info.segment_size.of(info.n_ctx)
    suffices = budgets.ram_bytes >= MIN_POOLS_IN_RAM * pool and not 0 < budgets.ram_bytes_per_key < pool
    return info.part_cells if suffices else 0


def checkpoint_settings(info: ModelInfo, n_seqs: int, limits: CheckpointLimits) -> CheckpointSettings:
    """Return the settings of checkpoints for a model in a context of `n_seqs` sequences.

    They allow no checkpoints if the model needs none, or cannot have any.
    """
    if not info.keeps_checkpoints or info.checkpoint_size is None:
        return CheckpointSettings()
    n_window = info.state.n_window_cells
    return CheckpointSettings(
        kind=info.state.kind,
        n_swa=info.state.n_swa,
        n_window_cells=n_window if 0 < n_window < info.state.n_swa * n_seqs + info.n_ubatch else None,
        size=info.checkpoint_size,
        limits=limits,
        cost=info.state_cost or _UNKNOWN_STATE_COST,
    )
