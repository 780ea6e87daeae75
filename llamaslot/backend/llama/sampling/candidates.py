"""Tokens to choose from, with their logits."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaslot.base.tokens import Tokens

Logits: TypeAlias = npt.NDArray[np.float32]
Which: TypeAlias = "npt.NDArray[np.int64] | slice"
ALL = slice(None)

_CANDIDATE = np.dtype(llama_cpp.llama_token_data)
_BLOCK = 64
"""Logits of which only the greatest is looked at first."""
_BLOCKS_EACH = 4
"""Blocks for each token that is wanted, at least."""


class Adjuster(Protocol):
    """A sampler that changes the logits of few tokens, depending on the latest tokens."""

    @property
    def tokens(self) -> Tokens:
        """The tokens whose logits it changes, each once."""

    def adjusted(self, logits: Logits, which: Which = ALL) -> Logits:
        """Return the changed logits of `tokens`, or of `which` of them."""

    def accept(self, token: int) -> None:
        """Add a token that was chosen."""


class Candidates:
    """An array of tokens as llama.cpp's samplers take it: they reorder and shorten it."""

    def __init__(self, tokens: npt.NDArray[np.int64], logits: Logits) -> None:
        self._data = np.zeros(len(tokens), _CANDIDATE)
        self._data["id"], self._data["logit"] = tokens, logits
        data = self._data.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        self.array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)

    @property
    def rows(self) -> npt.NDArray[Any]:
        """The candidates that are left: `id`, `logit` and, once a sampler computed it, the probability `p`."""
        # A view at llama.cpp's pointer, for XTC moves the beginning of the array.
        first = (ctypes.addressof(self.array.data.contents) - self._data.ctypes.data) // _CANDIDATE.itemsize
        return self._data[first : first + self.array.size]

    def adjust(self, adjuster: Adjuster) -> None:
        """Change the logits of those tokens that are left."""
        rows, tokens = self.rows, adjuster.tokens
        if not len(tokens):
            return
        order = tokens.argsort()
        places = order[np.searchsorted(tokens[order], rows["id"]).clip(max=len(tokens) - 1)]
        found = np.flatnonzero(tokens[places] == rows["id"])
        rows["logit"][found] = adjuster.adjusted(rows["logit"][found], places[found])
        self.array.sorted = False


def highest(logits: Logits, n: int) -> npt.NDArray[np.int64] | None:
    """Return, in ascending order, the ids of at least the `n` highest logits; None if the vocabulary is too small
    for this to save time, or if a logit is NaN.

    The n-th greatest of the blocks' greatest is a bound that at least `n` logits reach, hence all of the highest.
    """
    n_blocks = len(logits) // _BLOCK
    if _BLOCKS_EACH * n > n_blocks:
        return None
    greatest = logits[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks).max(axis=0)
    if np.isnan(greatest).any() or np.isnan(logits[n_blocks * _BLOCK :]).any():
        return None
    bound = np.partition(greatest, n_blocks - n)[n_blocks - n]
    if bound == -np.inf:
        return possible(logits)
    found = np.flatnonzero(logits >= bound)
    return found if len(found) >= n else None


def possible(logits: Logits) -> npt.NDArray[np.int64]:
    """Return the ids of the tokens that are not ruled out, which may be few under a constraint."""
    return np.flatnonzero(logits > -np.inf)
