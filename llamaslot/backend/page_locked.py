"""Page-locked host memory for KV, which a GPU copies at the rate of its link (fact 38).

    chunk:  [ state ][ state ][     gap     ][ state ][ gap ]

States get blocks of a few large chunks, each in the first gap that suffices. Four rules:

- Where no gap suffices, the state goes to ordinary memory, and a thread adds a chunk for later ones: that takes
  long (CUDA: tens of milliseconds), and the model's thread must not wait.
- A block is free once nothing refers to its array any more. That may be noticed on any thread, and by the garbage
  collector in the middle of `take`. So it is only noted, and the next `take` makes a gap of it.
- Chunks are kept to the end of the process: to free one, the driver waits for all that the GPU does. The system can
  use them for nothing else, so they have at most a quarter of what is free at the start.
- Once a chunk cannot be had, no other is tried.

Budgets of the RAM tier count states, whatever memory they are in. Nothing here knows llama.cpp.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from llamaslot.base.kv_ops import Kv

MIN_BYTES = 2**20
"""A smaller state is copied quickly from any memory."""
_CHUNK_BYTES = 2**28
"""Room for three segments of 512 tokens of an 8B model. Larger states go to ordinary memory."""
_MAX_BYTES = 2**31
_MAX_FREE_FRACTION = 0.25
"""Most that is page-locked, and as a fraction of the memory that is free when it is first used."""
_ALIGNMENT = 4096
"""Bytes of a page."""

AllocateChunk: TypeAlias = Callable[[int], int | None]
"""Returns the address of so many bytes that are never freed; None if there are none."""


class PageLockedMemory:
    """Blocks of at most `max_bytes` in chunks of `chunk_bytes`; `allocate` is called on threads of its own.

    Methods may be called from any thread.
    """

    def __init__(self, allocate: AllocateChunk, max_bytes: int, chunk_bytes: int) -> None:
        self._allocate = allocate
        self._max_bytes = max_bytes
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._gaps: list[tuple[int, int, int]] = []
        """Number of the chunk, start and end address of each gap, in order. No two gaps of a chunk touch."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """Blocks that nothing refers to any more."""
        self._n_chunks = 0
        self._adding: threading.Thread | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes that are page-locked, in use or not."""
        return self._n_chunks * self._chunk_bytes

    def take(self, n_bytes: int) -> Kv | None:
        """Return an array of uninitialized memory; None if no gap suffices, so that more is allocated for later."""
        size = -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            while self._returned:
                self._free(self._returned.popleft())
            found = next((i for i, (_, start, end) in enumerate(self._gaps) if end - start >= size), None)
            if found is None:
                self._add_chunk(size)
                return None
            chunk, start, end = self._gaps[found]
            self._gaps[found : found + 1] = [(chunk, start + size, end)] if start + size < end else []
        block = (ctypes.c_uint8 * n_bytes).from_address(start)
        # Arrays and views refer to the block, so it lives as long as the last of them.
        weakref.finalize(block, self._returned.append, (chunk, start, start + size)).atexit = False
        return np.frombuffer(memoryview(block), dtype=np.uint8)

    def add_first(self) -> None:
        """Have the first chunk allocated before a state needs it."""
        with self._lock:
            self._add_chunk(_ALIGNMENT)

    def wait(self) -> None:
        """Wait for the chunk that is being allocated."""
        if (adding := self._adding) is not None:
            adding.join()

    def _free(self, block: tuple[int, int, int]) -> None:
        """Make a gap of a block, joined with those beside it."""
        chunk, start, end = block
        after = [each for each in self._gaps if each[:2] > (chunk, start)]
        before = self._gaps[: len(self._gaps) - len(after)]
        if before and before[-1][0] == chunk and before[-1][2] == start:
            start = before.pop()[1]
        if after and after[0][0] == chunk and after[0][1] == end:
            end = after.pop(0)[2]
        self._gaps = [*before, (chunk, start, end), *after]

    def _add_chunk(self, size: int) -> None:
        fits = size <= self._chunk_bytes and self.n_bytes + self._chunk_bytes <= self._max_bytes
        if fits and self._adding is None:
            adding = threading.Thread(target=self._allocate_chunk, name="llamaslot-page-locked", daemon=True)
            try:
                adding.start()
            except RuntimeError:
                # The number of threads is limited, too.
                self._max_bytes = 0
            else:
                self._adding = adding

    def _allocate_chunk(self) -> None:
        address = self._allocate(self._chunk_bytes)
        with self._lock:
            self._adding = None
            if address is None:
                self._max_bytes = 0
                return
            self._gaps.append((self._n_chunks, address, address + self._chunk_bytes))
            self._n_chunks += 1


_memory: list[PageLockedMemory] = []
"""Of this process; empty if there is none. Not passed around, since states come from many places (`new_kv`)."""


def use(allocate: AllocateChunk | None, free_bytes: int) -> None:
    """Use page-locked memory from now on, on a host with `free_bytes`; None for ordinary memory alone.

    What an earlier call began to use stays in use, because its chunks cannot be given back.
    """
    max_bytes = min(_MAX_BYTES, int(free_bytes * _MAX_FREE_FRACTION))
    if allocate is not None and max_bytes >= _CHUNK_BYTES and not _memory:
        _memory.append(PageLockedMemory(allocate, max_bytes, _CHUNK_BYTES))
        _memory[0].add_first()


def wait() -> None:
    """Wait for the chunk that is being allocated: what is measured without it, is not what states take later."""
    for each in _memory:
        each.wait()


def n_bytes() -> int:
    """Return the bytes that are page-locked, in use or not."""
    return sum(each.n_bytes for each in _memory)


def take(n_bytes: int) -> Kv | None:
    """Return page-locked memory for a state; None if it is to go to ordinary memory."""
    return _memory[0].take(n_bytes) if _memory and n_bytes >= MIN_BYTES else None
