"""Facts about a loaded model and its context, as plain values that msgspec can encode."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

SelfTestOutcome: TypeAlias = Literal["", "passed", "failed", "pending", "skipped", "off"]
"""Outcome of the self-test of reuse (`backend/llama/self_test.py`); empty for models that need none.

By `--reuse-self-test`: `skipped` where `on` reuses prefixes without a test, `off` where nothing is reused.
"""


_NOISE = 1.02
"""Measured ratios of durations below this show nothing."""
Cost: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
"""A measured time; the bounds hold for what is read from a file."""


class KvCost(msgspec.Struct, frozen=True):
    """Measured cost of idle KV in the pool, and of saving, loading and computing KV; times are per token."""

    n_idle_cells: Annotated[int, msgspec.Meta(ge=0)]
    """Idle cells in the pool while `prefill_slowdown` was measured; 0 in a partitioned pool."""
    prefill_slowdown: Annotated[float, msgspec.Meta(ge=1.0, le=1e6)]
    """Duration of a prefill with them in the pool, divided by its duration in an empty pool."""
    prefill_us: Cost
    """Microseconds to compute a token in an empty pool."""
    save_us: Cost
    """Microseconds to save a token's KV to host memory that was written to before."""
    first_save_us: Cost
    """Microseconds to save it to memory that the system has to provide first."""
    load_us: Cost
    """Microseconds to load a token's KV back into the pool."""

    @property
    def foreign_us(self) -> float:
        """Microseconds by which each idle cell slows each prompt token; 0 where that is not above noise."""
        if self.prefill_slowdown <= _NOISE:
            return 0.0
        return self.prefill_us * (self.prefill_slowdown - 1) / self.n_idle_cells

    @property
    def break_even_tokens(self) -> int | None:
        """Prompt tokens after which idle cells have cost as much prefill time as saving and loading them.

        None if idle cells do not slow prefill.
        """
        return max(round((self.save_us + self.load_us) / self.foreign_us), 1) if self.foreign_us else None


class StepCost(msgspec.Struct, frozen=True):
    """Measured durations of steps: a linear model of small steps, and one of steps of `QUERY_BLOCK` tokens.

    On a CPU llama.cpp's flash attention computes `QUERY_BLOCK` query tokens together; in smaller steps it goes
    token by token, and each of them costs several times as much (facts 22 and 27).
    """

    step_us: Cost
    """Microseconds of a small step, whatever is in it."""
    token_us: Cost
    """Microseconds that each token adds to a small step."""
    token_cell_us: Cost
    """Microseconds that each pair of a token and a cell it attends to adds to a small step."""
    block_us: Cost
    """Microseconds of a step of `QUERY_BLOCK` tokens."""
    block_cell_us: Cost
    """Microseconds that each cell that any of its tokens attends to adds to it."""

    def small_ms(self, n_tokens: int, n_attended: float) -> float:
        """Return the milliseconds of a step below `QUERY_BLOCK` tokens and `n_attended` pairs of token and cell."""
        return (self.step_us + n_tokens * self.token_us + n_attended * self.token_cell_us) / 1e3

    def block_ms(self, n_cells: int) -> float:
        """Return the milliseconds of a step of `QUERY_BLOCK` tokens that attend to `n_cells` different cells."""
        return (self.block_us + n_cells * self.block_cell_us) / 1e3


class StateCost(msgspec.Struct, frozen=True):
    """Measured cost of a checkpoint of the largest size."""

    take_ms: Cost
    """Milliseconds to copy the state of a sequence to host memory."""
    restore_ms: Cost
    """Milliseconds to give it back to a sequence."""


Pooling: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
"""How llama.cpp makes one vector of those of a sequence's tokens; `rank` makes scores of it by the model's head."""
CPU = "CPU"
"""`ModelInfo.device` of a model that runs on the CPU alone."""
NOT_YET = "not measured yet"
"""`ModelInfo.costs_pending` if no earlier start has kept the costs of the model."""
QUERY_BLOCK = 64
"""Query block: tokens of a step that llama.cpp's flash attention computes together on a CPU."""
MAX_DRAFT = QUERY_BLOCK - 1
"""Most tokens of a draft: with the one before, they fill a query block."""


class SegmentSize(msgspec.Struct, frozen=True):
    """Size of the saved KV of some tokens of one sequence."""

    fixed: int
    per_token: int

    def of(self, n_tokens: int) -> int:
        """Bytes of `n_tokens` tokens."""
        return self.fixed + n_tokens * self.per_token


