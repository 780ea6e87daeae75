"""Token ids: as int32 arrays, and as packed bytes.

Tree edges and lookups use packed bytes, four per token (little-endian int32): comparing bytes is faster than numpy
on short runs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int32]

WIDTH = 4
"""Bytes per packed token."""


def packed(tokens: Tokens) -> bytes:
    """Token ids as packed bytes."""
    return tokens.astype("<i4", copy=False).tobytes()


def unpacked(run: bytes | bytearray) -> Tokens:
    """Token ids from packed bytes, int32."""
    return np.frombuffer(bytes(run), dtype="<i4").astype(np.int32, copy=False)


def n_common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Number of leading items that two arrays share."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())
