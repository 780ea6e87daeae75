"""Penalties for repetitions, in numpy as in llama.cpp: for repeated tokens, and DRY.

DRY (Don't Repeat Yourself) is a penalty for tokens that would continue a repetition:

    window          a b c c b c y a b c
    repeated so far     3 1   2              how many tokens up to here equal those up to the window's end
    continued by          c b   y            with penalties of base**(3 - allowed), base**(1 - allowed), ...

llama.cpp's own samplers take a prompt token by token, with a ctypes call for each, and that for DRY searches the
whole vocabulary for each sequence breaker of each request, all on the model thread (fact 30). Here the vocabulary
is read once, and a new token updates the whole window in one numpy operation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamaslot.backend.llama.sampling.candidates import ALL, Logits, Which
from llamaslot.backend.llama.vocab import LlamaVocab
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.tokens import Tokens

_MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20
"""llama.cpp's limits for one sequence breaker."""
_LOG_FLOAT_MAX = np.float32(88.7228391)
_MAX_KEPT = 16
"""Most lists of sequence breakers whose tokens are cached."""


class Penalties:
    """llama.cpp's penalties for repeated tokens, over a window of the latest ones."""

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
        """Occurrences of each of `_tokens` in the window. Both have `_n_different` entries, in any order."""
        self._places = {token: place for place, token in enumerate(found.tolist())}
        self._window = np.zeros(window, dtype=np.int32)
        """A ring buffer."""
        self._window[: len(latest)] = latest
        self._n = len(latest)

    @classmethod
    def of(cls, sampling: Sampling, *, history: Tokens, n_ctx: int, n_vocab: int) -> Penalties | None:
        """Return the penalties of a request; None if they have no effect."""
        window = penalty_window(sampling, n_ctx)
        return cls(sampling, window, history, n_vocab) if window else None

    @property
    def tokens(self) -> Tokens:
        """Distinct tokens in the window."""
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

    def adjusted(self, logits: Logits, which: Which = ALL) -> Logits:
        """Apply the penalties to the logits of `tokens`, or of `which` of them."""
        logits = np.where(logits <= 0, logits * self._repeat, logits / self._repeat)
        return logits - (self._counts[: self._n_different][which] * self._frequency + self._presence)

    def _remove(self, token: int) -> None:
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place]:
            return
        last = self._n_different = self._n_different - 1
        self._tokens[place], self._counts[place] = self._tokens[last], self._counts[last]
        self._places[int(self._tokens[place])] = place
        del self._places[token]


def penalty_window(sampling: Sampling, n_ctx: int) -> int:
    """Return how many of the latest tokens the penalties count; 0 if they have no effect."""
    if (sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0):
        return 0
    # Limited to the context, because memory is allocated for the window.
    return n_ctx if sampling.repeat_last_n < 0 else min(sampling.repeat_last_n, n_ctx)


@dataclass(frozen=True, slots=True)
class Breakers:
    """Tokens of sequence breakers, across which no repetition extends."""

    is_single: npt.NDArray[np.bool_]
    """For each token, True if it contains a whole breaker."""
    is_head: npt.NDArray[np.bool_]
    """For each token, True if a breaker begins in it."""
    tails: dict[int, tuple[tuple[int, ...], ...]]
    """Tokens that complete a breaker, one sequence of which must follow, by the token in which it begins."""


