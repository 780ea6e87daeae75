"""Runs of token ids: a growable buffer and the comparison of prefixes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llamaslot.core.backend import Tokens


class TokenBuffer:
    """A growable run of token ids with O(1) append.

    A view stays valid while tokens are only added; after `truncate`, later additions write over what it showed.
    """

    __slots__ = ("_data", "_length")

    def __init__(self, tokens: Iterable[int] | Tokens = ()) -> None:
        data = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, dtype=np.int32)
        self._data: Tokens = np.array(data, dtype=np.int32)
        self._length = len(self._data)

    def __len__(self) -> int:
        """Number of tokens."""
        return self._length

    def view(self, start: int = 0, end: int | None = None) -> Tokens:
        """The tokens `[start, end)` without a copy, int32."""
        return self._data[start : self._length if end is None else min(end, self._length)]

    def append(self, token: int) -> None:
        """Add one token."""
        self._reserve(1)
        self._data[self._length] = token
        self._length += 1

    def extend(self, tokens: Tokens) -> None:
        """Add a run of tokens."""
        self._reserve(len(tokens))
        self._data[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; keeping more than there are changes nothing."""
        self._length = min(self._length, length)

    def _reserve(self, extra: int) -> None:
        needed = self._length + extra
        if needed > len(self._data):
            grown = np.empty(max(needed, 2 * len(self._data), 64), dtype=np.int32)
            grown[: self._length] = self._data[: self._length]
            self._data = grown


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that two runs share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
