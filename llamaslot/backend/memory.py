"""Memory for KV that is kept off the pool."""

from __future__ import annotations

import mmap

import numpy as np

from llamaslot.core.backend import Kv


def new_kv(n_bytes: int) -> Kv:
    """So many bytes, in pages of their own.

    numpy asks the system for huge pages where an array is large. Those have to be found and cleared whole before
    the first byte is written, which takes several times as long as ordinary pages where memory is not free in large
    pieces, as on many virtual machines; and a stream may be waiting.
    """
    return np.frombuffer(mmap.mmap(-1, n_bytes), dtype=np.uint8)
