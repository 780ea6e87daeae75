"""Host memory for the KV of segments."""

from __future__ import annotations

import mmap

import numpy as np

from llamaslot.base.kv_ops import Kv

_HUGE_PAGES_MIN_BYTES = 2**22
"""Size from which on numpy asks for huge pages."""


def new_kv(n_bytes: int) -> Kv:
    """Allocate `n_bytes` of uninitialized memory for KV. Raises `OSError` or `MemoryError`.

    numpy asks for huge pages for large arrays. The system has to find and clear each of them before its first byte
    is written, which takes several times as long as ordinary pages if free memory is fragmented, as on many virtual
    machines, while streams wait for the step. So large arrays are mapped here, in ordinary pages.
    """
    if n_bytes < _HUGE_PAGES_MIN_BYTES:
        return np.empty(n_bytes, dtype=np.uint8)
    return np.frombuffer(mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
