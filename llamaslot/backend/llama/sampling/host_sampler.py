"""Choice of the next token: biases, penalties and DRY, then llama.cpp's samplers or, if greedy, the highest logit.

`Chain` has llama.cpp's samplers in the order that a request asks for, with our own ones among them. It copies,
scans and sorts all candidates that it gets. If it begins with top-k, it gets only those: the choice is the same
except among equal logits, and faster for a large vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamaslot.backend.constraints import Matcher
from llamaslot.backend.llama.sampling.candidates import (
    Adjuster,
    Candidates,
    Logits,
    highest,
    possible,
    score_after_sampling,
    score_of,
)
from llamaslot.backend.llama.sampling.penalties import BreakerIndex, Dry, Penalties
from llamaslot.backend.llama.sampling.samplers import (
    active_samplers,
    bounded_biases,
    constructors,
    takes_the_best,
)
from llamaslot.base.backend import CONSTRAINT_FAILED, NO_TOKEN
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.generation.token_probs import TokenScore
from llamaslot.base.kv_ops import IllegalCallError
from llamaslot.base.tokens import Tokens


class HostSampler:
    """Sampler of one request, on the host. `choose` is called once for each token."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        history: Tokens,
        n_ctx: int,
        n_vocab: int,
        eog: frozenset[int],
        breakers: BreakerIndex,
        matcher: Matcher | None = None,
    ) -> None:
        biases = bounded_biases(sampling, eog)
        self._biased = np.fromiter(biases, dtype=np.int64, count=len(biases))
        self._biases = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
        adjusters = {
            name: adjuster
            for name, adjuster in (
                ("penalties", Penalties.of(sampling, history=history, n_ctx=n_ctx, n_vocab=n_vocab)),
                ("dry", Dry.of(sampling, history=history, n_ctx=n_ctx, index=breakers)),
            )
            if adjuster is not None and name in sampling.samplers and not sampling.mirostat
        }
        names = active_samplers(sampling, adjusters)
        first = list(takewhile(adjusters.__contains__, names))
        names = names[len(first) :]
        self._adjusters: list[Adjuster] = list(adjusters.values())
        self._first: list[Adjuster] = [adjusters[name] for name in first]
        """Adjusters before all other samplers, which therefore see all tokens."""
        self._top_k = sampling.top_k if names[0] == "top_k" else 0
        """k if the chain begins with top-k, else 0."""
        self._chain = None if takes_the_best(sampling, names) else Chain(sampling, names, adjusters, n_vocab)
        self._n_probs = sampling.n_probs
        self._scores_draws = sampling.post_sampling_probs
        self._drawn_from: Candidates | None = None
        self.scores: list[TokenScore] = []
        """Probabilities of the tokens chosen since it was cleared, if the request asks for them."""
        self._matcher = matcher
        self._closed = False

    def choose(self, logits: Logits) -> int:
        """Return the next token.

        `NO_TOKEN` if a logit is NaN or the highest one is infinite, `CONSTRAINT_FAILED` if the constraint allows
        none. `logits` are changed during the call, and restored.
        """
        if self._closed:
            raise IllegalCallError("sampling with a freed sampler")
        token = (
            self._choose_adjusted(logits) if self._matcher is None else self._choose_allowed(logits, self._matcher)
        )
        if token >= 0:
            self._accept(token)
            if self._n_probs >= 0:
                self.scores.append(self._scored(token, logits))
        return token

    @property
    def failure(self) -> str:
        """Reason of `CONSTRAINT_FAILED`."""
        return self._matcher.failure if self._matcher is not None else ""

    def advance(self, *, forced: tuple[int, ...]) -> tuple[int, ...]:
        """Advance by `forced` tokens and those that the constraint forces after them; returns the latter.

        Begins to compute the next mask.
        """
        for token in forced:
            self._accept(token)
        if self._matcher is None:
            return ()
        for token in forced:
            self._matcher.accept(token)
        more = self.force()
        self._matcher.begin_mask()
        return more

    def force(self) -> tuple[int, ...]:
        """Advance by the tokens that the constraint forces next, and return them.

        None if probabilities are wanted, which only chosen tokens have.
        """
        if self._matcher is None or self._n_probs >= 0:
            return ()
        tokens = self._matcher.forced()
        for token in tokens:
            self._accept(token)
        return tokens

    def close(self) -> None:
        """Free the chain. Further use is an error."""
        if self._closed:
            raise IllegalCallError("a sampler was closed twice")
        self._closed = True
        if self._chain is not None:
            self._chain.close()

    def _accept(self, token: int) -> None:
        """Record a token of the reply, sampled or forced."""
        for adjuster in self._adjusters:
            adjuster.accept(token)
        if self._chain is not None:
            self._chain.accept(token)

    def _scored(self, token: int, logits: Logits) -> TokenScore:
        if not self._scores_draws:
            return score_of(token, logits, self._n_probs)
        score = score_after_sampling(token, self._drawn_from, self._n_probs)
        self._drawn_from = None
        return score

    def _adjust(self, logits: Logits) -> list[tuple[npt.NDArray[Any], Logits]]:
        """Apply biases and the first adjusters to logits; returns the changed tokens and their old logits."""
        changed: list[tuple[npt.NDArray[Any], Logits]] = []
        if len(self._biased):
            changed.append((self._biased, logits[self._biased]))
            logits[self._biased] += self._biases
        for adjuster in self._first:
            tokens = adjuster.tokens
            changed.append((tokens, logits[tokens]))
            logits[tokens] = adjuster.adjusted(logits[tokens])
        return changed

    def _choose_allowed(self, logits: Logits, matcher: Matcher) -> int:
        """Choose among the tokens that the constraint allows. Biases and penalties cannot rule all of them out."""
        # Checked before the mask, which might hide that the model failed.
        if not np.isfinite(logits[logits.argmax()]):
            return NO_TOKEN
        mask = matcher.mask()
        if mask is None:
            return CONSTRAINT_FAILED
        if mask.is_allowed:
            row = np.full_like(logits, -np.inf)
            row[mask.tokens] = logits[mask.tokens]
            token = self._choose_adjusted(row)
            # NO_TOKEN: a bias of -inf rules out all allowed tokens, for example the end of the text with
            # `ignore_eos`.
            token = int(mask.tokens[logits[mask.tokens].argmax()]) if token == NO_TOKEN else token
        else:
            values = logits[mask.tokens]
            logits[mask.tokens] = -np.inf
            try:
                token = self._choose_adjusted(logits)
                token = int(logits.argmax()) if token == NO_TOKEN else token
            finally:
                logits[mask.tokens] = values
        matcher.accept(token)
        return token

    def _choose_adjusted(self, logits: Logits) -> int:
        """Choose a token from logits with biases, penalties and DRY."""
        changed = self._adjust(logits)
        try:
            return self._choose(logits)
        finally:
            for tokens, values in reversed(changed):
                logits[tokens] = values

    def _choose(self, logits: Logits) -> int:
        best = highest(logits, self._top_k) if self._chain is not None and self._top_k > 0 else None
        if best is not None:
            return self._drawn(best, logits)
        # For numpy NaN is the highest value.
        token = int(logits.argmax())
        if not np.isfinite(logits[token]):
            return NO_TOKEN
        if self._chain is None:
            return token
        return self._drawn(np.arange(len(logits)) if self._matcher is None else possible(logits), logits)

    def _drawn(self, tokens: npt.NDArray[np.int64], logits: Logits) -> int:
        assert self._chain is not None
        values = logits[tokens]
        if not len(values) or not np.isfinite(values.max()):
            return NO_TOKEN
        candidates = Candidates(tokens, values)
        token = self._chain.choose(candidates)
        if self._n_probs >= 0 and self._scores_draws:
            self._drawn_from = candidates
        if token < 0:
            raise IllegalCallError(f"llama.cpp chose none of {len(tokens)} tokens")
        return token


