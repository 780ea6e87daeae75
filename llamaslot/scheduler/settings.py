"""The limits that every plan keeps to."""

from __future__ import annotations

from dataclasses import dataclass

from llamaslot.base.model import SegmentSize, StepCost
from llamaslot.kvcache.segments import LARGEST


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
    """Sequence ids: the slots' first, then reserved ones; where cells are shared, one of those stays free, and the
    last id is for scratch."""
    unified: bool = True
    """Whether slots share one pool; else each has `n_ctx_slot` cells of its own."""
    reuse: bool = True
    """Whether a sequence may be trimmed and continued."""
    idle_cells: int | None = None
    """Cells that idle prefixes may occupy; None for all that nothing else needs."""
    idle_life: int | None = None
    """Prompt tokens computed beside an idle prefix from which on it is better stored; None for never."""
    ram_bytes: int = 0
    """What stored prefixes may take of the host's memory; 0 to store none."""
    disk_bytes: int = 0
    """What they may take on disk beside; 0 where there is none."""
    segment_size: SegmentSize | None = None
    """What stored tokens take; None where none can be stored."""
    segment_tokens: int = LARGEST
    """Tokens of a segment at most."""
    prefill_us: float = 0.0
    save_us: float = 0.0
    load_us: float = 0.0
    """Microseconds in which a token is computed, at worst saved, and loaded; 0 where that is not known."""
    step_cost: StepCost | None = None
    """What small steps cost; None where that is not known."""
    min_shared: int = 64
    """Tokens from which on a shared prefix is worth waiting for, and a tail worth a sequence id."""
    store_ms: float = 200.0
    """How often, beside whatever runs, a segment is stored ahead of need where there is a disk."""
    rest_ms: float = 50.0
    """Time without work after which idle prefixes are moved and stored; a client's next turn may come at once."""
    may_move: bool = True
    """Whether idle prefixes are moved at all: without flash attention llama.cpp saves them far too slowly."""
    repack_gain: int = 1024
    """Cells by which the highest used one must fall for idle prefixes to be moved; see `kvcache/repacking.py`."""
    stream_copy_ms: float = 0.0
    """What it takes to copy all cells of one sequence to another, where each has its own; 0 where it cannot be."""
    gap_ms: float = 100.0
    """About how long the time between two tokens of a stream may become by prefill beside it; see `ChunkSizer`."""
    eog: frozenset[int] = frozenset()
    """Tokens that end a generation."""

    @property
    def n_reserved(self) -> int:
        """Sequence ids that may keep idle prefixes when all slots are taken."""
        return max(0, self.n_seqs - self.n_slots - 2 * self.shares)

    @property
    def shares(self) -> bool:
        """Whether sequences may share cells."""
        return self.unified and self.reuse

    @property
    def stores(self) -> bool:
        """Whether what leaves the pool is stored."""
        return self.shares and self.ram_bytes > 0 and self.segment_size is not None and self.n_seqs > self.n_slots

    @property
    def writes(self) -> bool:
        """Whether what is stored is written to disk."""
        return self.stores and self.disk_bytes > 0

    @property
    def stores_ahead(self) -> bool:
        """Whether idle prefixes are stored before their cells are needed."""
        return self.stores and (self.idle_life is not None or self.writes)

    def at_once(self, each_us: float) -> int | None:
        """Tokens to save or load in one step beside running streams, which take so long each; None: any number."""
        return max(1, int(1e3 * self.gap_ms / each_us)) if each_us else None

    @property
    def copies(self) -> bool:
        """Whether a sequence may become a copy of another one instead."""
        return not self.unified and self.reuse and self.stream_copy_ms > 0
