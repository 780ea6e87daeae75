"""Detokenized text with control-token markers, to be compared with the text of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from llamaslot.base.backend import Vocab
from llamaslot.prompts.cut_points import MARKER

_INVALID = b"\xfe"


@dataclass(frozen=True, slots=True)
class DetokenizedText:
    """The text of a run of tokens, with control-token markers."""

    text: bytes
    ends: npt.NDArray[np.int64]
    """For each token the offset at which its text ends."""

    def followed_by(self, other: DetokenizedText) -> DetokenizedText:
        """Return the text of both runs."""
        return DetokenizedText(self.text + other.text, np.concatenate([self.ends, other.ends + len(self.text)]))


def detokenize_with_markers(vocab: Vocab, tokens: Sequence[int]) -> DetokenizedText:
    """Detokenize, with a marker before each control token."""
    pieces = [_piece(vocab, token) for token in tokens]
    return DetokenizedText(b"".join(pieces), np.fromiter(accumulate(map(len, pieces)), np.int64, len(pieces)))


def _piece(vocab: Vocab, token: int) -> bytes:
    piece = vocab.piece(token)
    # Byte tokens can give the marker's byte: as no text has it, another invalid byte serves as well.
    return piece.replace(MARKER, _INVALID) if piece else MARKER + vocab.detokenize([token])
