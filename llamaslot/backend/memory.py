"""Host memory for the KV of segments, allocated so that it goes back to the system once it is freed."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from llamaslot.base.kv_ops import Kv

_MAPPED_MIN_BYTES = 2**17
"""Smallest allocation that is mapped. Smaller segments are too few for their memory to matter."""


def new_kv(n_bytes: int) -> Kv:
    """Allocate `n_bytes` of uninitialized memory for KV. Raises `MemoryError`.

    Large arrays are mapped in ordinary pages, for two reasons:
    - The C library puts blocks of up to 32 MiB among others, so freeing them may not shrink the process: after
      freeing nine tenths of 350 MiB, nothing had gone back to the system. Mapped memory goes back at once.
    - numpy requests huge pages for 4 MiB and more. The system has to find and clear each of them before its first
      byte is written. If free memory is fragmented, as on many virtual machines, that takes several times as long
      as with ordinary pages, while decoding requests wait for the step.
    """
    if n_bytes >= _MAPPED_MIN_BYTES:
        try:
            return np.frombuffer(mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        except OSError:
            # The number of mappings is limited (Linux: 65,530).
            pass
    return np.empty(n_bytes, dtype=np.uint8)


def trim_heap() -> None:
    """Return freed memory to the system. Called after the start and after a self-test, which free much memory.

    glibc keeps freed pages that lie below blocks in use, such as those of the logits that the self-test has read.
    Other C libraries have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
