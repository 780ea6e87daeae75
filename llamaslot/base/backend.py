"""The protocols `Backend`, `Vocab` and `Sampler`, and the types of their calls.

A backend is used by one thread at a time, except for methods that say otherwise; its `vocab` by any. It raises
`IllegalCallError`, and changes nothing, on calls on which llama.cpp would abort the process. Positions count tokens
from 0; sequence ids are 0 to `n_seqs - 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

from llamaslot.base.adapters import Adapters
from llamaslot.base.commands import Constraint
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import TokenScore
from llamaslot.base.images import ImageLayout, ImageSize, Tile
from llamaslot.base.kv_ops import IllegalCallError, Kv, Operation, StateRecord
from llamaslot.base.model import ModelInfo
from llamaslot.base.stats import BackendStats
from llamaslot.base.tokens import Tokens


class Status(IntEnum):
    """Result codes of `llama_decode`."""

    OK = 0
    NO_CELLS = 1
    """No free cells for the batch; nothing was changed."""
    ABORTED = 2
    INVALID = -1
    """The batch was refused; nothing was changed."""
    FATAL = -3
    """Computing failed; micro-batches before the failing one stay applied."""


NO_TOKEN = -1
"""Returned by `sample` in place of a token if the logits contain NaN, or infinity as the highest."""


CONSTRAINT_FAILED = -2
"""Returned by `sample` in place of a token if the request's constraint cannot be followed any more."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one sequence at consecutive positions of a batch; a further run of it continues this one."""

    seq: int
    start: int
    """Position of the first token, equal to the number of tokens that the sequence holds."""
    tokens: Tokens
    n_outputs: int
    """Number of last tokens whose logits are needed. Those after the first of them are drafted (see `sample`).

    With `ModelInfo.pooling` it is at most 1, and the vector after the last token is needed instead.
    """
    targets: Tokens | None = None
    """Tokens to score: those that follow the first ones of `tokens`, whose logits are needed too."""
    tile: Tile | None = None
    """The tile of which these are all tokens. It is alone in its batch; a backend may compute it in parts."""

    @property
    def n_drafted(self) -> int:
        """Number of drafted tokens, which are the last ones."""
        return max(self.n_outputs - 1, 0)

    @property
    def draft(self) -> Tokens:
        """The drafted tokens."""
        return self.tokens[len(self.tokens) - self.n_drafted :]

    def n_accepted(self, sampled: Sequence[int]) -> int:
        """Return how many drafted tokens the sequence keeps, if `Backend.sample` returned `sampled` for this run.

        The last sampled token never counts, even if it was drafted: the next step computes it, to sample after it.
        """
        draft = self.draft.tolist()
        most = min(len(draft), len(sampled) - 1)
        return next((i for i in range(most) if draft[i] != sampled[i]), most)


