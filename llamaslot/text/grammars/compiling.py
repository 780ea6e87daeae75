"""Compiles grammars with llguidance, with limits and with errors that name what is not supported.

The prompt worker tries each grammar before the request is accepted: it compiles the grammar, and follows it for
some tokens. A grammar that passes is compiled again in the engine. llguidance cannot be interrupted, and its
recursion has no limit, so in a server the trial runs in a separate process (`trial_process.py`).
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
"""Most characters of a grammar or schema. A text of that length which a schema prescribes takes 0.7 s to follow."""
MAX_ERROR_CHARS = 300
"""Most characters of llguidance's messages that a client gets."""
MAX_MASK_EXCESS_S = 0.5
"""Most CPU time by which all masks of one reply together may exceed `MASK_S` each.

llguidance limits the items of a mask, but an item of an ambiguous grammar can take long: a mask of
`s: s s | s s s | "a"` took 0.7 s.
"""
MASK_S = 0.05
"""Usual CPU time of a mask."""
_MAX_ITEMS_IN_ROW = 10_000
"""Most positions in a grammar at which a text can be at the same time. llguidance's default of 2,000 suffices for
only 500 optional properties.
"""
_MAX_ITEMS_IN_MASK = 250_000
"""Most positions, over all texts, that are visited for a mask. 1,000 optional properties take that many;
llguidance's default of 50,000 suffices for 200. In the worst case they take 1.5 s, once in a reply.
"""
_MAX_LEXER_STATES = 100_000
"""Most states of the lexer, of 1 to 2 KB each."""
_MAX_STEPS = 32
"""Most tokens for which a trial follows a grammar."""
_WALK_S = 0.2
"""CPU time after which a trial does not follow the grammar any further."""
_MAX_KNOWN = 1024
"""Most trial results that are remembered."""
SPECIAL_PREFIX = b"\xff"
"""llguidance's prefix of tokens that are not text, which a grammar allows only by name or id."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_TOO_MANY_SYMBOLS = "grammar.symbols.len()"
"""Part of the assertion that fails in llguidance at 65,525 symbols, for example with 16,000 optional properties."""
_ONE_OF = "oneOf constraints are not supported"
"""Part of llguidance's message about alternatives that it cannot tell apart. Clients cannot follow its advice."""
ADVICE = (
    "simplify it (most expensive are intersections of patterns, nested repetitions such as (a{1,100}){1,100}, "
    "and long chains of references)"
)
_TOO_EXPENSIVE = re.compile("fuel exhausted|grammar. too big|too many (expressions|items|states)", re.IGNORECASE)
"""Messages about llguidance's own limits."""
_HARMLESS = "no tokenizer"
"""Prefix of warnings about what cannot be checked without a vocabulary."""
_NO_TEXT = "no text can match"
TOO_AMBIGUOUS = "the grammar takes too long to follow, probably because it can match a text in very many ways"


_LIMITS = LLParserLimits(
    max_items_in_row=_MAX_ITEMS_IN_ROW,
    step_max_items=_MAX_ITEMS_IN_MASK,
    max_lexer_states=_MAX_LEXER_STATES,
    verbose_errors=False,
)
"""Limits of compiling and of each step."""


class GrammarTooLongError(InvalidRequestError):
    """The grammar made from a request is too long to be compiled."""


class UnknownGrammarError(Exception):
    """The grammar must be compiled to be checked. Caught by `RequestReader.read`, so that no client gets it."""


class TrialResult(msgspec.Struct, frozen=True):
    """The outcome of a trial: the cost of the grammar, or llguidance's message."""

    error: str = ""
    seconds: float = 0.0
    """CPU time to compile the grammar."""
    n_bytes: int = 0
    """Memory of the compiled grammar; 0 if not measured."""


Trial: TypeAlias = Callable[[Constraint], TrialResult]
"""Tries a grammar; raises `LlamaslotError` if that fails for another reason than an error by llguidance."""


class Vocabulary:
    """Texts of tokens in the form that llguidance needs. Special ones begin with `SPECIAL_PREFIX`."""

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
        """Return the tokenizer, which takes a moment for many tokens."""
        return LLTokenizer(TokenizerWrapper(self), eos_token=self._eog)