class CheckpointSize(msgspec.Struct, frozen=True):
    """Bytes of a checkpoint of the state that cannot be trimmed, by its position."""

    fixed: int
    per_cell: int = 0
    """Bytes of each cell of a sliding window; 0 without one."""
    n_swa: int = 0
    """Tokens of the window."""

    def of(self, end: int) -> int:
        """Bytes after `end` tokens; one cell less once another sequence has taken the oldest cell of a window."""
        return self.fixed + self.per_cell * min(end, self.n_swa)

    def all_of(self, end: int) -> tuple[int, ...]:
        """All sizes that a checkpoint after `end` tokens may have."""
        return tuple({self.of(end), self.of(end) - self.per_cell})


class CheckpointLimits(msgspec.Struct, frozen=True):
    """Limits of checkpoints, from flags and from the memory that was free at start."""

    ram_bytes: int
    """Host memory for all of them."""
    on_path: int
    """Checkpoints of one conversation at most."""
    step: int
    """Tokens between two of a long prompt."""


class FimTokens(msgspec.Struct, frozen=True):
    """Token ids of fill-in-the-middle prompts; -1 for those that the vocabulary does not have."""

    prefix: int
    suffix: int
    middle: int
    repository: int = -1
    file_separator: int = -1
    bos: int = -1
    """The BOS, where the tokenizer puts one before a prompt."""


class ProjectorInfo(msgspec.Struct, frozen=True):
    """The projector of images (`--mmproj`) that a model is served with."""

    digest: str
    """Digest of its file and of the settings that its embeddings depend on."""
    max_tile: int
    """Most tokens of a tile, if it must be computed in one micro-batch; 0 for no limit."""


class RerankFormat(msgspec.Struct, frozen=True):
    """Form of the prompt by which a reranker scores a document for a query."""

    template: str = ""
    """Text with `{query}` and `{document}`, by the model's file; without one there are only tokens around them."""
    start: tuple[int, ...] = ()
    """Tokens before the query."""
    middle: tuple[int, ...] = ()
    """Tokens between query and document."""
    end: tuple[int, ...] = ()
    """Tokens after the document."""


