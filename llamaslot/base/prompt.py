"""The tokenized prompt that the prompt worker hands to the engine."""

from __future__ import annotations

import msgspec

from llamaslot.base.events import SessionMatch
from llamaslot.base.tokens import Tokens, unpacked


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """Token ids of a prompt and where they come from. Plain values, so that it can cross a process boundary."""

    packed_tokens: bytes
    n_anchored: int = 0
    """Leading tokens taken from a text anchor instead of tokenizing their text."""
    session_match: SessionMatch = ""
    """Result of comparing the prompt with its session's last sequence."""
    n_approximate: int = 0
    """Tokens taken from the session after the first that differs from those of tokenizing the whole text; 0
    unless `session_match` is "diverge"."""
    is_reply_edited: bool = False
    """True if the text departs from that of its session within the session's last reply."""

    @property
    def tokens(self) -> Tokens:
        """Token ids, int32; a read-only view without a copy."""
        return unpacked(self.packed_tokens)