class BreakerIndex:
    """Finds the tokens of sequence breakers in a vocabulary, whose texts are read at the first use."""

    def __init__(self, vocab: LlamaVocab) -> None:
        self._vocab = vocab
        self._text: npt.NDArray[np.uint8] | None = None
        self._ends: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """End of each token's text in `_text`."""
        self._lengths: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._by_last: dict[int, npt.NDArray[np.int64]] = {}
        """Tokens by the last byte of their text."""
        self._kept: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()

    def of(self, breakers: tuple[str, ...]) -> Breakers:
        """Return the tokens of a list of breakers."""
        found = self._kept.pop(breakers, None)
        if found is None:
            found = self._find([data for each in breakers if (data := _bytes(each))])
            if len(self._kept) >= _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept[breakers] = found
        return found

    def _find(self, breakers: list[bytes]) -> Breakers:
        if self._text is None:
            self._read(self._vocab.texts())
        is_single = np.zeros(self._vocab.n_tokens, dtype=np.bool_)
        tails: dict[int, list[tuple[int, ...]]] = {}
        for breaker in breakers:
            contains = self._containing(breaker)
            is_single[contains] = True
            whole = set(contains.tolist())
            # In llama.cpp's order: from the longest beginning of the breaker to the shortest.
            for n in range(len(breaker) - 1, 0, -1):
                heads = [token for token in self._ending_with(breaker[:n]).tolist() if token not in whole]
                if not heads:
                    continue
                tail = tuple(self._tokens_of(breaker[n:]))
                for token in heads:
                    if tail not in tails.setdefault(token, []):
                        tails[token].append(tail)
        is_head = is_single.copy()
        is_head[list(tails)] = True
        return Breakers(is_single, is_head, {token: tuple(each) for token, each in tails.items()})

    def _read(self, texts: list[bytes]) -> None:
        self._text = np.frombuffer(b"".join(texts), dtype=np.uint8)
        self._lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        self._ends = self._lengths.cumsum()
        written = np.flatnonzero(self._lengths)
        last = self._text[self._ends[written] - 1]
        self._by_last = {byte: written[last == byte] for byte in set(last.tolist())}

    def _containing(self, breaker: bytes) -> npt.NDArray[np.int64]:
        """Return the tokens whose text contains a breaker."""
        assert self._text is not None
        at = np.flatnonzero(self._text[: len(self._text) - len(breaker) + 1] == breaker[0])
        for i, byte in enumerate(breaker[1:], start=1):
            at = at[self._text[at + i] == byte]
        tokens = np.searchsorted(self._ends, at, side="right")
        return np.unique(tokens[at + len(breaker) <= self._ends[tokens]])

    def _ending_with(self, part: bytes) -> npt.NDArray[np.int64]:
        """Return the tokens whose text ends with a beginning of a breaker."""
        assert self._text is not None
        tokens = self._by_last.get(part[-1], self._ends[:0])
        tokens = tokens[self._lengths[tokens] >= len(part)]
        for i, byte in enumerate(reversed(part[:-1]), start=2):
            tokens = tokens[self._text[self._ends[tokens] - i] == byte]
        return tokens

    def _tokens_of(self, part: bytes) -> list[int]:
        text = part.decode(errors="replace")
        tokens: list[int] = self._vocab.tokenize(text, add_special=False, parse_special=False).tolist()
        return tokens[:_MAX_TAIL_TOKENS]


