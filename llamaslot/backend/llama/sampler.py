"""Choosing the next token: llama.cpp's sampler chains in llama-server's order, and plain argmax where that is all.

A chain copies, scans and sorts as many candidates as it is given. Where it keeps only the top k, it is given those
alone that can be among them: the same choice but between equal logits, and sooner where a vocabulary is large.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

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


class LlamaSampler:
    """One request's sampler; `choose` is called once a token."""

    def __init__(
        self, sampling: Sampling, *, history: Tokens, n_ctx: int, n_vocab: int, eog: frozenset[int]
    ) -> None:
        self._banned = np.fromiter(eog if sampling.ignore_eos else (), dtype=np.int64)
        self._n_vocab = n_vocab
        last_n = sampling.repeat_last_n
        # llama.cpp allocates as much as it is told to, so a request must not name more than there can be.
        self._window = n_ctx if last_n < 0 else min(last_n, n_ctx)
        self._closed = False
        penalised = (
            sampling.repeat_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        ) and self._window > 0
        self._biases = {**sampling.logit_bias, **{int(token): -np.inf for token in self._banned}}
        self._raised = np.array([token for token, bias in self._biases.items() if bias > 0], dtype=np.int64)
        self._n_best = 0
        """Candidates that hold all that the chain can choose, 0 for all tokens (`_n_candidates`)."""
        self._chain: Any = None
        if sampling.temperature > 0 or penalised or sampling.logit_bias:
            self._n_best = self._n_candidates(sampling, penalised)
            self._chain = self._build(sampling, penalised)
            if penalised:
                for token in history[-self._window :]:
                    llama_cpp.llama_sampler_accept(self._chain, int(token))

    def choose(self, context: Any, row: int, logits_of: Callable[[int], Logits]) -> int:
        """Return the next token from the logits of batch row `row` of the last decode."""
        if self._closed:
            raise IllegalCallError("sampling with a freed sampler")
        logits = logits_of(row)
        if self._chain is None:
            return self._best_allowed(logits)
        best = highest(logits, self._n_best) if self._n_best else None
        if best is None:
            return int(llama_cpp.llama_sampler_sample(self._chain, context, row))
        return self._choose_among(np.union1d(best, self._raised), logits)

    def close(self) -> None:
        """Free the chain; further use is an error."""
        if self._closed:
            raise IllegalCallError("a sampler was closed twice")
        self._closed = True
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)

    def _best_allowed(self, logits: Logits) -> int:
        token = int(logits.argmax())
        if len(self._banned) and token in self._banned:
            allowed = logits.copy()
            allowed[self._banned] = -np.inf
            token = int(allowed.argmax())
        return token

    def _choose_among(self, tokens: npt.NDArray[np.int64], logits: Logits) -> int:
        candidates = np.zeros(len(tokens), _CANDIDATE)
        candidates["id"] = tokens
        candidates["logit"] = logits[tokens]
        data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        if array.selected < 0:
            raise IllegalCallError(f"llama.cpp chose none of {len(tokens)} tokens")
        token = int(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(self._chain, token)
        return token

    def _n_candidates(self, sampling: Sampling, penalised: bool) -> int:
        """Return how many of the highest logits, with the tokens that a bias raises, hold all that can be chosen.

        Returns 0 where all logits are needed.

        The chain changes logits, then keeps the k highest (without temperature, 1). At most m tokens are lowered:
        those with a bias, the banned ones among them, and those in the penalties' window. Of the k + m
        highest, at least k stay as high as they were, and none of the others rises above those: none is among the k
        that are kept. A penalty below its neutral value may raise any token.
        """
        k = sampling.top_k if sampling.temperature > 0 else 1
        lowest = min(sampling.repeat_penalty - 1.0, sampling.presence_penalty, sampling.frequency_penalty)
        if k <= 0 or (penalised and lowest < 0.0):
            return 0
        return k + len(self._biases) + (self._window if penalised else 0)

    def _build(self, sampling: Sampling, penalised: bool) -> Any:
        """Return a chain in llama-server's order, without the links that would change nothing."""
        links = []
        if self._biases:
            array = (llama_cpp.llama_logit_bias * len(self._biases))(*self._biases.items())
            links.append(llama_cpp.llama_sampler_init_logit_bias(self._n_vocab, len(self._biases), array))
        if penalised:
            penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            links.append(llama_cpp.llama_sampler_init_penalties(self._n_vocab, self._window, *penalties))
        if sampling.temperature <= 0:
            links.append(llama_cpp.llama_sampler_init_greedy())
        else:
            links += [
                llama_cpp.llama_sampler_init_top_k(sampling.top_k),
                llama_cpp.llama_sampler_init_typical(sampling.typical_p, 1),
                llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
                llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
                llama_cpp.llama_sampler_init_temp(sampling.temperature),
                llama_cpp.llama_sampler_init_dist(sampling.seed & _SEED_MASK),
            ]
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for link in links:
            llama_cpp.llama_sampler_chain_add(chain, link)
        return chain


def highest(logits: Logits, n: int) -> npt.NDArray[np.int64] | None:
    """The ids of at least the `n` highest logits, ascending, since a greedy chain takes the first of equals; None
    where the vocabulary is too small for that to be sooner, or too few are found among logits that are no numbers.

    The n-th greatest of the blocks' greatest is a bound that at least `n` logits reach, hence all of the highest.
    """
    n_blocks = len(logits) // _BLOCK
    if _BLOCKS_EACH * n > n_blocks:
        return None
    greatest = logits[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks).max(axis=0)
    bound = np.partition(greatest, n_blocks - n)[n_blocks - n]
    found = np.flatnonzero(logits >= bound)
    return found if len(found) >= n else None
