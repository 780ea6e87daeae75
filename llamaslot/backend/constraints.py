"""Constraints in the engine: grammars compiled for the vocabulary, and masks of the tokens that they allow.

`ConstraintCompiler` caches compiled grammars; a `Matcher` is one request's position in its grammar.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from llamaslot.base.commands import Constraint
from llamaslot.base.threads import GRAMMAR_STACK_BYTES, started_executor
from llamaslot.text.grammars.compiling import (
    MASK_S,
    MAX_MASK_EXCESS_S,
    TOO_AMBIGUOUS,
    compile_grammar,
    first_lines,
    grammar_error,
)

MAX_CACHE_BYTES = 256 * 2**20
"""Most bytes of cached grammars, by estimate."""
_BYTES_EACH = 512 * 2**10
_BYTES_PER_BYTE = 512
"""Estimated memory of a compiled grammar in bytes: `_BYTES_EACH` plus `_BYTES_PER_BYTE` for each byte of its text,
or the amount measured in its trial if that is more. llguidance does not report it.

Measured: 7.4 MB for 27 KB (1,000 optional properties), 2.9 MB for 3 KB (50 patterns, after 10 replies).
"""
_MAX_MASK_THREADS = 4
"""Most threads that compute masks."""


@dataclass(frozen=True)
class Compiled:
    """A compiled grammar. Each request gets its own matcher from it; these share the lexer."""

    _state: LLMatcher
    _first: TokenMask
    _compiler: ConstraintCompiler

    def matcher(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        return Matcher(self._state.deep_copy(), self._first, self._compiler)


class ConstraintCompiler:
    """Compiles on any thread. Must be closed before the vocabulary is freed.

    `make_tokenizer` takes a second for a large vocabulary, so it is called at the first constraint. `eog` has the
    tokens that end a generation, beginning with the one that is forced at a grammar's end.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], *, n_vocab: int, eog: Sequence[int]) -> None:
        self.n_vocab = n_vocab
        self.eog = tuple(eog)
        # A quarter of the CPUs, so that the model keeps most of them.
        n_threads = max(1, min(_MAX_MASK_THREADS, (os.cpu_count() or 1) // 4))
        self.executor = started_executor(n_threads, "llamaslot-masks", GRAMMAR_STACK_BYTES)
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[str, tuple[Compiled, int]] = OrderedDict()
        """Compiled grammars, with their estimated bytes, by text."""
        self._n_bytes = 0
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> Compiled:
        """Return a compiled constraint; raises `InvalidRequestError`, or `NotSupportedError` for the vocabulary."""
        grammar = constraint.grammar
        with self._lock:
            if (found := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
                return found[0]
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        state = compile_grammar(constraint, self._tokenizer)
        first = next_mask(state, self.n_vocab)
        if state.is_error():
            raise grammar_error(state.get_error(), constraint.param)
        compiled = Compiled(state, first, self)
        with self._lock:
            self._keep(constraint, compiled)
        return compiled

    def close(self) -> None:
        """Wait for masks that are being computed, and end the threads."""
        self.executor.shutdown()

    def _keep(self, constraint: Constraint, compiled: Compiled) -> None:
        _, n_before = self._cache.get(constraint.grammar, (None, 0))
        n_bytes = max(_BYTES_EACH + _BYTES_PER_BYTE * len(constraint.grammar), constraint.n_bytes)
        self._cache[constraint.grammar] = compiled, n_bytes
        self._n_bytes += n_bytes - n_before
        while self._n_bytes > MAX_CACHE_BYTES and len(self._cache) > 1:
            _, (_, n_bytes) = self._cache.popitem(last=False)
            self._n_bytes -= n_bytes


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
    """Follows the tokens of one request, while a thread of the compiler computes the mask of the next token.

    `failure` is set once llguidance cannot go on, for example because the grammar is too ambiguous. Used on one
    thread. Every method waits for a mask that is being computed.
    """

    def __init__(self, state: LLMatcher, first: TokenMask, compiler: ConstraintCompiler) -> None:
        self._state = state
        self._mask: TokenMask | None = first
        self._computing: Future[TokenMask | None] | None = None
        self._n_vocab, self._executor = compiler.n_vocab, compiler.executor
        self._eog = compiler.eog
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
