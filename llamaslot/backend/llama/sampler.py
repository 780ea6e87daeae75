"""Choosing the next token: biases and penalties, then llama.cpp's sampler chain or, if greedy, the highest logit.

A chain copies, scans and sorts as many candidates as it is given. If it keeps only the top k, it is given those
alone: the same choice but between equal logits, and sooner where a vocabulary is large.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaslot.base.backend import NO_TOKEN
from llamaslot.base.commands import Sampling
from llamaslot.base.kv_ops import IllegalCallError
from llamaslot.base.tokens import Tokens

Logits: TypeAlias = npt.NDArray[np.float32]

_SEED_MASK = 0xFFFFFFFF

_CANDIDATE = np.dtype(llama_cpp.llama_token_data)
_BLOCK = 64
"""Logits of which only the greatest is looked at first."""
_BLOCKS_EACH = 4
"""Blocks for each token that is wanted, at least."""
_MAX_BIAS = 1e38
"""A third of the largest float32."""


class LlamaSampler:
    """One request's sampler; `choose` is called once a token."""

    def __init__(
        self, sampling: Sampling, *, history: Tokens, n_ctx: int, n_vocab: int, eog: frozenset[int]
    ) -> None:
        biases = {**sampling.logit_bias, **dict.fromkeys(eog if sampling.ignore_eos else (), -np.inf)}
        self._biased = np.fromiter(biases, dtype=np.int64, count=len(biases))
        # Bounded, so that a bias cannot make a logit infinite: that would count as a failure of the model.
        bounded = (bias if bias == -np.inf else min(max(bias, -_MAX_BIAS), _MAX_BIAS) for bias in biases.values())
        self._biases = np.fromiter(bounded, dtype=np.float32, count=len(biases))
        self._penalties = Penalties.of(sampling, history=history, n_ctx=n_ctx, n_vocab=n_vocab)
        self._top_k = sampling.top_k
        self._chain = _chain(sampling) if sampling.temperature > 0 else None
        self._closed = False

    def choose(self, logits: Logits) -> int:
        """Return the next token; `NO_TOKEN` if a logit is NaN, or the highest one infinite.

        `logits` change only meanwhile.
        """
        if self._closed:
            raise IllegalCallError("sampling with a freed sampler")
        changed = self._adjust(logits)
        try:
            token = self._choose(logits)
        finally:
            for tokens, values in reversed(changed):
                logits[tokens] = values
        if self._penalties is not None and token != NO_TOKEN:
            self._penalties.accept(token)
        return token

    def close(self) -> None:
        """Free the chain; further use is an error."""
        if self._closed:
            raise IllegalCallError("a sampler was closed twice")
        self._closed = True
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)

    def _adjust(self, logits: Logits) -> list[tuple[npt.NDArray[Any], Logits]]:
        """Change logits by biases and penalties, in llama-server's order; return what they were, by tokens."""
        changed: list[tuple[npt.NDArray[Any], Logits]] = []
        if len(self._biased):
            changed.append((self._biased, logits[self._biased]))
            logits[self._biased] += self._biases
        if self._penalties is not None:
            tokens = self._penalties.tokens
            changed.append((tokens, logits[tokens]))
            logits[tokens] = self._penalties.penalized(logits[tokens])
        return changed

    def _choose(self, logits: Logits) -> int:
        best = highest(logits, self._top_k) if self._chain is not None and self._top_k > 0 else None
        if best is not None:
            return self._drawn(best, logits)
        # numpy takes NaN for the highest.
        token = int(logits.argmax())
        if not np.isfinite(logits[token]):
            return NO_TOKEN
        return token if self._chain is None else self._drawn(np.arange(len(logits)), logits)

    def _drawn(self, tokens: npt.NDArray[np.int64], logits: Logits) -> int:
        candidates = np.zeros(len(tokens), _CANDIDATE)
        candidates["id"] = tokens
        candidates["logit"] = logits[tokens]
        if not np.isfinite(candidates["logit"].max()):
            return NO_TOKEN
        data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        if array.selected < 0:
            raise IllegalCallError(f"llama.cpp chose none of {len(tokens)} tokens")
        return int(array.data[array.selected].id)


class Penalties:
    """llama.cpp's penalties for repetition, over a window of the latest tokens.

    llama.cpp's own sampler takes in a prompt token by token, each a ctypes call on the thread that computes.
    """

    def __init__(self, sampling: Sampling, window: int, history: Tokens, n_vocab: int) -> None:
        latest = history[-window:]
        self._repeat = np.float32(sampling.repeat_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        counts = np.bincount(latest, minlength=1)
        found = np.flatnonzero(counts)
        self._n_different = len(found)
        size = min(window, n_vocab) + 1
        self._tokens = np.zeros(size, dtype=np.int32)
        self._tokens[: len(found)] = found
        self._counts = np.zeros(size, dtype=np.float32)
        self._counts[: len(found)] = counts[found]
        """How often each of `_tokens` is in the window; both in any order, `_n_different` of them."""
        self._places = {token: place for place, token in enumerate(found.tolist())}
        self._window = np.zeros(window, dtype=np.int32)
        """A ring buffer."""
        self._window[: len(latest)] = latest
        self._n = len(latest)

    @classmethod
    def of(cls, sampling: Sampling, *, history: Tokens, n_ctx: int, n_vocab: int) -> Penalties | None:
        """Return the penalties of a request, None if they change nothing."""
        # A request must not name a longer window than there can be: memory is allocated for it.
        window = n_ctx if sampling.repeat_last_n < 0 else min(sampling.repeat_last_n, n_ctx)
        factors = sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty
        return cls(sampling, window, history, n_vocab) if window and factors != (1.0, 0.0, 0.0) else None

    @property
    def tokens(self) -> Tokens:
        """The different tokens in the window."""
        return self._tokens[: self._n_different]

    def accept(self, token: int) -> None:
        """Add a token to the window."""
        at = self._n % len(self._window)
        if self._n >= len(self._window):
            self._remove(int(self._window[at]))
        self._window[at] = token
        self._n += 1
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._n_different
            self._tokens[place], self._counts[place] = token, 0
            self._n_different += 1
        self._counts[place] += 1

    def penalized(self, logits: Logits) -> Logits:
        """Return the logits of `tokens` with the penalties."""
        logits = np.where(logits <= 0, logits * self._repeat, logits / self._repeat)
        return logits - (self._counts[: self._n_different] * self._frequency + self._presence)

    def _remove(self, token: int) -> None:
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place]:
            return
        last = self._n_different = self._n_different - 1
        self._tokens[place], self._counts[place] = self._tokens[last], self._counts[last]
        self._places[int(self._tokens[place])] = place
        del self._places[token]


def _chain(sampling: Sampling) -> Any:
    """Return llama.cpp's samplers in llama-server's order."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for link in (
        llama_cpp.llama_sampler_init_top_k(sampling.top_k),
        llama_cpp.llama_sampler_init_typical(sampling.typical_p, 1),
        llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
        llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
        llama_cpp.llama_sampler_init_temp(sampling.temperature),
        llama_cpp.llama_sampler_init_dist(sampling.seed & _SEED_MASK),
    ):
        llama_cpp.llama_sampler_chain_add(chain, link)
    return chain


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
    found = np.flatnonzero(logits >= bound)
    return found if len(found) >= n else None
