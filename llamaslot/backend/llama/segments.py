"""Segments in host memory: KV that is saved from the context and loaded back.

llama.cpp saves and loads whole sequences. In a unified pool both go through the scratch sequence, which is empty
before and after: a range of a sequence is copied to it and saved there, and what is loaded into it is copied on
(fact 8). A partial state that is copied along with the range is stripped before saving.

In a partitioned pool each sequence has its own stream, and cannot be copied in part (fact 3). So a sequence is
saved whole, and the rows of a range are cut out on the host. To load segments, they are joined with what the
sequence holds, and all of it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import llama_cpp

from llamaslot.backend.llama.saved_states import load_sequence, save_sequence, sequence_bytes
from llamaslot.backend.state_format import Rows, join, rows_of_sequence
from llamaslot.base.kv_ops import Copy, Kv, Load, NotLoadedError, NotSavedError, Save


class SegmentStore:
    """Segments by number, from any context of the model. Operations must have been checked."""

    def __init__(self) -> None:
        self.positions: dict[int, range] = {}
        """Token positions of each segment in host memory."""
        self._kv: dict[int, Kv] = {}

    def kv_of(self, segment: int) -> Kv | None:
        """Return the KV of a segment; None if there is no such segment."""
        return self._kv.get(segment)

    def put(self, segment: int, positions: range, kv: Kv) -> None:
        """Add a segment of KV at these token positions."""
        self._kv[segment] = kv
        self.positions[segment] = positions

    def save(self, operation: Save, transfer: Transfer) -> None:
        """Save a range of a sequence; raises `NotSavedError` if memory does not suffice."""
        wanted = range(operation.start, operation.end)
        try:
            kv = transfer.save(operation.src, wanted)
        except MemoryError as error:
            raise NotSavedError(operation.segment) from error
        self.put(operation.segment, wanted, kv)

    def load(self, operation: Load, transfer: Transfer) -> None:
        """Append parts of segments to a sequence; raises `NotLoadedError`.

        llama.cpp does not report whether memory or free cells did not suffice.
        """
        parts = [
            (self._kv[number], self.positions[number], range(start, end)) for number, start, end in operation.ranges
        ]
        try:
            transfer.load(operation.dst, operation.start, parts)
        except (MemoryError, ValueError) as error:
            # Rows of an unknown format cannot be joined.
            raise NotLoadedError(operation.parts[0][0]) from error

    def free(self, segment: int) -> None:
        """Free a segment."""
        del self._kv[segment], self.positions[segment]


class Transfer(Protocol):
    """Moves KV between sequences, and between them and the host. Raises `MemoryError`."""

    def save(self, src: int, wanted: range) -> Kv:
        """Return the KV of these positions of a sequence, as a segment."""

    def size(self, src: int, wanted: range) -> int:
        """Return the bytes that `save` would return."""

    def load(self, dst: int, start: int, parts: Sequence[tuple[Kv, range, range]]) -> None:
        """Append parts, each a segment, its positions and the wanted ones, to a sequence of `start` tokens."""

    def copy(self, operation: Copy) -> None:
        """Append tokens of a sequence to another one."""

    def end_changes(self) -> None:
        """Free what was kept between operations."""


class PoolTransfer:
    """`Transfer` in a unified pool. `strip` removes the partial state of a sequence.

    Without a scratch sequence it can only copy.
    """

    def __init__(self, context: Any, scratch: int | None, strip: Callable[[int], None]) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._scratch = -1 if scratch is None else scratch
        self._strip = strip

    def save(self, src: int, wanted: range) -> Kv:
        """Return the KV of these positions of a sequence, as a segment."""
        with self._in_scratch(src, wanted):
            return save_sequence(self._context, self._scratch)

    def size(self, src: int, wanted: range) -> int:
        """Return the bytes that `save` would return."""
        with self._in_scratch(src, wanted):
            return sequence_bytes(self._context, self._scratch)

    def load(self, dst: int, start: int, parts: Sequence[tuple[Kv, range, range]]) -> None:
        """Append to a sequence of `start` tokens."""
        for state, _, wanted in parts:
            try:
                if not load_sequence(self._context, self._scratch, state):
                    raise MemoryError(f"llama.cpp could not load {len(state)} bytes")
                self.copy(Copy(self._scratch, dst, wanted.start, wanted.stop))
            finally:
                llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)

    def copy(self, operation: Copy) -> None:
        """Append tokens of a sequence to another one, which then shares their cells."""
        llama_cpp.llama_memory_seq_cp(self._memory, operation.src, operation.dst, operation.start, operation.end)

    def end_changes(self) -> None:
        """Do nothing, since nothing is kept."""

    @contextmanager
    def _in_scratch(self, src: int, wanted: range) -> Iterator[None]:
        """Copy a range, without a partial state, to the scratch sequence; empty that afterwards."""
        llama_cpp.llama_memory_seq_cp(self._memory, src, self._scratch, wanted.start, wanted.stop)
        try:
            self._strip(self._scratch)
            yield
        finally:
            llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)


class StreamTransfer:
    """`Transfer` in a partitioned pool. `lengths` returns the lengths of all sequences."""

    def __init__(self, context: Any, lengths: Callable[[], Sequence[int]]) -> None:
        self._context = context
        self._n_streams = int(llama_cpp.llama_n_seq_max(context))
        self._lengths = lengths
        self._saved: tuple[int, int, Kv] | None = None
        """The sequence saved last, its length and bytes: its segments are often saved one after another."""

    def save(self, src: int, wanted: range) -> Kv:
        """Return the KV of these positions of a sequence, as a segment."""
        return join([self._rows(src, wanted)])

    def size(self, src: int, wanted: range) -> int:
        """Return the bytes that `save` would return."""
        return len(self.save(src, wanted))

    def load(self, dst: int, start: int, parts: Sequence[tuple[Kv, range, range]]) -> None:
        """Append to a sequence of `start` tokens."""
        self._append(dst, start, [rows_of_sequence(*part) for part in parts])

    def copy(self, operation: Copy) -> None:
        """Append tokens of a sequence to another one, in its own cells."""
        wanted = range(operation.start, operation.end)
        self._append(operation.dst, operation.start, [self._rows(operation.src, wanted)])

    def end_changes(self) -> None:
        """Free the bytes of the sequence saved last."""
        self._saved = None

    def _append(self, dst: int, start: int, rows: list[Rows]) -> None:
        own = [self._rows(dst, range(start))] if start else []
        state = join(own + rows, n_streams=self._n_streams)
        # Free the saved sequences to which these rows belong before loading, to limit the use of memory.
        self._saved = None
        own.clear()
        rows.clear()
        if not load_sequence(self._context, dst, state):
            raise MemoryError(f"llama.cpp could not load {len(state)} bytes")

    def _rows(self, seq: int, wanted: range) -> Rows:
        length = self._lengths()[seq]
        if self._saved is None or self._saved[:2] != (seq, length):
            self._saved = seq, length, save_sequence(self._context, seq)
        state = self._saved[2]
        return rows_of_sequence(state, range(length), wanted, stream=seq, n_streams=self._n_streams)