class ModelFile(msgspec.Struct, frozen=True):
    """A file that KV depends on, in the version that was loaded."""

    path: str
    version: str
    """Its size, time of change and inode; empty if it was not there."""

    @classmethod
    def of(cls, path: Path) -> ModelFile:
        """Return the file at a path in its present version, an empty one if it is not there."""
        try:
            stat = path.stat()
        except OSError:
            return cls(str(path), "")
        return cls(str(path), f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}")


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that is loaded with the model; its id is its place in `ModelInfo.adapters`."""

    path: str
    digest: str
    """Digest of its file, on which KV depends that is computed with it."""
    scale: float
    """Scale at start, for requests that name no adapters."""
    task_name: str = ""
    prompt_prefix: str = ""
    invocation: tuple[int, ...] = ()
    """Tokens from which on it is active (activated LoRA, aLoRA); empty for one that always is."""
    invocation_text: str = ""


class StateKind(StrEnum):
    """Kinds of partial state: what a model keeps besides KV of every token; it cannot be trimmed to a position."""

    NONE = "none"
    WINDOW = "window"
    """Some layers keep KV of the last tokens only."""
    RECURRENT = "recurrent"
    """All layers keep a state of fixed size, which each token changes."""
    HYBRID = "hybrid"
    """Some layers keep such a state, the others KV of every token."""
    HYBRID_WINDOW = "hybrid_window"
    """Some layers keep such a state, and some of the others KV of the last tokens only."""

    @property
    def has_window(self) -> bool:
        """True if some layers keep KV of the last tokens only."""
        return self in (StateKind.WINDOW, StateKind.HYBRID_WINDOW)

    @property
    def has_recurrent_state(self) -> bool:
        """True if some layers keep a state that each token changes."""
        return self in (StateKind.RECURRENT, StateKind.HYBRID, StateKind.HYBRID_WINDOW)

    @property
    def allows_mixed_lengths(self) -> bool:
        """True if the runs of a step may differ in length: else llama.cpp loses cells of windows (fact 33)."""
        return not (self.has_window and self.has_recurrent_state)

    @property
    def copies_live(self) -> bool:
        """True if a full copy of a live sequence can be continued: its recurrent state is copied on write."""
        return self.has_recurrent_state and not self.has_window


class Capabilities(msgspec.Struct, frozen=True):
    """Kinds of state that a model keeps of computed tokens, and the operations that llama.cpp allows on it."""

    kind: StateKind = StateKind.NONE
    can_trim: bool = True
    """A sequence may be cut at any position and continued from there."""
    can_shift: bool = True
    """llama.cpp can move tokens of a sequence to other positions."""
    has_own_cache: bool = False
    """llama.cpp keeps it in a cache class of this architecture only, whose operations are untested here."""
    n_swa: int = 0
    """Tokens of a sliding window; 0 without one."""
    n_window_cells: int = 0
    """Cells that layers with a sliding window have, all sequences together."""
    n_rollback: int = 0
    """Tokens of a sequence's last step that can be removed again although it has a recurrent state (fact 44)."""
    n_layers: int = 0
    """All layers, also those without any state."""
    n_attention_layers: int = 0
    """Layers that keep KV of every token; 0 where llama.cpp does not say."""
    n_window_layers: int = 0
    """Layers that keep KV of a window; 0 where llama.cpp does not say."""
    has_mla: bool = False
    """Multi-head latent attention: K and V are compressed into one row."""
    has_mrope: bool = False
    """Positions have several dimensions (M-RoPE), as in vision models."""


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about the loaded model and its context.

    Fixed once the engine runs, with three exceptions: when a pending self-test ends, the event `ModelInfoChanged`
    brings another `ModelInfo` in place of this one, costs that are pending are measured while the engine is idle,
    and the backend's own copy has the current value of `unified`.
    """

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
    """Cells of the KV pool, all slots together; not those of spare sequences in a partitioned pool."""
    n_ctx_slot: int
    """Tokens that one slot can hold."""
    n_slots: int
    n_batch: int
    n_ubatch: int
    unified: bool
    """True for one pool for all slots, False for an equal part each; at start, if `part_cells` allows both."""
    flash_attn: bool
    cache_type_k: str
    cache_type_v: str
    device: str
    """Human-readable name of the device that the model runs on."""
    part_cells: int = 0
    """Cells of a slot while the pool is partitioned, if its layout may change; 0 if it is fixed."""
    context_ms: float = 0.0
    """Milliseconds to create the context; to change its layout takes as long."""
    backends: tuple[str, ...] = ()
    """Backends of ggml in the llama.cpp build, such as CUDA and CPU; empty for a backend without llama.cpp."""
    reuse_reason: str = ""
    """Why sequences cannot be trimmed, and then why there are no checkpoints; either is empty where it is possible.

    After a failed self-test it says why the test failed.
    """
    self_test: SelfTestOutcome = ""
    """While the self-test is pending nothing may be reused, whatever `can_reuse` says."""
    self_test_reason: str = ""
    """The reason unless the self-test was passed or is not needed."""
    state: Capabilities = Capabilities()
    keeps_checkpoints: bool = False
    """True if the backend takes and restores checkpoints of the state that cannot be trimmed."""
    chat_template: str = ""
    """The Jinja source in the model's metadata, or empty."""
    builtin_template: str = ""
    """The name of the built-in template that llama.cpp takes for that source, or empty."""
    sampling: dict[str, int | float] = {}
    """Fields of `Sampling` for which the model file recommends a value."""
    bos_token: str = ""
    eos_token: str = ""
    eog: tuple[int, ...] = ()
    """Ids of the tokens that end a text, in ascending order."""
    control_tokens: tuple[str, ...] = ()
    """The texts of the vocabulary's control tokens."""
    fim: FimTokens | None = None
    """None for a vocabulary that cannot mark prefix, suffix and middle."""
    adds_bos: bool = False
    """True if the tokenizer puts BOS before a prompt."""
    adds_eos: bool = False
    """True if the tokenizer puts EOS after a prompt."""
    n_cache_seqs: int = 0
    """Spare sequence ids (`--cache-seqs`), not counting the one that is kept free and the scratch one."""
    kv_cost: KvCost | None = None
    """Cost of idle prefixes, and of saving and loading them; None where it was not measured."""
    step_cost: StepCost | None = None
    """Durations of small steps; None where they were not measured."""
    state_cost: StateCost | None = None
    """Cost of checkpoints; None where it was not measured."""
    samples_on_device: bool = False
    """True if the device samples what it can: by `--backend-sampling`, or because that is measured to be faster."""
    costs_pending: str = ""
    """Why costs are not measured: `NOT_YET`, or what disturbed the measurement. Empty once they are."""
    segment_size: SegmentSize | None = None
    """Size of KV that is saved off the pool; None where nothing can be saved."""
    checkpoint_size: CheckpointSize | None = None
    """Size of checkpoints; None where none are taken."""
    checkpoint_limits: CheckpointLimits | None = None
    """Limits of checkpoints once the server has chosen them; None where none are taken."""
    kv_facts: str = ""
    """Everything but `kv_files` that KV depends on: KV saved under other facts must not be loaded."""
    kv_files: tuple[ModelFile, ...] = ()
    """The files of the weights, and of what computes with them."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that requests may apply. The KV of requests without one does not depend on them."""
    projector: ProjectorInfo | None = None
    """The projector that makes embeddings of images; None where prompts are text."""
    adapter_switch_ms: float = 0.0
    """Milliseconds that a step takes longer if its adapters are not those of the step before; 0 if not measured."""
    shift_failure: str = ""
    """Why the backend, which was asked to, cannot move tokens of one sequence without changing others."""
    n_spare_rows: int = 1
    """Rows of logits of a step besides one a sequence: for prompt tokens to be scored, and for drafted tokens."""
    sizing: str = ""
    """Human-readable reason for the pool's size; empty if a flag sets it."""
    pooling: Pooling | Literal[""] = ""
    """Pooling of a server of embeddings or scores; empty for one that generates text."""
    embeds_whole: bool = False
    """True if each input must be computed whole in one step, and nothing is reused: its vector is of all tokens."""
    n_vector: int = 0
    """Numbers of a vector, or scores of a reranker; 0 without a pooling."""
    rerank: RerankFormat | None = None
    """None unless the pooling is `rank`."""

    @property
    def max_prompt(self) -> int:
        """Most tokens of a prompt: one with a reply leaves place for a token."""
        return self.n_ctx_slot if self.embeds_whole else self.n_ctx_slot - 1

    @property
    def can_trim(self) -> bool:
        """True if a sequence may be cut at any token and continued from there; false if the self-test failed."""
        return self.state.can_trim

    @property
    def max_draft(self) -> int:
        """Most tokens of a draft: as many last tokens of a step can be removed again if they are rejected.

        They leave a window whole (fact 43). Of a recurrent state llama.cpp keeps the last few (fact 44).
        """
        if self.self_test == "pending" or not self.can_reuse:
            return 0
        return self.state.n_rollback if self.state.kind.has_recurrent_state else MAX_DRAFT

    @property
    def can_reuse(self) -> bool:
        """True if prefixes of this model are reused: by trimming sequences, or by checkpoints."""
        return self.can_trim or self.keeps_checkpoints

    @property
    def self_test_note(self) -> str:
        """Why the self-test does not allow reuse, and the flag that overrides it; empty where it does."""
        if self.self_test == "pending":
            return (
                f"{self.self_test_reason}; it runs between requests, "
                "and --reuse-self-test on reuses prefixes without it"
            )
        if self.self_test == "failed":
            return f"{self.self_test_reason}; --reuse-self-test on reuses prefixes all the same"
        return self.self_test_reason if self.self_test == "off" else ""

    @property
    def unshifted_reason(self) -> str:
        """Reason why no context of this model can be shifted; empty where it can."""
        reasons = (
            (bool(self.pooling), "this model generates no text"),
            (not self.can_trim, self.self_test_note or self.reuse_reason),
            (self.state.has_mrope, "positions of this model have several dimensions (M-RoPE)"),
            (not self.state.can_shift, "llama.cpp cannot move KV of this model to other positions"),
            (bool(self.shift_failure), self.shift_failure),
        )
        return next((reason for holds, reason in reasons if holds), "")

    @property
    def unsaved_reason(self) -> str:
        """Reason why no KV can be saved off the pool; empty where it can."""
        reasons = (
            (not self.can_reuse, self.self_test_note or "no prefix of this model can be reused"),
            (self.segment_size is None and not self.flash_attn, "that needs flash attention"),
            (self.segment_size is None, "no sequence id is left for it, so lower --parallel"),
        )
        return next((reason for holds, reason in reasons if holds), "")
