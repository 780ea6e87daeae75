"""Where a prompt's text may be cut in two, and names for all the text in front of such a place.

Just before some control tokens, the *boundaries*, tokenizing is exact across a cut: the tokens of both sides are
those of the whole. So text that is known up to there may stand for whatever tokens it came from, and only the rest
is tokenized.

A name is a digest of the text and of how it is divided into parts, since a control token that is only spelled
becomes other tokens than a real one:

    parts    "<|im_start|>user\\nsay " "<|im_end|>"(spelled) "<|im_end|>\\n<|im_start|>assistant\\n"
    cuts                                                     ^             ^
    digests  of the namespace, then of each part a mark of its kind and its bytes, up to the cut

This must never look at tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llamaslot.base.commands import TextPart

_SPECIAL, _PLAIN = b"\xfd", b"\xfe"
"""Marks of parts; no UTF-8 has these bytes."""
CONTROL = b"\xff"
"""The mark in front of each control token of a *marked* text: the bytes of a prompt in which a real control token
cannot be mistaken for one that is only spelled.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """A place just before a boundary."""

    part: int
    """The index of the part that it is in."""
    at: int
    """Characters of that part in front of it."""
    name: bytes
    """The digest of all text in front of it, 16 bytes."""


class TextName:
    """The name of a growing text."""

    def __init__(self, space: str) -> None:
        """Texts of different namespaces have different names."""
        self._digest = hashlib.blake2b(space.encode(), digest_size=16)
        self._is_special = False
        """Whether more of a special part would belong to the last one."""

    @property
    def value(self) -> bytes:
        """The name so far, 16 bytes."""
        return self._digest.digest()

    def begin(self, part: TextPart) -> None:
        """Another part begins, which is added piece by piece."""
        self._digest.update(_SPECIAL if part.special else _PLAIN)
        self._is_special = part.special

    def add(self, text: str) -> None:
        """More text of the part that began last."""
        self._digest.update(text.encode(errors="replace"))

    def extended(self, reply: str) -> bytes:
        """The name with a reply behind it, as the next prompt will have it; changes nothing."""
        digest = self._digest.copy()
        if reply and not self._is_special:
            digest.update(_SPECIAL)
        digest.update(reply.encode(errors="replace"))
        return digest.digest()


class Cutter:
    """Finds the cuts of prompts; `boundaries` are some of all `special_tokens`, by their texts."""

    def __init__(self, boundaries: Iterable[str], special_tokens: Iterable[str]) -> None:
        self._boundaries = frozenset(boundaries)
        self._marked_boundaries = tuple(CONTROL + boundary.encode() for boundary in self._boundaries)
        longest_first = sorted(filter(None, special_tokens), key=lambda text: (-len(text), text))
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def cuts(self, parts: Sequence[TextPart], space: str) -> tuple[list[Cut], TextName]:
        """All cuts of a prompt but the one in front of all its text, and the name of the whole."""
        name, found = TextName(space), []
        has_begun = False
        for i, part in enumerate(parts):
            if not part.text:
                continue
            controls = self._controls.finditer(part.text) if part.special else ()
            places = [control.start() for control in controls if control[0] in self._boundaries]
            if has_begun and places[:1] == [0]:
                found.append(Cut(i, 0, name.value))
            name.begin(part)
            has_begun = True
            done = 0
            for at in filter(None, places):
                name.add(part.text[done:at])
                found.append(Cut(i, at, name.value))
                done = at
            name.add(part.text[done:])
        return found, name

    def marked(self, parts: Iterable[TextPart]) -> bytes:
        """The text of parts, marked."""
        return b"".join(self._marked(part) for part in parts)

    def parts_behind(self, parts: Sequence[TextPart], at: int) -> list[TextPart]:
        """What lies behind the first `at` bytes of the marked text, which end between two characters."""
        rest: list[TextPart] = []
        for part in parts:
            own = self._marked(part)
            text = own[max(0, at) :].replace(CONTROL, b"").decode()
            at -= len(own)
            if text:
                rest.append(TextPart(text, special=part.special))
        return rest

    def is_seam(self, marked: bytes, at: int) -> bool:
        """Whether a marked text can be cut at a place so that its tokens are hardly ever others than those of both
        sides: before a boundary, and before a space behind anything else.
        """
        if at in (0, len(marked)) or marked.startswith(self._marked_boundaries, at):
            return True
        return (
            marked[at : at + 1] == b" " and not marked[max(0, at - 4) : at].decode(errors="replace")[-1:].isspace()
        )

    def _marked(self, part: TextPart) -> bytes:
        starts = [control.start() for control in self._controls.finditer(part.text)] if part.special else []
        runs = (part.text[a:b] for a, b in pairwise([0, *starts, len(part.text)]))
        return CONTROL.join(run.encode(errors="replace") for run in runs)

    def spells_control(self, text: str, start: int = 0) -> bool:
        """Whether a control token is spelled in a text so that it ends behind `start`."""
        return any(match.end() > start for match in self._controls.finditer(text))


def parts_from(parts: Sequence[TextPart], cut: Cut | None) -> list[TextPart]:
    """The prompt from a cut on; all of it without one."""
    if cut is None:
        return list(parts)
    first = parts[cut.part]
    return [TextPart(first.text[cut.at :], special=first.special), *parts[cut.part + 1 :]]


def parts_between(parts: Sequence[TextPart], start: Cut | None, end: Cut | None) -> list[TextPart]:
    """The prompt from one cut, or from its beginning on, to that or a later one; nothing without one."""
    if end is None:
        return []
    rest = parts_from(parts, start)
    skipped = 0 if start is None else start.part
    n_front = start.at if start is not None and start.part == end.part else 0
    last = parts[end.part]
    own = last.text[: end.at][n_front:]
    between = rest[: end.part - skipped]
    return [*between, TextPart(own, special=last.special)] if own else between
