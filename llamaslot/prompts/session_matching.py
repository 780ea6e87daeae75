"""Text of tokens, and its comparison with the text of a prompt: how many of a session's tokens can be kept.

    session   |---- prompt ----|---- reply ----|
    exact     |---------- all kept ------------|
    extend    |---------- all kept ------------|-- tokenized --|
    diverge   |------- kept -------|xxxxxxxxxxx|
                                   |-- tokenized --|

The texts have control-token markers (`prompts/cut_points.py`), so a control token agrees only with a control token.
Where the prompt departs from the session's text, the kept tokens end at an approximate cut point in the common
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from llamaslot.base.backend import Vocab
from llamaslot.base.text_records import Session
from llamaslot.base.tokens import n_common
from llamaslot.prompts.cut_points import MARKER, TextScanner, n_characters

_INVALID = b"\xfe"


class Pieces(dict[int, bytes]):
    """The text of each token, with a marker before control tokens; filled as tokens are met."""

    def __init__(self, vocab: Vocab) -> None:
        super().__init__()
        self._vocab = vocab

    def __missing__(self, token: int) -> bytes:
        """Add a token."""
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
        """True if the prompt departs from the session's text within its reply."""
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
