"""Compiles grammars by llguidance, with limits and with errors that name what is not supported.

The prompt worker compiles each grammar for a small stand-in vocabulary, to refuse it before the request is
accepted; the engine compiles it again for the model's. llguidance's own check finds less than compiling does: it
passes `minProperties` beside optional properties.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError

MAX_CONSTRAINT_CHARS = 2**17
"""Characters of a grammar or schema: a text of that length which a schema prescribes takes 0.7 s to follow."""
MAX_ERROR_CHARS = 300
"""Characters of llguidance's messages that a client gets."""
_MAX_ITEMS_IN_ROW = 10_000
"""Places of a grammar at which a text may be at once; llguidance's 2,000 do for 500 optional properties only."""
_MAX_GOOD = 1024
_SPECIAL_PREFIX = b"\xff"
"""llguidance's mark of tokens that are no text."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_TOO_MANY_SYMBOLS = "grammar.symbols.len()"
"""Part of the assertion that fails in llguidance at 65,525 symbols, such as of 16,000 optional properties."""
_HARMLESS = "no tokenizer"
"""Beginning of the warnings about what cannot be checked without a vocabulary."""


class GrammarTooLongError(InvalidRequestError):
    """The grammar that was made of what a client sent is too long to be compiled."""


class UnknownGrammarError(Exception):
    """The grammar must be compiled to check it. `RequestReader.read` catches this; no client gets it."""


class _ByteVocabulary:
    """A token for each byte and each control token: as much of a vocabulary as checking a grammar takes."""

    def __init__(self, special_tokens: Sequence[str], n_tokens: int) -> None:
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [_SPECIAL_PREFIX + text.encode() for text in special_tokens]
        tokens += [b""] * (n_tokens - len(tokens))
        self.tokens = tokens
        self.bos_token_id = None
        self.eos_token_id = 0
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


class GrammarChecker:
    """Checks constraints in the prompt worker, for a model with these control tokens and so many tokens."""

    def __init__(self, special_tokens: Sequence[str], n_tokens: int) -> None:
        self._vocabulary = _ByteVocabulary(special_tokens, n_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._good: OrderedDict[bytes, None] = OrderedDict()
        """Digests of the latest grammars that passed: most requests come with one of a few."""

    def check(self, constraint: Constraint, *, may_compile: bool = True) -> None:
        """Raise `InvalidRequestError` for a grammar that is invalid or not supported; on any thread.

        Without `may_compile`, raise `UnknownGrammarError` for one that is not known to be valid.
        """
        digest = blake2b(constraint.grammar.encode(), digest_size=16).digest()
        with self._lock:
            if digest in self._good:
                self._good.move_to_end(digest)
                return
        if not may_compile:
            raise UnknownGrammarError
        # Without the lock, which prompts wait for; two threads may both make one.
        tokenizer = self._tokenizer or LLTokenizer(TokenizerWrapper(self._vocabulary))
        self._tokenizer = tokenizer
        self._check(constraint, tokenizer)
        with self._lock:
            self._good[digest] = None
            if len(self._good) > _MAX_GOOD:
                self._good.popitem(last=False)

    def _check(self, constraint: Constraint, tokenizer: LLTokenizer) -> None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(constraint.grammar, limits=limits())
        refused = [each for each in messages if is_error or not each.startswith(_HARMLESS)]
        if refused:
            raise grammar_error(refused[0], constraint.param)
        matcher = compile_grammar(constraint, tokenizer)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(f"'{constraint.param}': no text can match", param=constraint.param)


def compile_grammar(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher of a grammar at its start; raises `InvalidRequestError`."""
    matcher = LLMatcher(tokenizer, constraint.grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise grammar_error(matcher.get_error(), constraint.param)
    return matcher


def limits() -> LLParserLimits:
    """Return the limits of compiling and of each step: llguidance's own ones bound a step to about 20 ms."""
    return LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW, verbose_errors=False)


def too_long(param: str) -> InvalidRequestError:
    """Return the error of a grammar or schema with more than `MAX_CONSTRAINT_CHARS`."""
    return InvalidRequestError(f"'{param}' is longer than {MAX_CONSTRAINT_CHARS} characters", param=param)


def grammar_error(message: str, param: str) -> InvalidRequestError:
    """Return llguidance's message as an error about a request field."""
    if found := _UNIMPLEMENTED.search(message):
        names = found[1].replace('"', "'")
        return InvalidRequestError(f"'{param}': JSON Schema's {names} is not supported", param=param)
    if _TOO_MANY_SYMBOLS in message:
        return GrammarTooLongError(
            f"'{param}': the grammar made of it has too many parts; make it simpler", param=param
        )
    return InvalidRequestError(f"'{param}': {first_lines(message)}", param=param)


def first_lines(message: str) -> str:
    """Return the part of llguidance's message that says what is wrong, without its internal state."""
    text = message.partition("<state>")[0].partition("<backtrace>")[0].strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "…"
