"""Cut points of a prompt's text, at which it may be tokenized in two runs, and comparison with a session's text.

Of a session's tokens as many are kept as stand for the text of the prompt.

A *cut point* lies just before a control token at which tokenizing is exact: the tokens of both sides are those of
the whole. Text whose tokens are remembered up to a cut point keeps those tokens, and only the rest is tokenized.

Texts are kept as UTF-8 with a marker byte before each control token that will be parsed as one, so that they differ
from texts in which the same characters are plain. Offsets count these bytes. Each cut point has a digest of all
text before it and of how it is divided into parts, for parts are tokenized one by one:

    parts       "<|im_start|>user say " "<|im_end|>" (plain) "<|im_end|><|im_start|>assistant"
    data        ^<|im_start|>user say <|im_end|>^<|im_end|>^<|im_start|>assistant       (^ is the marker)
    cut points                                  |          |
    digests     of the namespace, then of each part a byte for its kind and its text, up to the cut point

A session is compared by these texts, so a control token agrees only with a control token:

    session   |---- prompt ----|---- reply ----|
    exact     |---------- all kept ------------|
    extend    |---------- all kept ------------|-- tokenized --|
    diverge   |------- kept -------|xxxxxxxxxxx|
                                   |-- tokenized --|

Where the prompt diverges from the session's text, the kept tokens end at an approximate cut point in the common
text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from llamaslot.base.backend import Vocab
from llamaslot.base.commands import TextPart
from llamaslot.base.text_records import Session
from llamaslot.base.tokens import n_common

_SPECIAL, _PLAIN, _REMEMBERED = b"\xfd", b"\xfe", b"\xfc"
"""Kinds of parts in digests; no UTF-8 has these bytes."""
MARKER = b"\xff"
"""The byte before each control token; no UTF-8 has it."""
_INVALID = b"\xfe"
"""Takes the place of that byte in the text of a token."""
_MAX_PROBED_TOKENS = 128
"""Control tokens that are probed; some vocabularies have thousands of unused ones."""
_TEXTS_BEFORE = ("x", "x ", "x\n", "x\n\n", "\n", "é", " ", "   ", ".", "0", "\t")
_TEXTS_AFTER = ("", "x", " x", "\nx", "  x")
"""Texts on both sides of a probed control token."""


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place where a prompt's text may be cut without changing its tokens."""

    at: int
    """Bytes of text and markers before it."""
    digest: bytes
    """Identifies all text before it, 16 bytes."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text of a prompt that has text parts only."""

    data: bytes
    """UTF-8 with control-token markers."""
    cut_points: Sequence[CutPoint]
    """All but the one before all text."""
    _ends: Sequence[tuple[int, bool]]
    """For each part that is not empty, where it ends and whether control tokens are parsed in it."""
    _digest: hashlib.blake2b

    @property
    def last_cut(self) -> int:
        """Offset of the last cut point, 0 where there is none."""
        return self.cut_points[-1].at if self.cut_points else 0

    def parts(self, start: int = 0, end: int | None = None) -> list[TextPart]:
        """The text between two offsets, which must not lie within a character."""
        found = []
        for stop, special in self._ends:
            run = self.data[start : stop if end is None else min(stop, end)]
            if run:
                found.append(TextPart(run.replace(MARKER, b"").decode(), special=special))
            start = max(start, stop)
        return found

    def digest_with(self, reply: str) -> bytes:
        """The digest that the cut point after a reply has in the next prompt."""
        digest = self._digest.copy()
        # Templates write replies into parts that are parsed: the reply continues the last part if it is one.
        if reply and not (self._ends and self._ends[-1][1]):
            digest.update(_SPECIAL)
        digest.update(reply.encode(errors="replace"))
        return digest.digest()


class TextScanner:
    """Finds control tokens in prompt texts; `exact` are those of `control_tokens` before which cuts are exact."""

    def __init__(self, exact: Iterable[str], control_tokens: Iterable[str]) -> None:
        self._exact = frozenset(exact)
        self._exact_with_marker = tuple(MARKER + text.encode() for text in self._exact)
        longest_first = sorted(filter(None, control_tokens), key=lambda text: (-len(text), text))
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def scan(self, parts: Iterable[TextPart], namespace: str, before: bytes = b"") -> PromptText:
        """Add markers to a prompt's text and find its cut points; digests differ between namespaces.

        The text of remembered tokens `before` the parts has its markers, and no cut points.
        """
        data, digest = bytearray(before), hashlib.blake2b(namespace.encode(), digest_size=16)
        ends: list[tuple[int, bool]] = []
        if before:
            digest.update(_REMEMBERED + before)
            ends.append((len(data), True))
        cut_points: list[CutPoint] = []
        for part in filter(lambda part: part.text, parts):
            before = digest.digest()
            digest.update(_SPECIAL if part.special else _PLAIN)
            done = 0
            for control in self._controls.finditer(part.text) if part.special else ():
                run = part.text[done : control.start()].encode(errors="replace")
                digest.update(run)
                data += run
                done = control.start()
                if data and control[0] in self._exact:
                    cut_points.append(CutPoint(len(data), digest.digest() if done else before))
                data += MARKER
            run = part.text[done:].encode(errors="replace")
            digest.update(run)
            data += run
            ends.append((len(data), part.special))
        return PromptText(bytes(data), cut_points, ends, digest)

    def is_approximate_cut(self, data: bytes, at: int) -> bool:
        """True if cutting there hardly ever changes the tokens: at both ends, before an exact control token, and
        before a space that does not follow another one. BPE vocabularies begin words with their space.
        """
        if at in (0, len(data)) or data.startswith(self._exact_with_marker, at):
            return True
        # The character before may have up to four bytes.
        before = data[max(0, at - 4) : at].decode(errors="replace")[-1:]
        return data[at : at + 1] == b" " and not before.isspace()

    def has_control_token(self, text: str, start: int = 0) -> bool:
        """True if a control token is written out in a text and ends after `start`."""
        return any(match.end() > start for match in self._controls.finditer(text))


