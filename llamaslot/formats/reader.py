"""Reading text that arrives in pieces.

A parser is a generator that calls the methods of `Reader` with `yield from`, written as if the whole text were
there. The methods suspend it while the text so far does not decide what comes next, so decisions depend only on the
text, never on how it was split into pieces. Characters are read once, and at most the possible beginning of a
marker stays unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

from llamaslot.base.events import FinishReason

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A generator that yields when it needs more text."""

Emit: TypeAlias = Callable[[str], object]

_WHITESPACE = re.compile(r"\s+")


def beginnings(text: str, shortest: int) -> tuple[str, ...]:
    """Return the proper prefixes of a marker with at least `shortest` characters, longest first."""
    return tuple(text[:end] for end in range(len(text) - 1, shortest - 1, -1))


class Markers:
    """Texts to search for; if several match at the same position, the longest is found."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
        self._longest = max(map(len, longest_first), default=0)
        self._beginnings = {text[:end] for text in longest_first for end in range(1, len(text))}
        alternatives = "|".join(map(re.escape, longest_first))
        self.pattern = re.compile(alternatives or r"(?!)")

    def possible(self, text: str, start: int) -> int:
        """Return the position from which the end of `text` may be the beginning of a marker; its length if none."""
        for position in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[position:] in self._beginnings:
                return position
        return len(text)


class Reader:
    """The text that has arrived and has not been read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._marks = 0
        self._kept: list[str] = []
        self.end_reason: FinishReason | None = None
        """Why the text ended; None while more may come."""
        self.is_undecided = False
        """True if the last decision was made only because the text ended: more text might have changed it."""

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def has_ended(self) -> bool:
        """True once the text has ended."""
        return self.end_reason is not None

    @property
    def ended_by_itself(self) -> bool:
        """True if the model ended the text itself; False if a limit or a stop string cut it."""
        return self.end_reason == "eos"

    def mark(self) -> int:
        """Keep all text read from here on until `release`; marks may be nested."""
        self._marks += 1
        return len(self._kept)

    def release(self, mark: int) -> str:
        """Return the text read since the mark, unless `unmark` was called."""
        text = "".join(self._kept[mark:])
        self._marks = max(self._marks - 1, 0)
        if not self._marks:
            self._kept.clear()
        return text

    def unmark(self) -> None:
        """Remove all marks: the text read so far will not be needed again."""
        self._marks = 0
        self._kept.clear()

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        while self._at == len(self._text):
            if self.has_ended:
                self.is_undecided = True
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> str:
        """Read one character, the one that `peek` returned."""
        return self._read(self._at + 1)

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read matching characters that have arrived; more may come. `pattern` repeats one character class."""
        match = pattern.match(self._text, self._at)
        return self._read(match.end()) if match else ""

    def all(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read all matching characters, waiting for more text if needed. `pattern` repeats one character class."""
        found: list[str] = []
        while True:
            text = self.run(pattern)
            found.append(text)
            if self._at < len(self._text):
                return "".join(found)
            if self.has_ended:
                self.is_undecided = True
                return "".join(found)
            yield

    def whitespace(self) -> Steps[str]:
        """Read whitespace."""
        return (yield from self.all(_WHITESPACE))

    def looking_at(self, *texts: str) -> Steps[str]:
        """Return the first of `texts` that comes next, without reading it; empty if none does."""
        while True:
            undecided = False
            for text in texts:
                if self._text.startswith(text, self._at) and not undecided:
                    return text
                n_arrived = len(self._text) - self._at
                if n_arrived < len(text) and text.startswith(self._text[self._at :]):
                    undecided = True
            if not undecided:
                return ""
            if self.has_ended:
                self.is_undecided = True
                return next((text for text in texts if self._text.startswith(text, self._at)), "")
            yield

    def accept(self, *texts: str) -> Steps[str]:
        """Read and return the first of `texts` that comes next; empty if none does."""
        found = yield from self.looking_at(*texts)
        return self._read(self._at + len(found))

    def until(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Read through the next marker: pass the text before it to `emit` and return the marker.

        Returns an empty string if the text ends without a marker; `rest` then returns a partial marker at its end.
        """
        while True:
            found = markers.pattern.search(self._text, self._at)
            end = markers.possible(self._text, self._at)
            if found is not None and found.start() >= end and not self.has_ended:
                found = None  # It may become a longer marker.
            end = end if found is None else found.start()
            if end > self._at:
                emit(self._read(end))
            if found is not None:
                return self._read(found.end())
            if self.has_ended:
                self.is_undecided = True
                return ""
            yield

    def rest(self) -> str:
        """Read the rest of a text that has ended."""
        return self._read(len(self._text)) if self.has_ended else ""

    def fragment(self, *texts: str) -> str:
        """Read the rest of a text that has ended if it is the beginning of one of `texts`; otherwise return ""."""
        left = self._text[self._at :]
        is_fragment = self.has_ended and any(len(left) < len(text) and text.startswith(left) for text in texts)
        return self.rest() if is_fragment else ""

    def has_later(self, text: str) -> bool:
        """Return True if the unread text contains `text`."""
        return text in self._text[self._at :]

    def unread(self, text: str) -> None:
        """Go back before `text`, which must be the text read last and lie after any mark that is set."""
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:
            self._text, self._at = text + self._text[self._at :], 0
        self.is_undecided = False
        n_left = len(text) if self._marks else 0
        while n_left:
            last = self._kept.pop()
            if len(last) > n_left:
                self._kept.append(last[:-n_left])
            n_left -= min(n_left, len(last))

    def _read(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._marks:
            self._kept.append(text)
        return text


class Machine:
    """Drives a generator that reads from a `Reader`."""

    def __init__(self, reader: Reader, steps: Steps[T]) -> None:
        self._reader = reader
        self._steps = steps
        self._advance()

    def feed(self, text: str) -> None:
        """Append text and run the generator until it needs more."""
        self._reader.feed(text)
        self._advance()

    def end(self, reason: FinishReason = "eos") -> None:
        """End the text and run the generator to its end."""
        self._reader.end_reason = reason
        self._advance()

    def _advance(self) -> None:
        next(self._steps, None)
