"""Token ids as int32 arrays and as packed bytes, and the tokenized prompt of a request.

Tree edges and lookups use packed bytes, four per token (little-endian int32): comparing bytes is faster than numpy
on short runs. numpy is imported by the first call that needs it: the server's parent process does without, so that
it starts sooner.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from llamaslot.base.images import PromptImage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Tokens: TypeAlias = "npt.NDArray[np.int32]"

WIDTH = 4
"""Bytes per packed token."""


def packed(tokens: Tokens) -> bytes:
    """Token ids as packed bytes."""
    return tokens.astype("<i4", copy=False).tobytes()


def unpacked(run: bytes | bytearray) -> Tokens:
    """Token ids from packed bytes, int32."""
    import numpy as np  # noqa: PLC0415

    return np.frombuffer(bytes(run), dtype="<i4").astype(np.int32, copy=False)


def ids_of(run: bytes) -> list[int]:
    """Token ids from packed bytes, as a list."""
    return list(struct.unpack(f"<{len(run) // WIDTH}i", run))


def n_common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Number of leading items that two arrays share."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())


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
    """True if the text diverges from that of its session within the session's last reply."""

    n_remembered: int = 0
    """Leading tokens taken from remembered replies and their prompts."""
    n_of_replies: int = 0
    """Of them, tokens of replies."""
    images: tuple[PromptImage, ...] = ()
    """Its images, in the order of their places. The tokens of their tiles have negative ids."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.packed_tokens) // WIDTH

    @property
    def tokens(self) -> Tokens:
        """Token ids, int32; a read-only view without a copy."""
        return unpacked(self.packed_tokens)