class Chain:
    """Samplers by name, in order. The last one chooses the token."""

    def __init__(
        self, sampling: Sampling, names: Sequence[str], adjusters: Mapping[str, Adjuster], n_vocab: int
    ) -> None:
        self._parts: list[tuple[Adjuster | None, Any]] = []
        """Parts of the chain: each is either one of our samplers, or a chain of llama.cpp's."""
        self._is_told = names[-1] == "adaptive_p"
        known = constructors(sampling, n_vocab)
        for name in names:
            if name in adjusters:
                self._parts.append((adjusters[name], None))
                continue
            if not self._parts or self._parts[-1][0] is not None:
                chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
                self._parts.append((None, chain))
            constructor, *arguments = known[name]
            llama_cpp.llama_sampler_chain_add(self._parts[-1][1], constructor(*arguments))

    def choose(self, candidates: Candidates) -> int:
        """Return the token that the last sampler chooses; -1 if it chooses none."""
        for adjuster, chain in self._parts:
            if adjuster is None:
                llama_cpp.llama_sampler_apply(chain, ctypes.byref(candidates.array))
            else:
                candidates.adjust(adjuster)
        selected = candidates.array.selected
        return int(candidates.array.data[selected].id) if selected >= 0 else -1

    def accept(self, token: int) -> None:
        """Tell adaptive-p, if it is used, which token was chosen: it learns from that."""
        if self._is_told:
            llama_cpp.llama_sampler_accept(self._parts[-1][1], token)

    def close(self) -> None:
        """Free llama.cpp's samplers."""
        for adjuster, chain in self._parts:
            if adjuster is None:
                llama_cpp.llama_sampler_free(chain)
