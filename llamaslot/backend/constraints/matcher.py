"""Matcher: one request's position in its grammar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from llamaslot.text.grammars.compiling import MASK_S, MAX_MASK_EXCESS_S, TOO_AMBIGUOUS, first_lines


@dataclass(frozen=True, slots=True)
class TokenMask:
    """List of the tokens that a grammar allows next, or of those that it forbids, whichever is shorter.

    Of 151,936 tokens, a few are allowed before a string, and a few hundred are forbidden within one. Applying such
    a list takes microseconds; applying a mask of all tokens takes 0.5 ms.
    """

    tokens: npt.NDArray[np.int64]
    is_allowed: bool
    """True if `tokens` are allowed and all others forbidden."""

    @classmethod
    def of(cls, words: npt.NDArray[np.int32], n_vocab: int) -> TokenMask:
        """Convert a bit mask with 32 tokens in each word."""
        is_allowed = 2 * np.count_nonzero(words) <= len(words)
        chosen = words if is_allowed else ~words
        at = np.flatnonzero(chosen)
        bits = np.unpackbits(chosen[at].view(np.uint8), bitorder="little").reshape(len(at), 32)
        rows, columns = np.nonzero(bits)
        tokens = at[rows] * 32 + columns
        return cls(tokens[tokens < n_vocab], bool(is_allowed))


class Matcher:
    """Follows the tokens of one request, while `executor` computes the mask of the next token in the background.

    `failure` is set once llguidance cannot go on, for example because the grammar is too ambiguous. Used on one
    thread. Every method waits for a mask that is being computed.
    """

    def __init__(
        self, state: LLMatcher, first: TokenMask, *, n_vocab: int, eog: Sequence[int], executor: Executor
    ) -> None:
        self._state = state
        self._mask: TokenMask | None = first
        self._computing: Future[TokenMask | None] | None = None
        self._n_vocab = n_vocab
        self._eog = eog
        self._executor = executor
        self._has_ended = False
        self._excess = 0.0
        """Sum of the CPU time by which masks exceeded `MASK_S`."""
        self.failure = ""
        """Reason why the reply cannot go on; empty while it can."""

    def mask(self) -> TokenMask | None:
        """Return the tokens that may come next; None after a failure."""
        self._wait()
        if self._mask is None and not self.failure:
            self._mask = self._compute()
        return None if self.failure else self._mask

    def accept(self, token: int) -> None:
        """Advance by a token that the mask allows. A token that ends generations ends the reply in any position."""
        self._wait()
        self._mask = None
        if token in self._eog:
            self._has_ended = True
        elif not self._state.consume_token(token):
            self._fail()

    def forced(self) -> tuple[int, ...]:
        """Advance by the tokens that the grammar forces, and return them.

        They are the tokens for each of which the mask would allow only one. If the grammar allows nothing more, the
        last one ends the generation.
        """
        self._wait()
        if self.failure or self._has_ended:
            return ()
        tokens = self._state.compute_ff_tokens()
        # Nothing is generated after a token that ends generations.
        end = next((i for i, token in enumerate(tokens) if token in self._eog), None)
        if end is not None:
            self._has_ended = True
            return tuple(tokens[: end + 1])
        if tokens:
            self._mask = None
            if not self._state.consume_tokens(tokens):
                self._fail()
                return ()
        if self._state.is_stopped() and self._state.is_accepting():
            self._has_ended = True
            tokens = [*tokens, self._eog[0]]
        return tuple(tokens)

    def begin_mask(self) -> None:
        """Begin to compute the next mask in the background."""
        if self._mask is None and self._computing is None and not self.failure and not self._has_ended:
            self._computing = self._executor.submit(self._compute)

    def _wait(self) -> None:
        if self._computing is not None:
            computing, self._computing = self._computing, None
            self._mask = computing.result()

    def _compute(self) -> TokenMask | None:
        began = time.thread_time()
        mask = next_mask(self._state, self._n_vocab)
        self._excess += max(0.0, time.thread_time() - began - MASK_S)
        if self._state.is_error():
            self._fail()
        elif self._excess > MAX_MASK_EXCESS_S:
            # The other requests of a step wait for this request's masks, so it must not go on.
            self.failure = TOO_AMBIGUOUS
        elif not len(mask.tokens) and mask.is_allowed:
            self.failure = "no token of the vocabulary is allowed next"
        return mask

    def _fail(self) -> None:
        self.failure = first_lines(self._state.get_error()) or "the grammar cannot be followed"


def next_mask(state: LLMatcher, n_vocab: int) -> TokenMask:
    """Return the mask of the next token. Meaningless if `state` is in error afterwards."""
    words = np.zeros((n_vocab + 31) // 32, dtype=np.int32)
    state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return TokenMask.of(words, n_vocab)