class Dry:
    """DRY over a window of the latest tokens."""

    def __init__(self, sampling: Sampling, window: int, history: Tokens, breakers: Breakers) -> None:
        self._multiplier = np.float32(sampling.dry_multiplier)
        self._base = float(np.float32(sampling.dry_base))
        self._n_allowed = sampling.dry_allowed_length
        log_base = np.log(np.float32(sampling.dry_base))
        self._max_exponent = int(_LOG_FLOAT_MAX / log_base) if np.float32(sampling.dry_base) > 1.000001 else 0
        self._breakers = breakers
        self._window = window
        latest = history[-window:]
        self._n = len(latest)
        self._tokens = np.zeros(2 * window, dtype=np.int32)
        self._tokens[: self._n] = latest
        """The window is the end of the first `_n` tokens. Twice as long, so that tokens are rarely moved."""
        self._repeated = np.zeros(2 * window, dtype=np.int32)
        self._repeated[: self._n] = _repeated(latest.tolist())
        """For each token except the last, how many tokens up to it equal those up to the last one."""
        self._changed: tuple[Tokens, Logits] | None = None

    @classmethod
    def of(cls, sampling: Sampling, *, history: Tokens, n_ctx: int, index: BreakerIndex) -> Dry | None:
        """Return the DRY sampler of a request; None if it is off."""
        last_n = sampling.dry_penalty_last_n
        window = n_ctx if last_n < 0 else min(last_n, n_ctx)
        if not window or sampling.dry_multiplier == 0 or sampling.dry_base < 1:
            return None
        return cls(sampling, window, history, index.of(sampling.dry_sequence_breakers))

    @property
    def tokens(self) -> Tokens:
        """Tokens that would continue a repetition."""
        return self._penalties()[0]

    def adjusted(self, logits: Logits, which: Which = ALL) -> Logits:
        """Subtract the penalties from the logits of `tokens`, or of `which` of them."""
        return logits - self._penalties()[1][which]

    def accept(self, token: int) -> None:
        """Add a token to the window."""
        if self._n == len(self._tokens):
            for data in (self._tokens, self._repeated):
                data[: self._window] = data[-self._window :]
            self._n = self._window
        n = self._n
        before = np.zeros(n, dtype=np.int32)
        before[1:] = self._repeated[: max(n - 1, 0)]
        self._repeated[:n] = (before + 1) * (self._tokens[:n] == token)
        self._tokens[n] = token
        self._n += 1
        self._changed = None

    def _penalties(self) -> tuple[Tokens, Logits]:
        if self._changed is None:
            self._changed = self._computed()
        return self._changed

    def _computed(self) -> tuple[Tokens, Logits]:
        nothing = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        start = max(self._n - self._window, 0)
        window, n = self._tokens[start : self._n], self._n - start
        if n <= self._n_allowed or (most := self._n_since_break(window)) < self._n_allowed:
            return nothing
        # A repetition lies within the window, and after the last breaker.
        repeated = np.minimum(self._repeated[start : self._n - 1], np.arange(1, n)).clip(max=most)
        at = np.flatnonzero(repeated >= self._n_allowed)
        tokens, places = np.unique(window[at + 1], return_inverse=True)
        longest = np.zeros(len(tokens), dtype=np.int64)
        np.maximum.at(longest, places, repeated[at])
        is_penalized = ~self._breakers.is_single[tokens]
        tokens, exponents = tokens[is_penalized], longest[is_penalized] - self._n_allowed
        if self._max_exponent > 0:
            exponents = exponents.clip(max=self._max_exponent)
        with np.errstate(over="ignore"):
            return tokens, (float(self._multiplier) * self._base**exponents).astype(np.float32)

    def _n_since_break(self, window: Tokens) -> int:
        """Return how many tokens follow the last sequence breaker."""
        breakers, n = self._breakers, len(window)
        heads: list[int] = np.flatnonzero(breakers.is_head[window])[::-1].tolist()
        for at in heads:
            token, n_after = int(window[at]), n - 1 - at
            matches = [0] if breakers.is_single[token] else []
            for tail in breakers.tails.get(token, ()):
                if len(tail) <= n_after and tuple(window[at + 1 : at + 1 + len(tail)].tolist()) == tail:
                    matches.append(len(tail))
            if matches:
                return n_after - max(matches)
        return n


def _bytes(breaker: str) -> bytes:
    # llama.cpp takes a C string, which ends at the first zero byte.
    return breaker.encode(errors="replace").partition(b"\0")[0][:_MAX_BREAKER_BYTES]


def _repeated(tokens: list[int]) -> list[int]:
    """Return, for each token except the last, how many tokens up to it equal those up to the last (Z-algorithm)."""
    n = len(tokens)
    reverse = tokens[::-1]
    found = [0] * n
    left = right = 0
    """The match [left, right) of the reverse with its own beginning that reaches furthest."""
    for k in range(1, n):
        length = min(found[k - left], right - k) if k < right else 0
        while k + length < n and reverse[length] == reverse[k + length]:
            length += 1
        found[k] = length
        if k + length > right:
            left, right = k, k + length
    found.reverse()
    return found
