"""Incremental decoding of generated tokens into text that can be streamed, up to a stop string.

Text that `TextStream` has returned stays valid: it contains no part of a character, of a stop string, or of
anything that could still become one. It holds back no more than that, and reads each character once.

Generation ends with the first character that completes a stop string; of several that are complete there, the
longest one is reported. How the text is divided into tokens makes no difference. llama-server searches once a token
and takes the leftmost stop string, which is the same wherever a token completes only one.

With `n_indent` it also ends before a line, but for the first one, whose text begins with fewer spaces and tabs; the
spaces and tabs of that line are kept, as in llama-server.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Decodes UTF-8 and searches for stop strings; empty ones are ignored."""

    def __init__(self, stops: Sequence[str], n_indent: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops) if stop]
        self._margin = _Margin(n_indent) if n_indent > 0 else None
        self._held = ""
        self.n_decoded = 0
        """Characters that all tokens so far decode to, sent or not."""
        self.stopped: str | None = None
        """The stop string that ended the text; `push` returns nothing from then on."""
        self.is_cut = False
        """True if the text ended at a line that is not indented enough."""

    def push(self, piece: bytes) -> str:
        """Add the bytes of a token and return the text that can be sent now; invalid UTF-8 becomes U+FFFD."""
        text = self._decoder.decode(piece)
        self.n_decoded += len(text)
        return "" if self.is_cut else self._within_margin(self._release(text))

    def flush(self) -> str:
        """End the text: return everything held back, an incomplete character as U+FFFD."""
        if self.is_cut:
            return ""
        text = self._within_margin(self._release(self._decoder.decode(b"", final=True)) + self._held)
        self._held = ""
        return text

    def _within_margin(self, text: str) -> str:
        """Return the text before a line that is not indented enough."""
        if self._margin is None:
            return text
        n = self._margin.n_kept(text)
        if n < len(text):
            self.is_cut, self.stopped = True, None
        return text[:n]

    def _release(self, text: str) -> str:
        """Return all text before the first complete or possible stop string."""
        if not self._matchers:
            return text
        if self.stopped is not None:
            return ""
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if complete:
                self.stopped = max(complete, key=len)
                self._held = ""
                return pending[: end - len(self.stopped)]
        safe = len(pending) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = pending[safe:]
        return pending[:safe]


class _Margin:
    """Finds the first line that begins with fewer than `least` spaces and tabs."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._n_blank: int | None = None
        """Spaces and tabs so far at the beginning of a line; None in a line's text, and in the first line."""

    def n_kept(self, text: str) -> int:
        """Return how many of the next characters may be kept."""
        for i, char in enumerate(text):
            if self._n_blank is not None:
                if char in " \t":
                    self._n_blank += 1
                elif self._n_blank < self._least:
                    return i
                else:
                    self._n_blank = None
            if char == "\n":
                self._n_blank = 0
        return len(text)


class _Matcher:
    """Knuth-Morris-Pratt: the length of the longest beginning of a stop string that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0]
        """Per length - 1: the longest proper prefix of that part of `stop` that is also its suffix."""
        for char in stop[1:]:
            self._borders.append(self._after(self._borders[-1], char))

    def advance(self, char: str) -> bool:
        """Add the next character; True if `stop` is complete, after which this must not be called."""
        self.matched = self._after(self.matched, char)
        return self.matched == len(self.stop)

    def _after(self, matched: int, char: str) -> int:
        """Return the length matched after `char` follows a match of length `matched`."""
        while matched and self.stop[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == char)
