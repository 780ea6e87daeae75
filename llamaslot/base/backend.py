"""What the core and the engine ask of whatever runs a model, and the plain types that they pass to it.

A backend is used by one thread at a time, its `vocab` by any. It refuses whatever llama.cpp would abort the
process over (`IllegalCallError`) and changes nothing then. Positions are in tokens from 0, sequence ids from 0 to
`n_seqs - 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from llamaslot.base.commands import Sampling
from llamaslot.base.kv_ops import IllegalCallError, Kv, Operation
from llamaslot.base.model import ModelInfo
from llamaslot.base.tokens import Tokens


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
    def cut_tokens(self) -> tuple[str, ...]:
        """The texts of control tokens that do not strip the text before them, ends of generation first."""

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
