"""Comparison of a prompt's text with that of its session: how many of the session's tokens can be kept.

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

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamaslot.base.tokens import n_common
from llamaslot.prompts.cut_points import TextScanner, n_characters
from llamaslot.prompts.detokenized import DetokenizedText
from llamaslot.prompts.sessions import Session


@dataclass(frozen=True)
class SessionComparison:
    """A prompt's text and that of its session. Tokens are counted from after those that the model adds."""

    text: bytes
    session: Session
    detokenized: DetokenizedText
    """The session's text."""

    @cached_property
    def n_same(self) -> int:
        """Bytes that both texts begin with."""
        return n_common(np.frombuffer(self.detokenized.text, np.uint8), np.frombuffer(self.text, np.uint8))

    @property
    def is_same(self) -> bool:
        """True if both texts are equal."""
        return self.n_same == len(self.text) == len(self.detokenized.text)

    @property
    def has_all(self) -> bool:
        """True if the prompt begins with all of the session's text."""
        return self.n_same == len(self.detokenized.text)

    @property
    def is_reply_edited(self) -> bool:
        """True if the prompt departs from the session's text within its reply."""
        reply = self.end(self.session.n_prompt - self.session.n_added)
        return self.session.has_reply and reply <= self.n_same < min(len(self.detokenized.text), len(self.text))

    def n_kept(self, scanner: TextScanner, min_characters: int = 0) -> int:
        """Count the session's tokens that can stand for the prompt's text; 0 if they are less text than wanted."""
        ends, n_same = self.detokenized.ends, self.n_same
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
        return int(self.detokenized.ends[n_tokens - 1]) if n_tokens else 0
