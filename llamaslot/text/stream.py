"""Incremental decoding of generated tokens to text that can be streamed, up to a stop string.

Text that `TextStream` has returned is final: it contains no part of a character or of a stop string, nor anything
that could still become one. Nothing else is held back, and each character is read once.

Generation ends with the first character that completes a stop string; if several are complete there, the longest is
reported. The division of the text into tokens makes no difference. llama-server searches once per token and takes
the leftmost stop string, which gives the same result if a token completes only one.

With `n_indent` generation also ends before a line, other than the first, that is indented by fewer spaces and tabs.
That line's spaces and tabs are kept, as in llama-server.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Decodes UTF-8 and searches for stop strings. Empty stop strings are ignored."""

    def __init__(self, stops: Sequence[str], n_indent: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops) if stop]
        self._margin = _Margin(n_indent) if n_indent > 0 else None
        self._held = ""
        self.n_decoded = 0
        """Number of characters decoded so far, whether or not they were returned."""
        self.stopped: str | None = None
        """The stop string that ended the text. `push` returns nothing after that."""
        self.is_cut = False
        """True if the text ended at a line that is not indented enough."""

    def push(self, piece: bytes) -> str:
        """Add the bytes of a token, and return the text that can be sent now. Invalid UTF-8 becomes U+FFFD."""
        text = self._decoder.decode(piece)
        self.n_decoded += len(text)
        return "" if self.is_cut else self._within_margin(self._release(text))

    def flush(self) -> str:
        """End the text, and return everything held back. An incomplete character becomes U+FFFD."""
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
        """Return the text before the first complete or possible stop string."""
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
        """Spaces and tabs at the start of the line so far; None after its indentation, and in the first line."""

    def n_kept(self, text: str) -> int:
        """Return how many characters of the next text may be kept."""
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
    """Knuth-Morris-Pratt search: the length of the longest prefix of a stop string with which the text ends."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0]
        """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
        for char in stop[1:]:
            self._borders.append(self._after(self._borders[-1], char))

    def advance(self, char: str) -> bool:
        """Add the next character; returns True if `stop` is complete, after which this must not be called again."""
        self.matched = self._after(self.matched, char)
        return self.matched == len(self.stop)

    def _after(self, matched: int, char: str) -> int:
        """Return the length matched after `char` follows a match of length `matched`."""
        while matched and self.stop[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == char)
