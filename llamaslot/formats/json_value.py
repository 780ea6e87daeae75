"""Copying a value that a model writes as JSON, or almost JSON, into valid JSON.

Valid JSON is copied as it arrives. Common mistakes of models are corrected on the way: line breaks in strings,
wrong escapes, single quotes, Python's literals and tuples, names without quotes, superfluous and missing commas,
missing brackets, whitespace that JSON does not allow. All open brackets are closed at a character that cannot
belong to the value, or if the model ends its text after a complete value. If the text ends inside a value, or a
limit cuts it, nothing is closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum, auto

from llamaslot.formats.message import Output
from llamaslot.formats.reader import Emit, Reader, Steps

QUOTES = ('"', "'")
PYTHON_QUOTES = ('"""', "'''", '"', "'")

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_NO_JSON_WHITESPACE = re.compile(r"[^\S \t\n\r]")
_WORD = re.compile(r"[^\s,:\[\]{}()\"'<>;=]+")
_NAME = re.compile(r"[^\r\n,:\[\]{}()\"'<>;=]+")
"""A name without quotes, which may contain spaces."""
_NAME_BEFORE_COLON = re.compile(r"[^\r\n,:{}=<]+")
"""A name in a notation that never quotes names: JSON's quotes and brackets belong to it, as in `filter["a"]`."""
_PLAIN = {first: re.compile(rf'[^{first}"\\\x00-\x1f]+') for first in "\"'<"}
"""Characters of a string that can be copied unchanged, by the first character of its closing quote."""
_HEX = re.compile(r"[0-9a-fA-F]")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_PYTHON_INTEGER = re.compile(r"[+-]?[0-9]+")
_PYTHON_FLOAT = re.compile(r"[+-]?(?:[0-9]{1,300}\.[0-9]*|\.[0-9]+)")


class _Expected(Enum):
    VALUE = auto()
    KEY = auto()
    MORE = auto()
    """A comma or a closing bracket, after a value."""


class ValueCopier:
    """Copies one value to `emit`.

    `quotes` are the quotes of strings. Without `escapes`, a backslash in a string is an ordinary character.
    """

    def __init__(self, reader: Reader, emit: Emit, *, quotes: Sequence[str] = QUOTES, escapes: bool = True) -> None:
        self._reader = reader
        self._emit = emit
        self._quotes = tuple(quotes)
        self._escapes = escapes
        self._name = _NAME if escapes else _NAME_BEFORE_COLON
        self._open: list[str] = []
        self._expected = _Expected.VALUE
        self._separator: list[str] = []
        """Whitespace and comma that were read, copied only if another value follows."""
        self._in_string = False
        self._done = False
        self.was_closed = False
        """True if the model ended the text where only closing brackets were missing."""

    def copy(self) -> Steps[bool]:
        """Copy the value; return False if the text ends inside it."""
        while not self._done:
            self._separator.append((yield from self._reader.whitespace()))
            char = yield from self._reader.peek()
            if not char:
                if not self._reader.ended_by_itself or self._expected is not _Expected.MORE:
                    return False
                self.was_closed = True
                self.close()
                return True
            match self._expected:
                case _Expected.VALUE:
                    ended = yield from self._value(char)
                case _Expected.KEY:
                    ended = yield from self._key(char)
                case _Expected.MORE:
                    ended = yield from self._more(char)
            if ended:
                return False
        return True

    def close(self) -> None:
        """Close all open brackets, as if the value ended here."""
        if self._in_string:
            self._emit('"')
        elif self._open and self._open[-1] == "}" and self._expected is _Expected.VALUE:
            self._emit("null")
        for closer in reversed(self._open):
            self._emit(closer)
        self._open.clear()
        self._done = True

    def _value(self, char: str) -> Steps[bool]:
        """Copy a scalar or the opening bracket of a value; return True if the text ended."""
        if quote := (yield from self._reader.accept(*self._quotes)):
            self._flush()
            self._emit('"')
            self._in_string = True
            if not (yield from copy_string(self._reader, quote, self._emit, escapes=self._escapes)):
                return True
            self._in_string = False
            self._emit('"')
            self._after_value()
        elif self._reader.fragment(*self._quotes):
            return True
        elif char in _CLOSERS:
            self._reader.skip()
            self._flush()
            self._emit("{" if char == "{" else "[")
            self._open.append("}" if char == "{" else "]")
            self._expected = _Expected.KEY if char == "{" else _Expected.VALUE
        elif self._open and char in ",}])":
            if self._open[-1] == "}":
                self._flush()
                self._emit("null")
                self._expected = _Expected.MORE
            elif char == ",":
                self._reader.skip()
            else:
                self._expected = _Expected.MORE
        else:
            word = yield from self._reader.all(_WORD)
            if not word:
                self.close()
            elif not (yield from self._reader.peek()) and not (word in _LITERALS and self._reader.ended_by_itself):
                return True  # The word may be cut.
            else:
                self._flush()
                self._emit(_scalar(word))
                self._after_value()
        return False

    def _key(self, char: str) -> Steps[bool]:
        if char in "}])":
            self._expected = _Expected.MORE
            return False
        if char == ",":
            self._reader.skip()
            return False
        raw: list[str] = []
        if quote := (yield from self._reader.accept(*self._quotes)):
            if not (yield from copy_string(self._reader, quote, raw.append, escapes=self._escapes)):
                return True
        else:
            name = yield from self._reader.all(self._name)
            raw.append(_inner(json.dumps(name.rstrip(), ensure_ascii=False)))
        yield from self._reader.whitespace()
        colon = yield from self._reader.accept(":", "=")
        if not colon and not (yield from self._reader.peek()):
            return True
        if colon and raw != [""]:
            self._flush()
            self._emit(f'"{"".join(raw)}":')
            self._expected = _Expected.VALUE
        else:
            self.close()
        return False

    def _more(self, char: str) -> Steps[bool]:
        closer = "]" if char == ")" else char
        if char == ",":
            self._separator.append(self._reader.skip())
            self._expect_next()
        elif closer in self._open:
            self._reader.skip()
            self._separator = [part for part in self._separator if part != ","]
            self._flush()
            while True:
                self._emit(self._open[-1])
                if self._open.pop() == closer:
                    break
            self._after_value()
        elif (yield from self._reader.looking_at(*self._quotes)):
            self._separator.append(", ")
            self._expect_next()
        else:
            self.close()
        return False

    def _expect_next(self) -> None:
        self._expected = _Expected.KEY if self._open[-1] == "}" else _Expected.VALUE

    def _after_value(self) -> None:
        self._expected = _Expected.MORE
        self._done = not self._open

    def _flush(self) -> None:
        text = _NO_JSON_WHITESPACE.sub(" ", "".join(self._separator))
        self._separator.clear()
        if text:
            self._emit(text)


