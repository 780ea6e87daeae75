"""Compiles grammars by llguidance, with limits and with errors that name what is not supported.

The prompt worker tries each grammar, to refuse it before the request is accepted: it is compiled, and followed for
some tokens. What passes is compiled again in the engine. llguidance cannot be interrupted and recurses without a
limit, so in a server the trial runs in a process of its own (`trial_process.py`).
"""

from __future__ import annotations

import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeAlias

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from llamaslot.base.commands import Constraint
from llamaslot.base.errors import InvalidRequestError

MAX_CONSTRAINT_CHARS = 2**17
"""Characters of a grammar or schema: a text of that length which a schema prescribes takes 0.7 s to follow."""
MAX_ERROR_CHARS = 300
"""Characters of llguidance's messages that a client gets."""
MAX_MASK_EXCESS_S = 0.5
"""CPU time that the masks of one reply may take in all beyond `MASK_S` each.

llguidance bounds the items of a mask, but an item of an ambiguous grammar takes long: `s: s s | s s s | "a"` took
0.7 s for a mask.
"""
MASK_S = 0.05
_MAX_ITEMS_IN_ROW = 10_000
"""Places of a grammar at which a text may be at once; llguidance's 2,000 do for 500 optional properties only."""
_MAX_ITEMS_IN_MASK = 250_000
"""Places in all texts that a mask looks at. 1,000 optional properties take as many, llguidance's 50,000 do for 200.
At the worst they take 1.5 s, once in a reply.
"""
_MAX_LEXER_STATES = 100_000
"""At 1 to 2 KB each."""
_MAX_STEPS = 32
"""Tokens for which a grammar is followed in its trial."""
_WALK_S = 0.2
"""CPU time after which the trial follows the grammar no further."""
_MAX_KNOWN = 1024
SPECIAL_PREFIX = b"\xff"
"""llguidance's mark of tokens that are no text: a grammar allows them by name or id only."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_TOO_MANY_SYMBOLS = "grammar.symbols.len()"
"""Part of the assertion that fails in llguidance at 65,525 symbols, such as of 16,000 optional properties."""
_ONE_OF = "oneOf constraints are not supported"
"""Part of llguidance's message on alternatives that it cannot tell apart, whose advice no client can follow."""
ADVICE = (
    "make it simpler (what costs most: intersections of patterns, nested repetitions such as (a{1,100}){1,100}, "
    "and long chains of references)"
)
_TOO_EXPENSIVE = re.compile("fuel exhausted|grammar. too big|too many (expressions|items|states)", re.IGNORECASE)
"""Messages of llguidance's own limits."""
_HARMLESS = "no tokenizer"
"""Beginning of the warnings about what cannot be checked without a vocabulary."""
_NO_TEXT = "no text can match"
TOO_AMBIGUOUS = "the grammar takes too long to follow, as one does that can read a text in very many ways"


class GrammarTooLongError(InvalidRequestError):
    """The grammar that was made of what a client sent is too long to be compiled."""


class UnknownGrammarError(Exception):
    """The grammar must be compiled to check it. `RequestReader.read` catches this; no client gets it."""


class TrialResult(msgspec.Struct, frozen=True):
    """The outcome of a trial: what the grammar costs, or llguidance's message."""

    error: str = ""
    seconds: float = 0.0
    """CPU time to compile it."""
    n_bytes: int = 0
    """Memory that it takes; 0 if that was not measured."""


Trial: TypeAlias = Callable[[Constraint], TrialResult]
"""Tries a grammar; raises `LlamaslotError` if that ends for another reason than an error of llguidance."""


class Vocabulary:
    """The texts of tokens as llguidance takes them; special ones begin with `SPECIAL_PREFIX`."""

    def __init__(self, tokens: Sequence[bytes], eog: Sequence[int] = (0,)) -> None:
        self.tokens = list(tokens)
        self._eog = list(eog)
        self.bos_token_id = None
        self.eos_token_id = self._eog[0]
        self.special_token_ids: list[int] = []
        ids = {text: token for token, text in enumerate(self.tokens) if len(text) == 1}
        self._of_byte = [ids.get(bytes([byte]), 0) for byte in range(256)]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return a token for each byte (`TokenizerWrapper`)."""
        return [self._of_byte[byte] for byte in (text if isinstance(text, bytes) else text.encode())]

    def tokenizer(self) -> LLTokenizer:
        """Return the tokenizer, a moment later for many tokens."""
        return LLTokenizer(TokenizerWrapper(self), eos_token=self._eog)


class GrammarChecker:
    """Checks constraints, by `trial`, and remembers which passed and which did not; on any thread."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, TrialResult] = OrderedDict()
        """Results of the latest grammars by digest: most requests come with one of a few."""

    def check(self, constraint: Constraint, *, may_compile: bool = True) -> Constraint:
        """Return a constraint with its cost; raises `InvalidRequestError` for one that is invalid or not supported.

        Without `may_compile`, raises `UnknownGrammarError` for one that was not checked before.
        """
        digest = blake2b(constraint.grammar.encode(), digest_size=16).digest()
        with self._lock:
            result = self._known.get(digest)
            if result is not None:
                self._known.move_to_end(digest)
        if result is None:
            if not may_compile:
                raise UnknownGrammarError
            # Without the lock, which prompts wait for; two threads may both try one.
            result = self._trial(constraint)
            with self._lock:
                self._known[digest] = result
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        if result.error:
            raise grammar_error(result.error, constraint.param)
        return msgspec.structs.replace(constraint, seconds=result.seconds, n_bytes=result.n_bytes)


