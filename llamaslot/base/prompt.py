"""The tokenized prompt of a request."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from llamaslot.base.tokens import WIDTH, Tokens, unpacked

SessionMatch: TypeAlias = Literal["", "new", "exact", "extend", "diverge", "tokens"]
"""Result of comparing a prompt with the text of its session's last sequence.

    ""         the request has no session
    new        the session has no sequence yet
    exact      the prompt is the session's text, and takes its tokens
    extend     the prompt begins with that text, and with its tokens
    diverge    the prompt begins with a part of that text, and with the tokens of that part
    tokens     the prompt has its own tokens, or those of an anchor
"""


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

    n_restored: int = 0
    """Leading tokens taken from remembered replies and their prompts."""
    n_replies: int = 0
    """Of them, tokens of replies."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.packed_tokens) // WIDTH

    @property
    def tokens(self) -> Tokens:
        """Token ids, int32; a read-only view without a copy."""
        return unpacked(self.packed_tokens)
