"""Reading text that arrives in pieces.

A parser is written as if the whole text were there: a generator that calls the methods of `Reader` with
`yield from`. They suspend it while the text that has arrived does not decide what comes next, so a decision depends
on the text alone and never on how it was cut into pieces. Characters are read once, and no more than the possible
beginning of a marker stays unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

from llamaslot.base.events import FinishReason

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A computation that yields when it needs more text."""

Emit: TypeAlias = Callable[[str], object]

_WHITESPACE = re.compile(r"\s+")


def beginnings(text: str, shortest: int) -> tuple[str, ...]:
    """Return the beginnings of a marker from which its end is missing, the longest first."""
    return tuple(text[:end] for end in range(len(text) - 1, shortest - 1, -1))


class Markers:
    """Texts to search for; where several begin at the same place the longest is found."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
        self._longest = max(map(len, longest_first), default=0)
        self._beginnings = {text[:end] for text in longest_first for end in range(1, len(text))}
        alternatives = "|".join(map(re.escape, longest_first))
        self.pattern = re.compile(alternatives or r"(?!)")

    def possible(self, text: str, start: int) -> int:
        """Return where the end of `text` may be the beginning of a marker; its length if it cannot be."""
        for position in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[position:] in self._beginnings:
                return position
        return len(text)


class Reader:
    """The text that has arrived and is not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._marks = 0
        self._kept: list[str] = []
        self.end_reason: FinishReason | None = None
        """Why the text ended; None while more may come."""
        self.is_undecided = False
        """True once the end of the text has decided what comes next: more text might have decided otherwise."""

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, reason: FinishReason) -> None:
        """Declare that no more text comes."""
        self.end_reason = reason

    @property
    def has_ended(self) -> bool:
        """True if no more text comes."""
        return self.end_reason is not None

    @property
    def ended_by_itself(self) -> bool:
        """True if the model ended the text, which neither a limit nor a stop string has cut."""
        return self.end_reason == "eos"

    def mark(self) -> int:
        """Keep all text that is read from here on, until `release`; marks may be nested."""
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
        """Remove all marks: what was read will not be needed again."""
        self._marks = 0
        self._kept.clear()

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; nothing at the end."""
        while self._at == len(self._text):
            if self.has_ended:
                self.is_undecided = True
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> str:
        """Read one character, which `peek` has returned."""
        return self._read(self._at + 1)

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read what a repeated character class matches of the text that has arrived; more may come."""
        match = pattern.match(self._text, self._at)
        return self._read(match.end()) if match else ""

    def all(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read as long as a repeated character class matches."""
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
        """Return the first of `texts` that comes next, without reading it; nothing if none does."""
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
                return self._first(texts)
            yield

    def _first(self, texts: Iterable[str]) -> str:
        return next((text for text in texts if self._text.startswith(text, self._at)), "")

    def accept(self, *texts: str) -> Steps[str]:
        """Read and return the first of `texts` that comes next; nothing if none does."""
        found = yield from self.looking_at(*texts)
        return self._read(self._at + len(found))

    def until(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Read up to the first marker and through it, pass the text before it to `emit`, return the marker.

        Returns nothing if the text ends without a marker; the beginning of one at the end is then left for `rest`.
        """
        while True:
            found = markers.pattern.search(self._text, self._at)
            end = markers.possible(self._text, self._at)
            if found is not None and (found.start() < end or self.has_ended):
                self._pass(found.start(), emit)
                return self._read(found.end())
            self._pass(end, emit)
            if self.has_ended:
                self.is_undecided = True
                return ""
            yield

    def rest(self) -> str:
        """Read all that is left of a text that has ended."""
        return self._read(len(self._text)) if self.has_ended else ""

    def fragment(self, *texts: str) -> str:
        """Read what is left of a text that has ended if one of `texts` begins with it; nothing otherwise."""
        left = self._text[self._at :]
        is_fragment = self.has_ended and any(len(left) < len(text) and text.startswith(left) for text in texts)
        return self.rest() if is_fragment else ""

    def has_later(self, text: str) -> bool:
        """Return True if a text is in what has arrived and is not read."""
        return text in self._text[self._at :]

    def unread(self, text: str) -> None:
        """Go back before `text`, which was read last, after any mark that is set."""
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

    def _pass(self, end: int, emit: Emit) -> None:
        if end > self._at:
            emit(self._read(end))

    def _read(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._marks:
            self._kept.append(text)
        return text


class Machine:
    """A reader with the computation that reads from it."""

    def __init__(self, reader: Reader, steps: Steps[T]) -> None:
        self._reader = reader
        self._steps = steps
        self._advance()

    def feed(self, text: str) -> None:
        """Append text and compute as far as it allows."""
        self._reader.feed(text)
        self._advance()

    def end(self, reason: FinishReason = "eos") -> None:
        """End the text and the computation."""
        self._reader.end(reason)
        self._advance()

    def _advance(self) -> None:
        next(self._steps, None)
