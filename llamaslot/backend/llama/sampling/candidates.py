"""Candidates: the tokens to choose from, with their logits and log-probabilities."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Protocol, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaslot.base.generation.token_probs import FLOAT_MIN, TokenScore
from llamaslot.base.tokens import Tokens

Logits: TypeAlias = npt.NDArray[np.float32]
Which: TypeAlias = "npt.NDArray[np.int64] | slice"
ALL = slice(None)

_CANDIDATE = np.dtype(llama_cpp.llama_token_data)
_BLOCK = 64
"""Logits per block; only the greatest of each block is compared at first."""
_BLOCKS_EACH = 4
"""Fewest blocks per wanted token; with fewer, comparing blocks saves no time."""


class Adjuster(Protocol):
    """A sampler that changes the logits of a few tokens, depending on the latest ones."""

    @property
    def tokens(self) -> Tokens:
        """Tokens whose logits it changes, without repetitions."""

    def adjusted(self, logits: Logits, which: Which = ALL) -> Logits:
        """Return the changed logits of `tokens`, or of `which` of them."""

    def accept(self, token: int) -> None:
        """Record a chosen token."""


class Candidates:
    """An array of tokens for llama.cpp's samplers, which reorder and shorten it."""

    def __init__(self, tokens: npt.NDArray[np.int64], logits: Logits) -> None:
        self._data = np.zeros(len(tokens), _CANDIDATE)
        self._data["id"], self._data["logit"] = tokens, logits
        data = self._data.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        self.array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)

    @property
    def rows(self) -> npt.NDArray[Any]:
        """The remaining candidates: `id`, `logit` and, once a sampler has computed it, the probability `p`."""
        # Located by llama.cpp's pointer, because XTC moves the beginning of the array.
        first = (ctypes.addressof(self.array.data.contents) - self._data.ctypes.data) // _CANDIDATE.itemsize
        return self._data[first : first + self.array.size]

    def adjust(self, adjuster: Adjuster) -> None:
        """Apply an adjuster to the remaining candidates."""
        rows, tokens = self.rows, adjuster.tokens
        if not len(tokens):
            return
        order = tokens.argsort()
        places = order[np.searchsorted(tokens[order], rows["id"]).clip(max=len(tokens) - 1)]
        found = np.flatnonzero(tokens[places] == rows["id"])
        rows["logit"][found] = adjuster.adjusted(rows["logit"][found], places[found])
        self.array.sorted = False


def highest(logits: Logits, n: int) -> npt.NDArray[np.int64] | None:
    """Return the ids of at least the `n` highest logits, in ascending order.

    None if the vocabulary is too small for this to save time, or if a logit is NaN. The n-th greatest of the
    blocks' maxima is a bound that at least `n` logits reach, so the `n` highest are among those that reach it.
    """
    n_blocks = len(logits) // _BLOCK
    if _BLOCKS_EACH * n > n_blocks:
        return None
    n_in_blocks = n_blocks * _BLOCK
    blocks, rest = logits[:n_in_blocks].reshape(_BLOCK, n_blocks), logits[n_in_blocks:]
    greatest = blocks.max(axis=0)
    if np.isnan(greatest).any() or np.isnan(rest).any():
        return None
    bound = np.partition(greatest, n_blocks - n)[n_blocks - n]
    if bound == -np.inf:
        return possible(logits)
    # The other blocks have no logit that reaches the bound.
    columns = np.flatnonzero(greatest >= bound)
    rows, at = np.nonzero(blocks[:, columns] >= bound)
    return np.concatenate((rows * n_blocks + columns[at], n_in_blocks + np.flatnonzero(rest >= bound)))


def possible(logits: Logits) -> npt.NDArray[np.int64]:
    """Return the ids of tokens that are not ruled out (logit above -inf). Under a constraint these may be few."""
    return np.flatnonzero(logits > -np.inf)


def score_of(token: int, logits: Logits, n_top: int) -> TokenScore:
    """Return the log-probability of a token by the softmax of the logits, and those of the `n_top` best tokens."""
    most = logits.max()
    # Invalid logits give NaN.
    with np.errstate(invalid="ignore"):
        log_total = float(most) + math.log(np.exp(logits - most).sum(dtype=np.float64))
    top = _best(logits, n_top)
    values = [max(value - log_total, FLOAT_MIN) for value in logits[[token, *top]].tolist()]
    return TokenScore(token, values[0], top, values[1:])


def score_after_sampling(token: int, candidates: Candidates | None, n_top: int) -> TokenScore:
    """Return the probability with which a token was drawn from the candidates, and the `n_top` highest ones.

    Tokens that could not be drawn are left out. `candidates` is None if the token was the only one.
    """
    if candidates is None:
        return TokenScore(token, 1.0, [token][:n_top], [1.0][:n_top])
    rows = candidates.rows
    order = np.argsort(-rows["p"], kind="stable")[:n_top]
    top = rows[order[rows["p"][order] > 0]]
    value = float(rows["p"][rows["id"] == token][0])
    return TokenScore(token, value, top["id"].tolist(), top["p"].tolist())


def _best(logits: Logits, n: int) -> list[int]:
    """Return the tokens with the `n` highest logits, in descending order; of equal ones, the lowest ids first."""
    if n <= 0:
        return []
    found = highest(logits, n)
    if found is None:
        found = np.arange(len(logits))
    order: npt.NDArray[np.int64] = np.argsort(-logits[found], kind="stable")[:n]
    best: list[int] = found[order].tolist()
    return best
