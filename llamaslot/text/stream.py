"""The bytes of generated tokens as text that may be sent at once.

What `TextStream` gives out never has to be taken back: no part of a character, no part of a stop string, nothing
that could still become one. It must never hold back more than that, and never look at text twice.

Generation ends with the first character that completes a stop string; if several are complete there, the longest
is the one that was hit. How the text was cut into tokens makes no difference. llama-server looks once a token and
takes the leftmost stop string in sight, which is the same wherever a token completes only one.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Decodes UTF-8 and looks for stop strings, piece by piece; empty stop strings are ignored."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; from then on there is no more of it."""
        return self._stopped

    def push(self, piece: bytes) -> str:
        """The text that is safe to send now that `piece` is there; invalid UTF-8 as U+FFFD."""
        return self._release(self._decoder.decode(piece))

    def flush(self) -> str:
        """The end of generation: everything held back, an incomplete character as U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        """All text up to the first character of a stop string, complete or possible."""
        if not self._matchers:
            return text
        if self._stopped is not None:
            return ""
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if complete:
                self._stopped = max(complete, key=len)
                self._held = ""
                return pending[: end - len(self._stopped)]
        safe = len(pending) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = pending[safe:]
        return pending[:safe]


class _Matcher:
    """Knuth-Morris-Pratt: how much of one stop string the text seen so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0]
        """Per length - 1: the longest proper prefix of that part of `stop` that is also its suffix."""
        for char in stop[1:]:
            self._borders.append(self._after(self._borders[-1], char))

    def advance(self, char: str) -> bool:
        """Take in the next character; whether `stop` is complete. Not to be called after that."""
        self.matched = self._after(self.matched, char)
        return self.matched == len(self.stop)

    def _after(self, matched: int, char: str) -> int:
        """The length matched once `char` follows a match of length `matched`."""
        while matched and self.stop[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == char)
