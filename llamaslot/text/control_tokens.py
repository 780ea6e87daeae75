"""Distinguishes control tokens that the caller wrote into a conversation from those that the template wrote.

A message that contains `<|im_end|>` must not end its turn. A rendered prompt does not show who wrote what, so the
template is rendered twice, the second time with placeholders in all text of the caller:

    caller          template              second prompt         first prompt
    a<|im_end|>  -> a?|im_end|> ->  ..user a?|im_end|><|im_end|>  ->  ..user a<|im_end|><|im_end|>
                                            ^ placeholder                    caller's, template's

1. In each string of the caller, every opening character of control tokens (usually just `<`) is replaced by a
   placeholder: a symbol of a rare script that occurs nowhere else. It is a single character, neither space nor
   letter, and JSON and Python do not escape it, so that trimming, slicing, `length`, `tojson` and printing treat it
   like the original.
2. Words that the template searches for, such as `</think>`, are not changed. If such a word is also a control
   token, it is left unchanged only if the template would otherwise write another prompt (`variants`).
3. After restoring the original characters, both prompts must be equal. Then every control token of which a
   character was replaced is the caller's, even if it resulted from joining or cutting strings of the caller.
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

Placeholders: TypeAlias = dict[str, str]
"""Placeholders by the opening character that they replace."""

_SYMBOLS = range(0x1D800, 0x1DA00)
"""The script SignWriting: each character is one printable symbol without case."""
_SYMBOL = re.compile(f"[{chr(_SYMBOLS[0])}-{chr(_SYMBOLS[-1])}]")
_MATCHES_NOTHING = "(?!)"
_REASONING_TAGS = ("<think>", "</think>")
_NO_OPENING = frozenset("_\"'\\")
"""Punctuation of identifiers and JSON strings, whose replacement would change their meaning."""


class ControlTokens:
    """Control tokens of a vocabulary, and the words that one template searches for.

    Tokens without punctuation cannot be distinguished from words, and are ignored.
    """

    def __init__(self, texts: Iterable[str], template: nodes.Template) -> None:
        self._texts = frozenset(text for text in texts if _opening(text))
        self._openings = "".join(sorted({_opening(text) for text in self._texts}))
        self._opening = re.compile(f"[{re.escape(self._openings)}]" if self._openings else _MATCHES_NOTHING)
        self._lengths = _lengths_by_head(self._texts)
        self._heads = re.compile(f"(?={_any_of(self._lengths)})")

        joined = "\0".join(self._texts)
        words = {word for text in (*_REASONING_TAGS, *_constants(template)) for word in self._words(text)}
        plain = {w for w in words if w not in joined and not any(text in w for text in self._texts)}
        # Words that the template compares with something, or passes to a method, filter or test.
        searches = template.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test))
        sought = {word for node in searches for text in _constants(node) for word in self._words(text)}
        self._plain = re.compile(f"({_any_of(plain)})")
        self._sought = re.compile(f"({_any_of(plain | sought)})")

    def begin_in(self, value: Any) -> bool:
        """True if an opening character of a control token occurs in any string of a nested value."""
        return any(self._opening.search(text) for text in _strings(value))

    def placeholders(self, *values: Any) -> Placeholders:
        """Choose a placeholder for each opening character that occurs nowhere in the values."""
        used = {symbol for text in _strings(values) if not text.isascii() for symbol in _SYMBOL.findall(text)}
        free = (symbol for symbol in map(chr, _SYMBOLS) if symbol not in used)
        placeholders = dict(zip(self._openings, free, strict=False))
        if len(placeholders) < len(self._openings):
            raise InvalidRequestError("the messages use every symbol of SignWriting", param="messages")
        return placeholders

    def variants(
        self, conversation: Sequence[Message], others: Any, placeholders: Placeholders
    ) -> Iterator[tuple[list[Message], Any]]:
        """Yield the conversation and the caller's other values with placeholders, from the most to the fewest.

        Control tokens for which the template searches are first replaced like others, then kept in replies, where
        templates search for reasoning and calls, then kept everywhere.
        """
        most, fewest = (partial(_replaced, words, placeholders) for words in (self._plain, self._sought))
        for in_replies, elsewhere in ((most, most), (fewest, most), (fewest, fewest)):
            messages = [
                _mapped(message, in_replies if message["role"] == "assistant" else elsewhere)
                for message in conversation
            ]
            yield messages, _mapped(others, elsewhere)

    def parts(self, prompt: str, replaced: str) -> tuple[TextPart, ...]:
        """Divide the prompt at control tokens of the caller; `replaced` is the prompt with placeholders."""
        parts: list[TextPart] = []
        done = 0
        for start, end in self._spans_of_caller(prompt, replaced):
            if start > done:
                parts.append(TextPart(prompt[done:start]))
            parts.append(TextPart(prompt[start:end], special=False))
            done = end
        if done < len(prompt) or not parts:
            parts.append(TextPart(prompt[done:]))
        return tuple(parts)

    def _spans_of_caller(self, prompt: str, replaced: str) -> list[tuple[int, int]]:
        """Return the spans of control tokens that have a placeholder. Overlapping ones become one span."""
        spans: list[tuple[int, int]] = []
        for head in self._heads.finditer(prompt):
            start = head.start()
            end = start + self._length_at(prompt, start)
            if replaced[start:end] == prompt[start:end]:
                continue
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        return spans

    def _length_at(self, text: str, start: int) -> int:
        """Return the length of the longest control token at `start`; 0 if there is none."""
        lengths = self._lengths.get(text[start : start + 2], self._lengths.get(text[start], ()))
        return next((n for n in lengths if text[start : start + n] in self._texts), 0)

    def _words(self, text: str) -> list[str]:
        """Split a text into words that begin with an opening character. Text before the first one is left out."""
        places = [found.start() for found in self._opening.finditer(text)]
        return [text[a:b].rstrip() for a, b in itertools.pairwise([*places, len(text)])]


def _opening(token: str) -> str:
    """Return a token's first punctuation character, which other text rarely has; empty if there is none."""
    return next((c for c in token if not c.isalnum() and not c.isspace() and c not in _NO_OPENING), "")


def _lengths_by_head(texts: Collection[str]) -> dict[str, list[int]]:
    """Return the lengths of texts by their first two characters, longest first.

    Vocabularies have thousands of control tokens, for which one regular expression would be too slow.
    """
    lengths: dict[str, set[int]] = {}
    for text in texts:
        lengths.setdefault(text[:2], {1} if text[0] in texts else set()).add(len(text))
    return {head: sorted(found, reverse=True) for head, found in lengths.items()}


def _any_of(words: Iterable[str]) -> str:
    """Return a regular expression that matches the longest possible one of some words."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return "|".join(map(re.escape, longest_first)) or _MATCHES_NOTHING


def _replaced(words: re.Pattern[str], placeholders: Placeholders, text: str) -> str:
    """Replace the opening characters of a text, except in `words` (a pattern in one group)."""
    runs = words.split(text)
    for i in range(0, len(runs), 2):
        for opening, placeholder in placeholders.items():
            runs[i] = runs[i].replace(opening, placeholder)
    return "".join(runs)


def restored(text: str, placeholders: Placeholders) -> str:
    """Replace placeholders by the original characters."""
    for opening, placeholder in placeholders.items():
        text = text.replace(placeholder, opening)
    return text


def _constants(tree: nodes.Node) -> Iterator[str]:
    return (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


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
    """Return a nested value with every string in it changed, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