def copy_arguments(
    reader: Reader, output: Output, *, quotes: Sequence[str] = QUOTES, escapes: bool = True
) -> Steps[bool]:
    """Copy the object with a call's arguments and end the call; return False if the text ends inside it."""
    copier = ValueCopier(reader, output.arguments, quotes=quotes, escapes=escapes)
    is_whole = yield from copier.copy()
    if is_whole:
        output.end_call(was_closed=copier.was_closed)
    return is_whole


def copy_string(reader: Reader, quote: str, emit: Emit, *, escapes: bool = True) -> Steps[bool]:
    """Copy a string after its opening quote as the inside of a JSON string; return False if the text ends in it."""
    plain = _PLAIN[quote[0]]
    while True:
        char = yield from reader.peek()
        if not char:
            return False
        if text := reader.run(plain):
            emit(text)
            continue
        if char == quote[0] and (yield from reader.accept(quote)):
            return True
        if reader.fragment(quote):
            return False
        reader.skip()
        if char != "\\":
            emit(_inner(json.dumps(char)))
        elif not escapes:
            emit("\\\\")
        elif not (yield from _escape(reader, emit)):
            return False


def _escape(reader: Reader, emit: Emit) -> Steps[bool]:
    """Copy the escape after a backslash; return False if the text ends in it."""
    char = yield from reader.peek()
    if not char:
        return False
    if char in '"\\/bfnrt':
        emit("\\" + reader.skip())
    elif char == "'":
        emit(reader.skip())
    elif char in "ux":
        reader.skip()
        digits = ""
        while len(digits) < (4 if char == "u" else 2):
            following = yield from reader.peek()
            if not following:
                return False
            if not _HEX.match(following):
                emit("\\\\" + char + digits)
                return True
            digits += reader.skip()
        emit("\\u" + digits.rjust(4, "0"))
    else:
        emit("\\\\")
    return True


def _scalar(word: str) -> str:
    """Return a word as JSON: a number, a literal or, for anything else, a string."""
    if word in _LITERALS:
        return _LITERALS[word]
    if _NUMBER.fullmatch(word):
        return word
    if _PYTHON_INTEGER.fullmatch(word):
        digits = word.lstrip("+-").lstrip("0") or "0"
        return ("-" if word[0] == "-" else "") + digits
    if _PYTHON_FLOAT.fullmatch(word):
        return json.dumps(float(word))
    return json.dumps(word, ensure_ascii=False)


def _inner(text: str) -> str:
    """Return a JSON string without its quotes."""
    return text[1:-1]
