"""Segments in host memory: KV that is saved from the pool and loaded back.

llama.cpp saves and loads whole sequences, so both go through a scratch sequence, which holds nothing before and
after: a range of a sequence is copied to it to be saved, and what is loaded into it is copied on (fact 8). A
partial state that comes along with the range is stripped before it is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp

from llamaslot.backend.llama import saved_sequences
from llamaslot.base.kv_ops import Kv, Load, NotLoadedError, NotSavedError, Save


class SegmentStore:
    """The segments of one context by number; operations must have been checked."""

    def __init__(self, context: Any) -> None:
        self.positions: dict[int, range] = {}
        """Token positions of each segment in host memory."""
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._states: dict[int, Kv] = {}

    def n_bytes(self, operation: Save, strip: Callable[[int], None]) -> int:
        """Size of the segment that an operation would save."""
        with self._range_in_scratch(operation, strip):
            return saved_sequences.size_of(self._context, operation.scratch)

    def kv_of(self, segment: int) -> Kv | None:
        """Return the KV of a segment, None if there is no such segment."""
        return self._states.get(segment)

    def put(self, segment: int, positions: range, state: Kv) -> None:
        """Add a segment of KV at these token positions."""
        self._states[segment] = state
        self.positions[segment] = positions

    def save(self, operation: Save, strip: Callable[[int], None]) -> None:
        """Save a range of a sequence; raises `NotSavedError` if there is no memory for it.

        `strip` removes the partial state that llama.cpp copies along with the range from the scratch sequence.
        """
        try:
            with self._range_in_scratch(operation, strip):
                state = saved_sequences.save(self._context, operation.scratch)
        except MemoryError as error:
            raise NotSavedError(operation.segment) from error
        self.put(operation.segment, range(operation.start, operation.end), state)

    def load(self, operation: Load) -> None:
        """Load a segment, and copy the wanted range of it to a sequence.

        Raises `NotLoadedError` if llama.cpp has no memory for it, or the pool too few free cells for the whole
        segment: llama.cpp does not tell which.
        """
        state = self._states[operation.segment]
        start, end, scratch = operation.start, operation.end, operation.scratch
        if not saved_sequences.load(self._context, scratch, state):
            llama_cpp.llama_memory_seq_rm(self._memory, scratch, -1, -1)
            raise NotLoadedError(operation.segment)
        llama_cpp.llama_memory_seq_cp(self._memory, scratch, operation.dst, start, end)
        llama_cpp.llama_memory_seq_rm(self._memory, scratch, -1, -1)

    def free(self, segment: int) -> None:
        """Free a segment."""
        del self._states[segment], self.positions[segment]

    @contextmanager
    def _range_in_scratch(self, operation: Save, strip: Callable[[int], None]) -> Iterator[None]:
        """Give the scratch sequence the range that an operation saves, without a partial state."""
        start, end, scratch = operation.start, operation.end, operation.scratch
        llama_cpp.llama_memory_seq_cp(self._memory, operation.src, scratch, start, end)
        try:
            strip(scratch)
            yield
        finally:
            llama_cpp.llama_memory_seq_rm(self._memory, scratch, -1, -1)