def n_characters(data: bytes) -> int:
    """Count the characters of a text with control-token markers."""
    raw = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((raw & 0xC0 != 0x80) & (raw != MARKER[0])))


def exact_cut_tokens(vocab: Vocab, template: str = "") -> tuple[str, ...]:
    """Find the control tokens before which a cut changes no token, by tokenizing short texts with and without it.

    Tokens that occur in the chat template are probed first.
    """

    def ids(text: str) -> list[int]:
        return list(map(int, vocab.tokenize(text, add_special=False, parse_special=True)))

    before = {text: ids(text) for text in _TEXTS_BEFORE}

    def is_exact(token: str) -> bool:
        after = {text: ids(token + text) for text in _TEXTS_AFTER}
        return len(after[""]) == 1 and all(
            ids(left + token + right) == before[left] + after[right] for left in before for right in after
        )

    candidates = sorted(vocab.cut_tokens, key=lambda text: text not in template)
    return tuple(filter(is_exact, candidates[:_MAX_PROBED_TOKENS]))


class Pieces(dict[int, bytes]):
    """The text of each token, with a marker before control tokens; filled as tokens are met."""

    def __init__(self, vocab: Vocab) -> None:
        super().__init__()
        self._vocab = vocab

    def __missing__(self, token: int) -> bytes:
        """Add a token. Those of images have no text; they are as many as pixels differ, and are not kept."""
        if token < 0:
            return b""
        piece = self._vocab.piece(token)
        # Byte tokens can give the marker's byte: as no text has it, another invalid byte serves as well.
        piece = piece.replace(MARKER, _INVALID) if piece else MARKER + self._vocab.detokenize([token])
        return self.setdefault(token, piece)


@dataclass(frozen=True, slots=True)
class MarkedText:
    """The text of a run of tokens, with control-token markers, to be compared with the text of a prompt."""

    data: bytes
    ends: npt.NDArray[np.int64]
    """For each token the offset at which its text ends."""

    @classmethod
    def of(cls, tokens: Sequence[int], pieces: Pieces) -> MarkedText:
        """Detokenize, with a marker before each control token."""
        found = [pieces[token] for token in tokens]
        return cls(b"".join(found), np.fromiter(map(len, found), np.int64, len(found)).cumsum())


@dataclass(frozen=True)
class SessionComparison:
    """A prompt's text and that of its session. Tokens are counted from after those that the model adds."""

    text: bytes
    session: Session
    known: MarkedText
    """The session's text."""

    @cached_property
    def n_same(self) -> int:
        """Bytes that both texts begin with."""
        return n_common(np.frombuffer(self.known.data, np.uint8), np.frombuffer(self.text, np.uint8))

    @property
    def is_same(self) -> bool:
        """True if both texts are equal."""
        return self.n_same == len(self.text) == len(self.known.data)

    @property
    def has_all(self) -> bool:
        """True if the prompt begins with all of the session's text."""
        return self.n_same == len(self.known.data)

    @property
    def is_reply_edited(self) -> bool:
        """True if the prompt diverges from the session's text within its reply."""
        reply = self.end(self.session.n_prompt - self.session.n_added)
        return self.session.has_reply and reply <= self.n_same < min(len(self.known.data), len(self.text))

    def n_kept(self, scanner: TextScanner, min_characters: int = 0) -> int:
        """Count the session's tokens that can stand for the prompt's text; 0 if they are less text than wanted."""
        ends, n_same = self.known.ends, self.n_same
        n = int(np.searchsorted(ends, n_same, side="right"))
        # A reply may end within a character that the next prompt completes.
        is_within_character = n_same < len(self.text) and self.text[n_same] & 0xC0 == 0x80
        # A whole reply is kept as it was generated, wherever its end lies in what tokenizing would give.
        if not (self.has_all and self.session.has_reply) or is_within_character:
            while n and ends[n - 1] >= min_characters and not scanner.is_approximate_cut(self.text, self.end(n)):
                n -= 1
        return n if n_characters(self.text[: self.end(n)]) >= min_characters else 0

    def end(self, n_tokens: int) -> int:
        """Return the offset at which the text of the session's first tokens ends."""
        return int(self.known.ends[n_tokens - 1]) if n_tokens else 0
