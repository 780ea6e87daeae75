"""What a loaded model and its context are, as plain values that msgspec can encode."""

from __future__ import annotations

import msgspec

_NOISE = 1.02
"""Ratios up to this one are taken for 1."""


class IdleCost(msgspec.Struct, frozen=True):
    """How much longer prefill takes beside cells that idle prefixes hold, as measured."""

    n_cells: int
    """Idle cells that it was measured beside."""
    ratio: float
    """Time of prefill beside them over its time in an empty pool."""

    @property
    def life(self) -> int | None:
        """Prompt tokens to compute until idle cells have cost the time in which they were computed; None: never.

        Each cell makes one of them take `(ratio - 1) / n_cells` longer.
        """
        return round(self.n_cells / (self.ratio - 1)) if self.ratio > _NOISE else None


class ModelInfo(msgspec.Struct, frozen=True):
    """What the loaded model and its context are; fixed once the engine runs."""

    name: str
    """`general.name` of the file, or the file's name."""
    path: str
    architecture: str
    description: str
    n_params: int
    size_bytes: int
    n_vocab: int
    vocab_type: int
    n_embd: int
    n_ctx_train: int
    n_ctx: int
    """Cells of the KV pool, all slots together; not those of reserved sequences in a partitioned pool."""
    n_ctx_slot: int
    """Tokens that one slot can hold."""
    n_slots: int
    n_batch: int
    n_ubatch: int
    unified: bool
    """One pool for all slots, or an equal part for each."""
    flash_attn: bool
    cache_type_k: str
    cache_type_v: str
    device: str
    """Where the model runs, for a person to read."""
    reuse: bool
    """Whether the KV of this model may be trimmed and continued."""
    reuse_reason: str = ""
    """Why not, where `reuse` is false."""
    chat_template: str = ""
    """The Jinja source in the model's metadata, or empty."""
    bos_token: str = ""
    eos_token: str = ""
    control_tokens: tuple[str, ...] = ()
    """The texts of the vocabulary's control tokens."""
    adds_bos: bool = False
    """Whether the tokenizer puts BOS before a prompt."""
    adds_eos: bool = False
    """Whether the tokenizer puts EOS behind a prompt."""
    n_cache_seqs: int = 0
    """Sequence ids reserved for idle prefixes, beside the slots' and the scratch one."""
    stream_copy_ms: float = 0.0
    """What it takes to copy all cells of one sequence to another, where each has its own; 0 where it cannot be."""
    idle_cost: IdleCost | None = None
    """What idle prefixes cost; None where it was not measured."""
    sizing: str = ""
    """Where the pool's size comes from, for a person to read; empty where it was given."""
