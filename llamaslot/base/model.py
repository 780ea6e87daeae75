"""What a loaded model and its context are, as plain values that msgspec can encode."""

from __future__ import annotations

import msgspec


class KvCost(msgspec.Struct, frozen=True):
    """What it costs to keep KV in the pool, to save and load it, and to compute it again, as measured."""

    n_cells: int
    """Idle cells that prefill was measured beside."""
    ratio: float
    """Time of prefill beside them over its time in an empty pool."""
    prefill_us: float
    """Microseconds to compute a token in an empty pool."""
    save_us: float
    """Microseconds to save a token to host memory that was used before."""
    first_save_us: float
    """The same for memory that was not."""
    load_us: float
    """Microseconds to load it again."""


class StepCost(msgspec.Struct, frozen=True):
    """What a token costs in small steps, and a step of `TILE` tokens, by the cells that they attend to; measured.

    On a CPU llama.cpp's attention takes `TILE` tokens at once; in smaller steps it goes token by token, and each of
    them costs several times as much.
    """

    step_us: float
    """Microseconds for a smaller step, whatever is in it."""
    token_us: float
    """The same for each of its tokens."""
    token_cell_us: float
    """The same for each cell that it attends to."""
    tile_us: float
    """Microseconds for a step of `TILE` tokens."""
    tile_cell_us: float
    """The same for each cell that any of them attends to."""

    def few_ms(self, n_tokens: int, n_attended: float) -> float:
        """Milliseconds for fewer than `TILE` tokens that attend to so many cells, each counted for each of them."""
        return (self.step_us + n_tokens * self.token_us + n_attended * self.token_cell_us) / 1e3

    def tile_ms(self, n_cells: int) -> float:
        """Milliseconds for `TILE` tokens that attend to so many cells between them."""
        return (self.tile_us + n_cells * self.tile_cell_us) / 1e3


TILE = 64
"""Tokens of a step from which on llama.cpp's attention takes them together; see `StepCost`."""


class SegmentSize(msgspec.Struct, frozen=True):
    """Bytes that the KV of some tokens of one sequence takes off the pool."""

    fixed: int
    per_token: int

    def of(self, n_tokens: int) -> int:
        """Bytes of so many tokens."""
        return self.fixed + n_tokens * self.per_token


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
    builtin_template: str = ""
    """The name of the built-in template that llama.cpp takes for that source, or empty."""
    sampling: dict[str, int | float] = {}
    """Fields of `Sampling` for which the model file recommends a value."""
    bos_token: str = ""
    eos_token: str = ""
    control_tokens: tuple[str, ...] = ()
    """The texts of the vocabulary's control tokens."""
    adds_bos: bool = False
    """Whether the tokenizer puts BOS before a prompt."""
    adds_eos: bool = False
    """Whether the tokenizer puts EOS behind a prompt."""
    n_cache_seqs: int = 0
    """Sequence ids reserved for idle prefixes, beside the slots', a spare one to park by and the scratch one."""
    stream_copy_ms: float = 0.0
    """What it takes to copy all cells of one sequence to another, where each has its own; 0 where it cannot be."""
    kv_cost: KvCost | None = None
    """What idle prefixes cost, and to save and load them; None where it was not measured."""
    step_cost: StepCost | None = None
    """What small steps cost; None where it was not measured."""
    segment_size: SegmentSize | None = None
    """What KV takes that is saved off the pool; None where nothing can be saved."""
    kv_facts: str = ""
    """What else KV depends on than `kv_files`: that of a model that differs in either must not be loaded."""
    kv_files: tuple[str, ...] = ()
    """The files of the weights, and of what computes with them."""
    sizing: str = ""
    """Where the pool's size comes from, for a person to read; empty where it was given."""
