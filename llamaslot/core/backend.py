"""What the core and the engine ask of whatever runs a model, and the plain types that they pass to it.

A backend is used by one thread at a time, its `vocab` by any. It refuses whatever llama.cpp would abort the
process over (`IllegalCallError`) and changes nothing then. Positions are in tokens from 0, sequence ids from 0 to
`n_seqs - 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from llamaslot.base.messages import Sampling
from llamaslot.base.model import ModelInfo

Tokens: TypeAlias = npt.NDArray[np.int32]
Kv: TypeAlias = npt.NDArray[np.uint8]
"""The KV of a segment, as the backend saves and loads it; never changed."""


class IllegalCallError(AssertionError):
    """A call that llama.cpp must never see: a bug in this project, not in a request."""


class NotSavedError(Exception):
    """There is no memory for what a `Save` was to store; nothing was changed."""

    def __init__(self, segment: int) -> None:
        super().__init__(f"no memory for segment {segment}")
        self.segment = segment


class Status(IntEnum):
    """Answers of `llama_decode`."""

    OK = 0
    NO_ROOM = 1
    """No free cells for the batch; nothing was changed."""
    ABORTED = 2
    INVALID = -1
    """The batch was refused; nothing was changed."""
    FATAL = -3
    """Computing failed; micro-batches before the failing one stay applied."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one sequence in a batch, at consecutive positions."""

    seq: int
    start: int
    """Position of the first token; equal to the tokens that the sequence holds."""
    tokens: Tokens
    output: bool
    """Whether logits of the last token are wanted."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Drop all but the first `keep` tokens of a sequence."""

    seq: int
    keep: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Let `dst`, which holds `start` tokens, see the cells of `src` in `[start, end)` too."""

    src: int
    dst: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """Let `dst` give up its own cells in `[start, end)` and see those of `src`, which hold the same tokens."""

    src: int
    dst: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """`[start, end)` of sequences that see the same cells there, all who see them."""

    holders: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Move:
    """Save these pieces, let go of their cells, and load one after another into the lowest free cells.

    `scratch` holds nothing before and after.
    """

    pieces: tuple[Piece, ...]
    scratch: int


@dataclass(frozen=True, slots=True)
class CopyStream:
    """Let `dst` hold a copy of the first `keep` tokens of `src`, and nothing else, where each has cells of its own.

    llama.cpp copies everything that `src` has, with the next decode: until then neither may be copied again.
    """

    src: int
    dst: int
    keep: int


@dataclass(frozen=True, slots=True)
class Save:
    """Store the KV of `src` in `[start, end)` off the pool, under a number that is not in use.

    Where there is no memory for it, `NotSavedError`. `scratch` holds nothing before and after.
    """

    segment: int
    src: int
    start: int
    end: int
    scratch: int


@dataclass(frozen=True, slots=True)
class Load:
    """Let `dst`, which holds `start` tokens, hold those of a segment in `[start, end)` too, in cells of their own.

    llama.cpp loads a segment whole, into the lowest free cells: there must be as many as it has tokens, and those
    outside of `[start, end)` are free again at once. `scratch` holds nothing before and after.
    """

    segment: int
    dst: int
    start: int
    end: int
    scratch: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget a segment."""

    segment: int


Operation: TypeAlias = Remove | Copy | Share | Move | CopyStream | Save | Load | Discard
"""What is done to sequences between decodes."""


def check_seq(seq: int, n_seqs: int) -> None:
    """Raise `IllegalCallError` for a sequence id that the context does not have."""
    if not 0 <= seq < n_seqs:
        raise IllegalCallError(f"sequence id {seq} is not in [0, {n_seqs})")


def check_operation(
    operation: Operation, *, length_of: Callable[[int], int], segments: Mapping[int, range], shares: bool
) -> None:
    """Raise `IllegalCallError` where an operation would leave a hole, a double position or a foreign cell.

    `segments` are the positions that are stored, by number.
    """
    if isinstance(operation, Remove):
        if operation.keep < 0:
            raise IllegalCallError(f"{operation} keeps less than nothing")
        length_of(operation.seq)
        return
    if isinstance(operation, CopyStream):
        n_src = length_of(operation.src)
        length_of(operation.dst)
        if operation.src == operation.dst or not 0 < operation.keep <= n_src:
            raise IllegalCallError(f"{operation}: the source holds {n_src} tokens")
        return
    if not shares:
        raise IllegalCallError("cells cannot be shared here")
    if isinstance(operation, Move):
        _check_move(operation, length_of)
        return
    if isinstance(operation, Save | Load | Discard):
        _check_segment(operation, length_of, segments)
        return
    start, end = operation.start, operation.end
    n_src, n_dst = length_of(operation.src), length_of(operation.dst)
    if operation.src == operation.dst or not 0 <= start < end <= n_src:
        raise IllegalCallError(f"{operation}: the source holds {n_src} tokens")
    if n_dst != start if isinstance(operation, Copy) else n_dst < end:
        raise IllegalCallError(f"{operation}: the target holds {n_dst} tokens")


