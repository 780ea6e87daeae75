"""llama.cpp's penalties for repeated tokens, in numpy."""

from __future__ import annotations

import numpy as np

from llamaslot.backend.llama.sampling.candidates import ALL, Logits, Which
from llamaslot.base.generation.sampling import Sampling
from llamaslot.base.tokens import Tokens


class Penalties:
    """llama.cpp's penalties for repetition, over a window of the latest tokens.

    llama.cpp's own sampler takes a prompt token by token, with a ctypes call for each on the model thread.
    """

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
        # Limited to the context, because memory is allocated for the window.
        window = n_ctx if sampling.repeat_last_n < 0 else min(sampling.repeat_last_n, n_ctx)
        factors = sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty
        return cls(sampling, window, history, n_vocab) if window and factors != (1.0, 0.0, 0.0) else None

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
