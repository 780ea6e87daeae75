"""Memory for KV off the pool, all of which is to come from here."""

from __future__ import annotations

import mmap

import numpy as np

from llamaslot.base.kv_ops import Kv

_HUGE_FROM = 2**22
"""Bytes of an array from which on numpy asks for huge pages."""


def new_kv(n_bytes: int) -> Kv:
    """So many bytes; raises `OSError` or `MemoryError` where they cannot be had.

    numpy asks the system for huge pages where an array is large. Those have to be found and cleared whole before
    the first byte is written, which takes several times as long as ordinary pages where memory is not free in large
    pieces, as on many virtual machines; and a stream may be waiting. So large ones have pages of their own.
    """
    if n_bytes < _HUGE_FROM:
        return np.empty(n_bytes, dtype=np.uint8)
    return np.frombuffer(mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