def _check_move(move: Move, length_of: Callable[[int], int]) -> None:
    if length_of(move.scratch):
        raise IllegalCallError(f"{move}: the scratch sequence holds something")
    taken: dict[int, list[tuple[int, int]]] = {}
    for piece in move.pieces:
        shortest = min(map(length_of, piece.holders), default=0)
        if not 0 <= piece.start < piece.end <= shortest:
            raise IllegalCallError(f"{piece}: the holders hold {shortest} tokens or more")
        for holder in piece.holders:
            ranges = taken.setdefault(holder, [])
            if any(piece.start < end and start < piece.end for start, end in ranges):
                raise IllegalCallError(f"{move}: a token is moved twice")
            ranges.append((piece.start, piece.end))


def _check_segment(
    operation: Save | Load | Discard, length_of: Callable[[int], int], segments: Mapping[int, range]
) -> None:
    stored = segments.get(operation.segment)
    if (stored is None) != isinstance(operation, Save):
        raise IllegalCallError(f"{operation}: the segment is {'not ' if stored is None else ''}stored")
    if isinstance(operation, Discard):
        return
    start, end = operation.start, operation.end
    if length_of(operation.scratch):
        raise IllegalCallError(f"{operation}: the scratch sequence holds something")
    if isinstance(operation, Save):
        if not 0 <= start < end <= length_of(operation.src):
            raise IllegalCallError(f"{operation}: the source holds {length_of(operation.src)} tokens")
    else:
        assert stored is not None
        if operation.dst == operation.scratch or length_of(operation.dst) != start:
            raise IllegalCallError(f"{operation}: the target holds {length_of(operation.dst)} tokens")
        if not stored.start <= start < end <= stored.stop:
            raise IllegalCallError(f"{operation}: the segment has [{stored.start}, {stored.stop})")


def check_runs(runs: Sequence[Run], *, length_of: Callable[[int], int], n_ubatch: int, n_vocab: int) -> None:
    """Raise `IllegalCallError` for a batch that llama.cpp must not see; `length_of` refuses wrong sequence ids."""
    if not runs or len({run.seq for run in runs}) != len(runs):
        raise IllegalCallError("a batch needs runs of different sequences")
    if sum(len(run.tokens) for run in runs) > n_ubatch:
        raise IllegalCallError("more tokens than a micro-batch holds")
    for run in runs:
        if run.start != length_of(run.seq) or not len(run.tokens):
            raise IllegalCallError(f"a run at {run.start} does not continue sequence {run.seq}")
        least, most = (run.tokens.min(), run.tokens.max()) if len(run.tokens) > 1 else (run.tokens[0],) * 2
        if least < 0 or most >= n_vocab:
            raise IllegalCallError("a token outside of the vocabulary")


@dataclass(frozen=True, slots=True)
class Decoded:
    """The answer to one `decode`."""

    status: Status
    sent: dict[int, tuple[int, int]]
    """Per sequence id the first position and the number of tokens that the batch really carried."""


class Sampler(Protocol):
    """The state by which one request's tokens are chosen."""

    def close(self) -> None:
        """Free it; further use is an error."""


class Vocab(Protocol):
    """Text to tokens and back; safe to use from any thread."""

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary."""

    @property
    def longest_piece(self) -> int:
        """Bytes of text that one token may stand for at most, 0 where a tokenizer may drop text."""

    @property
    def eog(self) -> frozenset[int]:
        """Tokens that end a generation."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts that become one token each where special tokens are parsed, and several where they are not."""

    @property
    def boundaries(self) -> tuple[str, ...]:
        """Those of control tokens that do not strip the text in front of them; ends of generation come first."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Token ids of `text`; `add_special` adds BOS/EOS where the model wants them."""

    def piece(self, token: int) -> bytes:
        """The bytes that a generated token stands for; control tokens give none."""

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The text of `tokens` as bytes, control tokens written out."""


class Backend(Protocol):
    """A model with its KV pool."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""

    @property
    def n_seqs(self) -> int:
        """Number of sequence ids."""

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""

    def change(self, operation: Operation) -> None:
        """Carry out an operation on sequences."""

    def seq_len(self, seq: int) -> int:
        """Tokens that a sequence holds (its highest position + 1)."""

    def seq_range(self, seq: int) -> range:
        """From the lowest to the highest position that a sequence holds."""

    def kv_of(self, segment: int) -> Kv | None:
        """The KV of a segment, if it is stored; from any thread."""

    def put(self, segment: int, start: int, end: int, state: Kv) -> None:
        """Store KV that another process saved, of these positions, under a number that is not in use; from any
        thread.

        Raises `ValueError` where it has not the size of a segment of so many tokens.
        """

    def decode(self, runs: Sequence[Run]) -> Decoded:
        """Compute at most `info.n_ubatch` tokens; every run must continue its sequence."""

    def new_sampler(self, sampling: Sampling, history: Tokens) -> Sampler:
        """A sampler that has seen `history` (for the penalties)."""

    def sample(self, draws: Sequence[tuple[int, Sampler]]) -> list[int]:
        """For each sequence id and sampler the token that it chooses; the id had `output` in the last `decode`."""

    def close(self) -> None:
        """Free the model; further use is an error."""
