"""Probabilities of tokens, and of the most likely tokens at their positions."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from math import isnan, nan
from typing import NamedTuple

import msgspec

FLOAT_MIN = -3.4028234663852886e38
"""The lowest float32, which stands for the logarithm of 0: JSON has no infinity."""
_PART_ENTRIES = 1024
"""Probabilities in one part of a long list."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of one token, or its probability after the samplers."""

    token: int
    value: float
    top_tokens: Sequence[int] = field(default_factory=list)
    """The most likely tokens, in descending order; they may include `token`."""
    top_values: Sequence[float] = field(default_factory=list)


class TokenProb(NamedTuple):
    """A token with its text and its probability, which is None for the first token of a prompt."""

    token: int
    piece: bytes
    value: float | None
    top: Sequence[TokenProb] = ()


class TokenProbs(msgspec.Struct, frozen=True, array_like=True):
    """Scores of consecutive tokens with all texts, packed: a prompt may have a million of them."""

    packed_counts: bytes
    """For each token 1 and the number of its most likely tokens."""
    packed_tokens: bytes
    """Each token, followed by the most likely ones."""
    packed_values: bytes
    packed_ends: bytes
    """Where the text of each of them ends in `text`."""
    text: bytes

    @property
    def n_entries(self) -> int:
        """Count the probabilities."""
        return len(self.packed_tokens) // 4

    @property
    def n_bytes(self) -> int:
        """Approximate bytes in memory."""
        return 4 * len(self.packed_tokens) + len(self.text)

    @classmethod
    def of(cls, scores: Sequence[TokenScore], piece: Callable[[int], bytes]) -> TokenProbs:
        """Pack scores; `piece` gives the text of a token."""
        tokens = array("i")
        values = array("f")
        for score in scores:
            tokens.append(score.token)
            tokens.extend(score.top_tokens)
            values.append(score.value)
            values.extend(score.top_values)
        pieces = [piece(token) for token in tokens]
        return cls(
            packed_counts=array("i", (1 + len(score.top_tokens) for score in scores)).tobytes(),
            packed_tokens=tokens.tobytes(),
            packed_values=values.tobytes(),
            packed_ends=array("i", accumulate(map(len, pieces))).tobytes(),
            text=b"".join(pieces),
        )

    def __iter__(self) -> Iterator[TokenProb]:
        """Yield the tokens with their probabilities."""
        rows = ProbRows()
        rows.extend(self)
        for part in rows.parts():
            yield from part


class ProbRows:
    """Scores of the tokens of a text so far, in about 20 bytes each: objects would take ten times as many."""

    def __init__(self) -> None:
        self._counts = array("i")
        self._tokens = array("i")
        self._values = array("f")
        self._ends = array("i")
        self._text = bytearray()

    def __len__(self) -> int:
        """Count the tokens of the text."""
        return len(self._counts)

    @property
    def n_entries(self) -> int:
        """Count the probabilities: those of the text's tokens, and of the most likely ones at their positions."""
        return len(self._tokens)

    def extend(self, probs: TokenProbs) -> None:
        """Append scores."""
        n_before = len(self._text)
        self._counts.frombytes(probs.packed_counts)
        self._tokens.frombytes(probs.packed_tokens)
        self._values.frombytes(probs.packed_values)
        ends = array("i", probs.packed_ends)
        self._ends.extend(array("i", [end + n_before for end in ends]) if n_before else ends)
        self._text += probs.text

    def values(self) -> list[float]:
        """Return the probabilities of the text's tokens, without those that are not scored."""
        chosen = map(self._values.__getitem__, self._starts())
        return [value for value in chosen if not isnan(value)]

    def parts(self, *, with_top: bool = True) -> Iterator[list[TokenProb]]:
        """Yield the tokens in lists that take a millisecond to encode; the most likely ones only `with_top`."""
        part: list[TokenProb] = []
        n_entries = 0
        for start, count in zip(self._starts(), self._counts, strict=True):
            top = [self._prob(at) for at in range(start + 1, start + count)] if with_top else ()
            part.append(self._prob(start, top))
            n_entries += count if with_top else 1
            if n_entries >= _PART_ENTRIES:
                yield part
                part, n_entries = [], 0
        if part:
            yield part

    def _starts(self) -> Iterator[int]:
        """Yield the index of each of the text's tokens among all entries."""
        return islice(accumulate(self._counts, initial=0), len(self._counts))

    def _prob(self, at: int, top: Sequence[TokenProb] = ()) -> TokenProb:
        piece = bytes(self._text[self._ends[at - 1] if at else 0 : self._ends[at]])
        value = self._values[at]
        return TokenProb(self._tokens[at], piece, None if isnan(value) else value, top)


NOT_SCORED = nan
"""Value of a prompt's first token, which cannot be scored."""
