"""Host memory: for the KV of segments, and what the C library keeps of it after it was freed."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from llamaslot.base.kv_ops import Kv

_MAPPED_MIN_BYTES = 2**17
"""Size from which on memory is mapped. There are too few smaller segments for their memory to matter."""


def new_kv(n_bytes: int) -> Kv:
    """Allocate `n_bytes` of uninitialized memory for KV. Raises `MemoryError`.

    Large arrays are mapped here, in ordinary pages, for two reasons:
    - The C library puts blocks of up to 32 MiB among others, so freeing them need not make the process smaller:
      with nine tenths of 350 MiB freed, none went back to the system. What is mapped goes back at once.
    - numpy asks for huge pages from 4 MiB on. The system has to find and clear each of them before its first byte
      is written, which takes several times as long as ordinary pages if free memory is fragmented, as on many
      virtual machines, while streams wait for the step.
    """
    if n_bytes >= _MAPPED_MIN_BYTES:
        try:
            return np.frombuffer(mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        except OSError:
            # The number of mappings is limited too (Linux: 65,530).
            pass
    return np.empty(n_bytes, dtype=np.uint8)


def trim_heap() -> None:
    """Return freed memory to the system; called after a start and a self-test, which free much.

    glibc keeps freed pages that lie below blocks in use, such as those of the logits that the self-test has read.
    Other C libraries have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
