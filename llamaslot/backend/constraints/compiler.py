"""Compiles constraints for the model's vocabulary, and caches the latest ones."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from llamaslot.backend.constraints.matcher import Matcher, TokenMask, next_mask
from llamaslot.base.commands import Constraint
from llamaslot.base.executors import GRAMMAR_STACK_BYTES, started_executor
from llamaslot.text.grammars.compiling import compile_grammar, grammar_error

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
        compiler = self._compiler
        return Matcher(
            self._state.deep_copy(),
            self._first,
            n_vocab=compiler.n_vocab,
            eog=compiler.eog,
            executor=compiler.executor,
        )


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

    @property
    def n_cached(self) -> int:
        """Number of cached grammars."""
        return len(self._cache)

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
