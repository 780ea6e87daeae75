"""Choosing the next token: llama.cpp's sampler chains in llama-server's order, and plain argmax where that is all.

The chain reads the logits inside llama.cpp; only the argmax of a greedy request looks at them from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaslot.base.messages import Sampling
from llamaslot.core.backend import IllegalCallError, Tokens

Logits: TypeAlias = npt.NDArray[np.float32]

_SEED_MASK = 0xFFFFFFFF


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
        self._chain: Any = None
        if sampling.temperature > 0 or penalised or sampling.logit_bias:
            self._chain = self._build(sampling, penalised)
            if penalised:
                for token in history[-self._window :]:
                    llama_cpp.llama_sampler_accept(self._chain, int(token))

    def choose(self, context: Any, row: int, logits_of: Callable[[int], Logits]) -> int:
        """The next token from the logits of batch row `row` of the last decode."""
        if self._closed:
            raise IllegalCallError("sampling with a freed sampler")
        if self._chain is not None:
            return int(llama_cpp.llama_sampler_sample(self._chain, context, row))
        logits = logits_of(row)
        token = int(logits.argmax())
        if len(self._banned) and token in self._banned:
            allowed = logits.copy()
            allowed[self._banned] = -np.inf
            token = int(allowed.argmax())
        return token

    def close(self) -> None:
        """See `Sampler.close`."""
        if self._closed:
            raise IllegalCallError("a sampler was closed twice")
        self._closed = True
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)

    def _build(self, sampling: Sampling, penalised: bool) -> Any:
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for link in self._links(sampling, penalised):
            llama_cpp.llama_sampler_chain_add(chain, link)
        return chain

    def _links(self, sampling: Sampling, penalised: bool) -> list[Any]:
        links = []
        biases = {**sampling.logit_bias, **{int(token): -np.inf for token in self._banned}}
        if biases:
            array = (llama_cpp.llama_logit_bias * len(biases))(*biases.items())
            links.append(llama_cpp.llama_sampler_init_logit_bias(self._n_vocab, len(biases), array))
        if penalised:
            links.append(
                llama_cpp.llama_sampler_init_penalties(
                    self._n_vocab,
                    self._window,
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.temperature <= 0:
            return [*links, llama_cpp.llama_sampler_init_greedy()]
        return [
            *links,
            llama_cpp.llama_sampler_init_top_k(sampling.top_k),
            llama_cpp.llama_sampler_init_typical(sampling.typical_p, 1),
            llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
            llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
            llama_cpp.llama_sampler_init_temp(sampling.temperature),
            llama_cpp.llama_sampler_init_dist(sampling.seed & _SEED_MASK),
        ]