class LocalTrial:
    """Tries grammars on the thread that asks: in tests, and in a process that can be killed.

    `clock` gives the thread's CPU time; without it, time has no limits.
    """

    def __init__(self, vocabulary: Vocabulary, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._tokenizer: LLTokenizer | None = None

    @classmethod
    def of_bytes(cls, special_tokens: Sequence[str], n_tokens: int) -> LocalTrial:
        """Return one for a token for each byte and each control token: all that checking a grammar takes."""
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [SPECIAL_PREFIX + text.encode() for text in special_tokens]
        tokens += [b""] * (n_tokens - len(tokens))
        return cls(Vocabulary(tokens))

    def prepare(self) -> LLTokenizer:
        """Return the tokenizer, made for the first grammar unless it was before."""
        if self._tokenizer is None:
            self._tokenizer = self._vocabulary.tokenizer()
        return self._tokenizer

    def __call__(self, constraint: Constraint) -> TrialResult:
        """Compile a grammar and follow it at random."""
        tokenizer = self.prepare()
        began = self._clock()
        matcher = LLMatcher(tokenizer, constraint.grammar, log_level=0, limits=limits())
        if matcher.is_error():
            return TrialResult(matcher.get_error())
        warnings = [each for each in matcher.get_grammar_warnings() if not each.startswith(_HARMLESS)]
        if warnings:
            return TrialResult(warnings[0])
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return TrialResult(_NO_TEXT)
        seconds = self._clock() - began
        return TrialResult(_follow(matcher, mask, set(tokenizer.eos_tokens), self._clock), seconds)


def _follow(matcher: LLMatcher, mask: bytes, eos: set[int], clock: Callable[[], float]) -> str:
    """Follow a grammar for some tokens, so that one whose masks take too long or fail is refused, not its reply."""
    choice = random.Random(0)
    began = clock()
    excess = 0.0
    for _ in range(_MAX_STEPS):
        tokens = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        # A token that ends the reply would end the trial.
        options = [token for token in choice.choices(tokens, k=8) if token not in eos] if len(tokens) else []
        if not options:
            break
        # As `Matcher` does: the grammar may go on by itself, and fail at that.
        if not matcher.consume_token(int(options[0])) or not matcher.consume_tokens(matcher.compute_ff_tokens()):
            return matcher.get_error()
        if matcher.is_stopped():
            break
        start = clock()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        now = clock()
        excess += max(0.0, now - start - MASK_S)
        if excess > MAX_MASK_EXCESS_S:
            return TOO_AMBIGUOUS
        if now - began > _WALK_S and not excess:
            break
    return ""


def compile_grammar(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher of a grammar at its start; raises `InvalidRequestError`."""
    matcher = LLMatcher(tokenizer, constraint.grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise grammar_error(matcher.get_error(), constraint.param)
    return matcher


def limits() -> LLParserLimits:
    """Return the limits of compiling and of each step."""
    return LLParserLimits(
        max_items_in_row=_MAX_ITEMS_IN_ROW,
        step_max_items=_MAX_ITEMS_IN_MASK,
        max_lexer_states=_MAX_LEXER_STATES,
        verbose_errors=False,
    )


def too_long(param: str) -> InvalidRequestError:
    """Return the error of a grammar or schema with more than `MAX_CONSTRAINT_CHARS`."""
    return InvalidRequestError(f"'{param}' is longer than {MAX_CONSTRAINT_CHARS} characters", param=param)


def grammar_error(message: str, param: str) -> InvalidRequestError:
    """Return llguidance's message as an error about a request field."""
    if found := _UNIMPLEMENTED.search(message):
        names = found[1].replace('"', "'")
        return InvalidRequestError(f"'{param}': JSON Schema's {names} is not supported", param=param)
    if _ONE_OF in message:
        return InvalidRequestError(
            f"'{param}': JSON Schema's 'oneOf' is supported where no value can match two of its alternatives, as "
            "with a required property that has another 'const' in each; otherwise use 'anyOf'",
            param=param,
        )
    if _TOO_MANY_SYMBOLS in message:
        return GrammarTooLongError(
            f"'{param}': the grammar made of it has too many parts; make it simpler", param=param
        )
    advice = f"; {ADVICE}" if _TOO_EXPENSIVE.search(message) else ""
    return InvalidRequestError(f"'{param}': {first_lines(message)}{advice}", param=param)


def first_lines(message: str) -> str:
    """Return the part of llguidance's message that says what is wrong, without its internal state."""
    text = re.split("<(?:state|backtrace|non-verbose)", message, maxsplit=1)[0].strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "…"
