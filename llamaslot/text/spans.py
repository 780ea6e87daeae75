"""Which control tokens in a rendered conversation were spelled by the caller, and not by the template.

A message that holds `<|im_end|>` must not end its turn. The finished prompt does not show who wrote what, so the
template renders twice, the second time with marks in all that the caller wrote:

    caller          template              second prompt         first prompt
    a<|im_end|>  -> a?|im_end|> ->  ..user a?|im_end|><|im_end|>  ->  ..user a<|im_end|><|im_end|>
                                            ^ marked                         caller's, template's

1. In each string of the caller's, every opening character of control tokens (usually just `<`) becomes a mark: a
   symbol of a rare script that occurs nowhere. A mark is one character, no space, no letter and nothing that JSON
   or Python escapes, so trimming, slicing, `length`, `tojson` and printing do with it what they did before.
2. Words that the template looks for are left as they are: `</think>` must still be found. A word that is a control
   token besides is left only where the template would otherwise write another prompt: see `ControlTokens.attempts`.
3. With the marks turned back, both prompts must be the same. Then a control token of which a character was marked
   is the caller's, also where it came to be only by joining or cutting the caller's strings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from jinja2 import nodes

from llamaslot.base.commands import TextPart
from llamaslot.base.errors import InvalidRequestError
from llamaslot.text.conversation import Message

Marks: TypeAlias = dict[str, str]
"""The mark of each opening character."""

_SYMBOLS = range(0x1D800, 0x1DA00)
"""SignWriting: each is one printable symbol without case."""
_SYMBOL = re.compile(f"[{chr(_SYMBOLS[0])}-{chr(_SYMBOLS[-1])}]")
_NOWHERE = "(?!)"
_THOUGHTS = ("<think>", "</think>")
_NO_OPENING = frozenset("_\"'\\")
"""Punctuation of identifiers and of JSON's strings, which marks would change the meaning of."""


class ControlTokens:
    """The control tokens of a vocabulary as they may be spelled, and the words that one template looks for.

    Tokens without any punctuation cannot be told from words and are left out.
    """

    def __init__(self, texts: Iterable[str], template: nodes.Template) -> None:
        self._texts = frozenset(text for text in texts if _opening(text))
        self._openings = "".join(sorted({_opening(text) for text in self._texts}))
        self._opening = re.compile(f"[{re.escape(self._openings)}]" if self._openings else _NOWHERE)
        self._lengths = _lengths_by_head(self._texts)
        self._heads = re.compile(f"(?={_either(self._lengths)})")

        joined = "\0".join(self._texts)
        words = {word for text in (*_THOUGHTS, *_constants(template)) for word in self._cut(text)}
        plain = {w for w in words if w not in joined and not any(text in w for text in self._texts)}
        sought = {word for text in _sought(template) for word in self._cut(text)}
        self._plain = re.compile(f"({_either(plain)})")
        self._sought = re.compile(f"({_either(plain | sought)})")

    def begin_in(self, value: Any) -> bool:
        """Whether an opening character of a control token occurs in any string of a nested value."""
        return any(self._opening.search(text) for text in _strings(value))

    def marks(self, *values: Any) -> Marks:
        """A mark for each opening character; none of them occurs in the values."""
        used = {mark for text in _strings(values) if not text.isascii() for mark in _SYMBOL.findall(text)}
        marks = dict(zip(self._openings, (mark for mark in map(chr, _SYMBOLS) if mark not in used), strict=False))
        if len(marks) < len(self._openings):
            raise InvalidRequestError("the messages use every symbol of SignWriting", param="messages")
        return marks

    def attempts(
        self, conversation: Sequence[Message], others: Any, marks: Marks
    ) -> Iterator[tuple[list[Message], Any]]:
        """The conversation and what else the caller gave with marks, from the most marks to the fewest.

        Words that are control tokens and that the template looks for are first marked like others, then left alone
        in replies, where templates look for thoughts and calls, then everywhere.
        """
        most, fewest = partial(_marked, self._plain, marks), partial(_marked, self._sought, marks)
        for in_replies, elsewhere in ((most, most), (fewest, most), (fewest, fewest)):
            marked = [
                _mapped(message, in_replies if message["role"] == "assistant" else elsewhere)
                for message in conversation
            ]
            yield marked, _mapped(others, elsewhere)

    def parts(self, prompt: str, marked: str) -> tuple[TextPart, ...]:
        """The prompt, cut around the control tokens that hold a character that is marked in `marked`."""
        parts: list[TextPart] = []
        done = 0
        for start, end in self._spelled(prompt, marked):
            if start > done:
                parts.append(TextPart(prompt[done:start]))
            parts.append(TextPart(prompt[start:end], special=False))
            done = end
        if done < len(prompt) or not parts:
            parts.append(TextPart(prompt[done:]))
        return tuple(parts)

    def _spelled(self, prompt: str, marked: str) -> list[tuple[int, int]]:
        """Where control tokens with a marked character are; those that overlap are one."""
        spans: list[tuple[int, int]] = []
        for head in self._heads.finditer(prompt):
            start = head.start()
            end = start + self._length_at(prompt, start)
            if marked[start:end] == prompt[start:end]:
                continue
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        return spans

    def _length_at(self, text: str, start: int) -> int:
        """The length of the longest control token that begins there, 0 for none."""
        lengths = self._lengths.get(text[start : start + 2], self._lengths.get(text[start], ()))
        return next((n for n in lengths if text[start : start + n] in self._texts), 0)

    def _cut(self, text: str) -> list[str]:
        """The words of a text that begin with an opening character and hold no other."""
        places = [found.start() for found in self._opening.finditer(text)]
        return [text[a:b].rstrip() for a, b in itertools.pairwise([*places, len(text)])]


def _opening(token: str) -> str:
    """The first character of a token that hardly anything else begins with; empty if there is none."""
    return next((c for c in token if not c.isalnum() and not c.isspace() and c not in _NO_OPENING), "")


def _lengths_by_head(texts: Collection[str]) -> dict[str, list[int]]:
    """The lengths of the texts that begin with the same two characters, longest first."""
    lengths: dict[str, set[int]] = {}
    for text in texts:
        lengths.setdefault(text[:2], {1} if text[0] in texts else set()).add(len(text))
    return {head: sorted(found, reverse=True) for head, found in lengths.items()}


def _either(words: Iterable[str]) -> str:
    """A regular expression for the longest of the words; nothing matches where there are none."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return "|".join(map(re.escape, longest_first)) or _NOWHERE


def _marked(words: re.Pattern[str], marks: Marks, text: str) -> str:
    """The text with all opening characters as marks, but for `words` (a pattern in one group)."""
    pieces = words.split(text)
    for i in range(0, len(pieces), 2):
        for opening, mark in marks.items():
            pieces[i] = pieces[i].replace(opening, mark)
    return "".join(pieces)


def unmarked(text: str, marks: Marks) -> str:
    """The text with the opening characters that its marks stand for."""
    for opening, mark in marks.items():
        text = text.replace(mark, opening)
    return text


def _constants(tree: nodes.Node) -> Iterator[str]:
    return (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _sought(template: nodes.Template) -> Iterator[str]:
    """Constants that the template compares with something or passes to a method, filter or test."""
    for node in template.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        yield from _constants(node)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A nested value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
