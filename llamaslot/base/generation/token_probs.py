"""Probabilities of tokens, and of the most likely tokens in their places."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isnan, nan
from typing import NamedTuple

import msgspec

from llamaslot.base.tokens import ids_of

FLOAT_MIN = -3.4028234663852886e38
"""The lowest float32, which stands for the logarithm of 0: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The probability of one token, as its logarithm unless it is one after sampling."""

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
        ends = ids_of(self.packed_ends)
        pieces = (self.text[start:end] for start, end in pairwise([0, *ends]))
        values = (None if isnan(value) else value for value in _floats(self.packed_values))
        all_ = map(TokenProb, ids_of(self.packed_tokens), pieces, values)
        for count in ids_of(self.packed_counts):
            yield next(all_)._replace(top=[next(all_) for _ in range(count - 1)])


NOT_SCORED = nan
"""The value of a prompt's first token, which nothing comes before."""


def _floats(data: bytes) -> array[float]:
    found = array("f")
    found.frombytes(data)
    return found