def accepted(
    draft: Sequence[int], eog: frozenset[int], choose: Callable[[int], int], force: Callable[[], tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the tokens that follow by choosing after each row of logits, as long as they are those of the draft.

    `choose` returns the token after the row with that index, or a negative number if it failed. If it fails after
    the first row, that row is left to the next step, in which it is the first one. `force` returns the tokens that
    a constraint forces after those so far, none after the end: nothing is chosen in their place, as without drafts.
    """
    tokens: list[int] = []
    while (n := len(tokens)) <= len(draft):
        token = choose(n)
        if token < 0:
            return tuple(tokens) or (token,)
        tokens.append(token)
        # After another token than the drafted one, forcing is left to `Sampler.advance`: a limit of the reasoning
        # may force tokens before those of the constraint.
        if tokens[n:] == draft[n : n + 1]:
            tokens += force()
        if tokens[n:] != draft[n : len(tokens)] or tokens[-1] in eog:
            break
    return tuple(tokens)


def check_adapters(adapters: Adapters, info: ModelInfo) -> None:
    """Raise `IllegalCallError` for adapters that are not those of a model."""
    loaded = [each.digest for each in info.adapters]
    if any(loaded[each.id : each.id + 1] != [each.digest] for each in adapters):
        raise IllegalCallError("an adapter that is not loaded")


def check_runs(
    runs: Sequence[Run],
    *,
    length_of: Callable[[int], int],
    info: ModelInfo,
    states: StateRecord,
) -> None:
    """Raise `IllegalCallError` for a batch that llama.cpp aborts on; `length_of` refuses wrong sequence ids."""
    if not runs:
        raise IllegalCallError("a batch needs runs")
    if sum(len(run.tokens) for run in runs if run.tile is None) > info.n_ubatch:
        raise IllegalCallError("more tokens than a micro-batch holds")
    if not info.state.kind.allows_mixed_lengths and len({len(run.tokens) for run in runs}) > 1:
        raise IllegalCallError("runs of several lengths in one step of a model with windows and recurrent states")
    _check_outputs(runs, info)
    ends: dict[int, int] = {}
    for run in runs:
        length = ends[run.seq] if run.seq in ends else length_of(run.seq)
        ends[run.seq] = run.start + len(run.tokens)
        if run.start != length or not len(run.tokens):
            raise IllegalCallError(f"a run at {run.start} does not continue sequence {run.seq}")
        if not states.is_live(run.seq):
            raise IllegalCallError(f"sequence {run.seq} has lost its state")
        if not 0 <= run.n_outputs <= len(run.tokens):
            raise IllegalCallError("the logits of more tokens are needed than are computed")
        if run.targets is not None and len(run.targets) > len(run.tokens):
            raise IllegalCallError("more tokens to score than are computed")
        least, most = (run.tokens.min(), run.tokens.max()) if len(run.tokens) > 1 else (run.tokens[0],) * 2
        if run.tile is not None:
            _check_tile(run, run.tile, info, is_alone=len(runs) == 1)
        elif least < 0 or most >= info.n_vocab:
            raise IllegalCallError("a token outside of the vocabulary")


def _check_outputs(runs: Sequence[Run], info: ModelInfo) -> None:
    """Raise `IllegalCallError` for tokens that cannot be scored or drafted, and for outputs that a model lacks."""
    targets = [run.targets for run in runs if run.targets is not None]
    if sum(map(len, targets)) + sum(run.n_drafted for run in runs) > info.n_spare_rows:
        raise IllegalCallError("more drafted tokens, and tokens to score, than there are rows of logits")
    if any(len(each) and (each.min() < 0 or each.max() >= info.n_vocab) for each in targets):
        raise IllegalCallError("a token to score is outside of the vocabulary")
    if info.pooling and any(run.n_outputs > 1 for run in runs):
        raise IllegalCallError("drafted tokens in a model whose outputs are vectors")
    if info.embeds_whole and any(run.start or not run.n_outputs for run in runs):
        raise IllegalCallError("a part of an input whose vector is of all of its tokens")


def _check_tile(run: Run, tile: Tile, info: ModelInfo, *, is_alone: bool) -> None:
    """Raise `IllegalCallError` for a run of a tile that cannot be computed so."""
    if info.projector is None or not 0 <= tile.number < len(tile.image.tiles):
        raise IllegalCallError("a tile without a projector, or that its image does not have")
    if not is_alone or run.n_outputs > 1 or run.targets is not None:
        raise IllegalCallError("a tile beside other tokens, or with more outputs than one")
    if (run.start, run.start + len(run.tokens)) != (tile.start, tile.end):
        raise IllegalCallError("a run of a tile that has other tokens too, or lacks some")
    if 0 < info.projector.max_tile < len(run.tokens):
        raise IllegalCallError("a tile of more tokens than the model computes in one step")
    if run.tokens.max() >= 0:
        raise IllegalCallError("a token of the vocabulary in a tile")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Result of one `decode`."""

    status: Status
    sent: dict[int, tuple[int, int]]
    """First position and number of tokens that were in the batch, by sequence id."""


class Sampler(Protocol):
    """Sampler state of one request."""

    scores: list[TokenScore]
    """Probabilities of the tokens that the last `sample` returned, if the request asks for them."""

    @property
    def failure(self) -> str:
        """Reason for `CONSTRAINT_FAILED`; empty before."""

    def advance(self, *, forced: tuple[int, ...]) -> tuple[int, ...]:
        """Accept the token that was sampled last, before the next `decode`.

        `forced` tokens follow it; a constraint must allow them. Returns the tokens that the constraint forces
        after them; none if the request asks for probabilities, which such tokens lack. All of these count as
        sampled.
        """

    def close(self) -> None:
        """Free the sampler; further use is an error."""


Draws: TypeAlias = Sequence[tuple[int, Sampler]]
"""Sequence and sampler of each request that gets tokens; requests may draw from the same sequence."""


class CompiledConstraint(Protocol):
    """A constraint for `new_sampler`; any number of requests can share it."""


class Vocab(Protocol):
    """Text to tokens and back; safe to use from any thread."""

    n_tokens: int
    """Size of the vocabulary."""
    longest_piece: int
    """Maximum bytes of text per token; 0 if the tokenizer may drop text."""
    words_per_token: int
    """Maximum words per token, where only text without ASCII letters and digits may be dropped; else 0."""
    stack_bytes: int
    """Stack size that a thread needs to call `tokenize`; 0 for the default size."""
    eog: frozenset[int]
    """Tokens that end a generation."""
    special_tokens: tuple[str, ...]
    """Texts that are one token each with `parse_special`, and several tokens without it."""
    cut_tokens: tuple[str, ...]
    """Texts of control tokens that do not strip the text before them, those that end a generation first."""

    @property
    def named_tokens(self) -> Mapping[str, int]:
        """Ids by text of the tokens that a grammar allows by id only: control tokens, and added tags (`<name>`)."""

    @property
    def added_tags(self) -> Mapping[str, int]:
        """Ids by text of the added tags, whose tokens have that text in a reply."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Token ids of `text`; `add_special` adds BOS/EOS where the model wants them.

        Raises `InvalidRequestError` for a text that the tokenizer cannot split within its stack.
        """

    def piece(self, token: int) -> bytes:
        """Text of a generated token as bytes; empty for control tokens."""

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Text of `tokens` as bytes, control tokens written out."""


class Backend(Protocol):
    """A model with its KV pool."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model and its KV pool."""

    @property
    def n_seqs(self) -> int:
        """Number of sequence ids."""

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""

    def change(self, operation: Operation) -> None:
        """Carry out an operation on sequences.

        Besides the errors of each operation, raises `MemoryError`; the target is then empty.
        """

    def end_changes(self) -> None:
        """Free what is kept for further operations on the same sequences; called after those of a step."""

    def seq_len(self, seq: int) -> int:
        """Number of tokens that a sequence holds: its highest position + 1."""

    def seq_range(self, seq: int) -> range:
        """Positions that a sequence holds, from the lowest to the highest."""

    def kv_of(self, segment: int) -> Kv | None:
        """Bytes of a segment or checkpoint in host memory; None if there is none. May be called from any thread."""

    def put(self, segment: int, start: int, end: int, kv: Kv) -> None:
        """Add KV that an earlier process saved, as a segment with an unused number; callable from any thread.

        With `start` at `end` it is a checkpoint. Raises `ValueError` if `kv` does not have the size of either.
        """

    @property
    def stats(self) -> BackendStats:
        """Statistics as of now."""

    def use_adapters(self, adapters: Adapters) -> None:
        """Have all that `decode` computes from now on computed with these adapters; none at first.

        A change takes `info.adapter_switch_ms`. A self-test or a measurement leaves the model without adapters.
        """

    def decode(self, runs: Sequence[Run], draws: Draws = ()) -> Decoded:
        """Compute at most `info.n_ubatch` tokens, as one micro-batch; every run must continue its sequence.

        A tile may be longer (`ProjectorInfo.max_tile`).

        `draws` are those of the `sample` that follows; what the device can sample of them is computed there.
        """

    def image_layout(self, size: ImageSize) -> ImageLayout:
        """Return the tokens of an image of a size. May be called from any thread, also while `decode` runs.

        Raises `InvalidRequestError` for a size of which no tokens can be made, `NotSupportedError` without a
        projector, and `UnavailableError` while the model is unloaded.
        """

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Compile a constraint. May be called from any thread, and from several at once.

        Raises `InvalidRequestError` for an invalid one, `NotSupportedError` if the vocabulary takes none.
        """

    def new_sampler(
        self, sampling: Sampling, history: Tokens, constraint: CompiledConstraint | None = None
    ) -> Sampler:
        """Create a sampler whose penalties count the tokens of `history`, for a reply that begins now."""

    def sample(self, draws: Draws) -> list[tuple[int, ...]]:
        """Sample for each sequence id and its sampler; the last `decode` had outputs for all of them.

        Returns the drafted tokens up to the first that the sampler did not choose, and the token it chose then.
        What a constraint forces within a draft is not chosen; if it differs from the draft, or goes beyond it, all
        of it is returned, which may be more than `n_outputs` tokens. The sequence still holds the whole draft. If
        the first row of logits contains NaN, or infinity as the highest, `NO_TOKEN` is the only token, and likewise
        `CONSTRAINT_FAILED`; a later row that fails ends the tokens before it.
        """

    def score(self, seq: int, n_top: int) -> list[TokenScore]:
        """Return the log-probabilities of a sequence's `targets` in the last `decode`, each with `n_top` more.

        They are NaN where the logits are not valid.
        """

    def vector(self, seq: int) -> bytes:
        """Return the vector of a sequence, or its scores; the last `decode` had an output for it, and no `targets`.

        They are `info.n_vector` float32 numbers, little-endian, and are not normalized; with the pooling `none`
        there are as many of each token.
        """

    def run_self_test(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Run the self-test of reuse if it is pending; sequences hold afterwards what they held before.

        They must not share cells. `should_stop` is asked before each step. Returns False if it stopped the test,
        which is still pending then; otherwise `info` has the result. After a failed test sequences may be empty.
        Raises `NotSavedError`, and runs no test, if there is not enough memory to save what they hold.
        """

    def measure_costs(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Measure the costs that are pending; sequences must be empty, but something may be saved.

        `should_stop` is polled. Returns False if costs are still pending because the measurement was stopped or
        disturbed; otherwise `info` has them. Raises `IllegalCallError` if a sequence holds something.
        """

    def set_layout(self, *, unified: bool) -> None:
        """Recreate the context in another layout, if `info.part_cells` allows it; segments are kept.

        Raises `IllegalCallError` if a sequence holds something, and `MemoryError` without enough memory; then the
        layout is unchanged.
        """

    def clear(self) -> None:
        """Clear the data of all cells: what is infinite in one may spoil sequences that only mask it.

        Raises `IllegalCallError` if a sequence holds something.
        """

    def unload(self) -> None:
        """Free the model and its pool until `reload`; vocabulary, segments and checkpoints are kept.

        Until then only they can be used: besides `vocab`, `info` and `stats` these are `put`, `kv_of` and freeing.
        Raises `IllegalCallError` if a sequence holds something.
        """

    def reload(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Load the model again after `unload`, with a pool of the same size.

        `should_stop` is polled. Raises `ConfigError` if that was stopped, if memory does not suffice or a file is
        missing, and `RuntimeError` if one was changed: saved KV is of the old one. It is still unloaded then.
        """

    def close(self) -> None:
        """Free the model; further use is an error."""
