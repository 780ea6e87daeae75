"""Token ids: as int32 arrays, and as packed bytes.

Tree edges and lookups use packed bytes, four per token (little-endian int32): comparing bytes is faster than numpy
on short runs. numpy is imported by the first call that needs it: the server's parent process does without, so that
it starts sooner.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeAlias

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
