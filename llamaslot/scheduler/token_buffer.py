"""A growable run of token ids."""

from __future__ import annotations

import numpy as np

from llamaslot.base.tokens import Tokens


class TokenBuffer:
    """Token ids with O(1) append; a view stays valid while tokens are added."""

    __slots__ = ("_data", "_length")

    def __init__(self, tokens: Tokens) -> None:
        self._data: Tokens = np.array(tokens, dtype=np.int32)
        self._length = len(self._data)

    def __len__(self) -> int:
        """Number of tokens."""
        return self._length

    def view(self, start: int = 0, end: int | None = None) -> Tokens:
        """The tokens `[start, end)` without a copy, int32."""
        return self._data[start : self._length if end is None else min(end, self._length)]

    def append(self, token: int) -> None:
        """Add one token."""
        if self._length == len(self._data):
            grown = np.empty(max(2 * self._length, 64), dtype=np.int32)
            grown[: self._length] = self._data
            self._data = grown
        self._data[self._length] = token
        self._length += 1