class GrammarChecker:
    """Checks constraints with `trial`, and remembers the results. Usable on any thread."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, TrialResult] = OrderedDict()
        """Results of the latest grammars by digest, because most requests use one of a few."""

    def check(self, constraint: Constraint, *, may_compile: bool = True) -> Constraint:
        """Return a constraint with its cost; raises `InvalidRequestError` if it is invalid or not supported.

        Without `may_compile`, raises `UnknownGrammarError` if it has not been checked before.
        """
        digest = blake2b(constraint.grammar.encode(), digest_size=16).digest()
        with self._lock:
            result = self._known.get(digest)
            if result is not None:
                self._known.move_to_end(digest)
        if result is None:
            if not may_compile:
                raise UnknownGrammarError
            # Not under the lock, for which other prompts wait. So two threads may try the same grammar.
            result = self._trial(constraint)
            with self._lock:
                self._known[digest] = result
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        if result.error:
            raise grammar_error(result.error, constraint.param)
        return msgspec.structs.replace(constraint, seconds=result.seconds, n_bytes=result.n_bytes)


class LocalTrial:
    """Tries grammars on the calling thread: in tests, and in a process that can be killed.

    `clock` returns the thread's CPU time; without it there are no limits of time.
    """

    def __init__(self, vocabulary: Vocabulary, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._tokenizer: LLTokenizer | None = None

    def create_tokenizer(self) -> LLTokenizer:
        """Return the tokenizer, created at the first call."""
        if self._tokenizer is None:
            self._tokenizer = self._vocabulary.tokenizer()
        return self._tokenizer

    def __call__(self, constraint: Constraint) -> TrialResult:
        """Compile a grammar, and follow it with random tokens."""
        tokenizer = self.create_tokenizer()
        began = self._clock()
        matcher = LLMatcher(tokenizer, constraint.grammar, log_level=0, limits=_LIMITS)
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
    """Follow a grammar for some tokens, to refuse one whose masks take too long or fail before a reply begins."""
    choice = random.Random(0)
    began = clock()
    excess = 0.0
    for _ in range(_MAX_STEPS):
        tokens = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        # Without tokens that end the reply, which would end the trial.
        options = [token for token in choice.choices(tokens, k=8) if token not in eos] if len(tokens) else []
        if not options:
            break
        # Fast-forward like `Matcher`: that may fail as well.
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
    """Return a matcher at the start of a grammar; raises `InvalidRequestError`."""
    matcher = LLMatcher(tokenizer, constraint.grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise grammar_error(matcher.get_error(), constraint.param)
    return matcher


def too_long(param: str) -> InvalidRequestError:
    """Return the error for a grammar or schema of more than `MAX_CONSTRAINT_CHARS`."""
    return InvalidRequestError(f"'{param}' is longer than {MAX_CONSTRAINT_CHARS} characters", param=param)


def grammar_error(message: str, param: str) -> InvalidRequestError:
    """Return llguidance's message as an error about a request field."""
    if found := _UNIMPLEMENTED.search(message):
        names = found[1].replace('"', "'")
        return InvalidRequestError(f"'{param}': JSON Schema's {names} is not supported", param=param)
    if _ONE_OF in message:
        return InvalidRequestError(
            f"'{param}': JSON Schema's 'oneOf' is supported only if no value can match two of its alternatives, "
            "for example if a required property has a different 'const' in each; otherwise use 'anyOf'",
            param=param,
        )
    if _TOO_MANY_SYMBOLS in message:
        return GrammarTooLongError(f"'{param}': its grammar has too many parts; simplify it", param=param)
    advice = f"; {ADVICE}" if _TOO_EXPENSIVE.search(message) else ""
    return InvalidRequestError(f"'{param}': {first_lines(message)}{advice}", param=param)


def first_lines(message: str) -> str:
    """Return llguidance's message without its internal state."""
    text = re.split("<(?:state|backtrace|non-verbose)", message, maxsplit=1)[0].strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "…"
