"""Places where a text can be cut into parts that have the same tokens as the whole: before some special tokens.

llama.cpp first divides a text at its special tokens, and then tokenizes each fragment between them on its own. For
each token that it finds, it walks through the list of all fragments, so the time is quadratic in their number (fact
20). It tries the tokens from the longest to the shortest one, in no certain order among those of one length, and
searches each from left to right in the text that earlier ones have left. Some tokens strip the whitespace beside
them, of which a later token could be a part.

    special tokens   <tool>  <tool>>  >>
    text             use <tool>>now
                         ^ a cut: <tool>> is the longest token here, and none behind it is as long
                               ^ none: <tool>> occurs across it

A place is a cut if these hold of what begins there:

1. No special token occurs across it.
2. The longest token there overlaps none behind it that is as long or longer, so llama.cpp finds it there.
3. It strips nothing to its left, and no other token strips its ends, since they are not whitespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import llama_cpp

_PART = 2**11
_SEARCHED = 2**8
"""Texts are cut into parts of at least the first, in bytes; a cut is searched within the second.

Where special tokens are rarer than that, llama.cpp's time for them hardly counts.
"""
_MATCHES_NOTHING = b"(?!)"


class SpecialTokens:
    """Special tokens that llama.cpp searches for: their raw texts with their attributes."""

    def __init__(self, attributes: Mapping[bytes, int]) -> None:
        self._texts = frozenset(attributes)
        strips_right = any(each & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP for each in attributes.values())
        strips_left = any(each & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP for each in attributes.values())
        self._cuts = frozenset(
            text
            for text, attribute in attributes.items()
            if not attribute & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP
            and not (strips_right and text[:1].isspace())
            and not (strips_left and text[-1:].isspace())
        )
        self._lengths = _lengths_by_head(attributes)
        self._longest = max(map(len, attributes), default=0)
        first = b"".join(re.escape(each) for each in sorted({text[:1] for text in attributes}))
        self._first = re.compile(b"[" + first + b"]" if first else _MATCHES_NOTHING)

    def cuts(self, data: bytes) -> list[int]:
        """Return places where a text may be cut, in order, at most one for each part."""
        cuts, at = [], _PART
        while at < len(data):
            near = self._first.finditer(data, at, at + _SEARCHED)
            cut = next((found.start() for found in near if self._is_cut(data, found.start())), None)
            if cut is not None:
                cuts.append(cut)
                at = cut
            at += _PART
        return cuts

    def _is_cut(self, data: bytes, cut: int) -> bool:
        n = self._length_at(data, cut)
        if data[cut : cut + n] not in self._cuts:
            return False
        for found in self._first.finditer(data, max(cut - self._longest + 1, 0), cut + n):
            at = found.start()
            length = self._length_at(data, at)
            if at < cut < at + length or (at > cut and length >= n):
                return False
        return True

    def _length_at(self, data: bytes, at: int) -> int:
        """Return the length of the longest special token at a place; 0 if there is none."""
        lengths = self._lengths.get(data[at : at + 2]) or self._lengths.get(data[at : at + 1]) or ()
        return next((n for n in lengths if data[at : at + n] in self._texts), 0)


def _lengths_by_head(texts: Iterable[bytes]) -> dict[bytes, list[int]]:
    """Return the lengths of texts by their first two bytes, or by the only one, longest first."""
    lengths: dict[bytes, set[int]] = {}
    for text in texts:
        lengths.setdefault(text[:2], set()).add(len(text))
    return {head: sorted(found, reverse=True) for head, found in lengths.items()}
