"""Saved states in host memory: sequences, their segments, and partial states alone (checkpoints).

llama.cpp saves and loads whole sequences. In a unified pool both go through the scratch sequence, which is empty
before and after: a range of a sequence is copied to it and saved there, and what is loaded into it is copied on
(fact 8). A partial state that is copied along with the range is stripped before saving.

In a partitioned pool each sequence has its own stream, and cannot be copied in part (fact 3). So a sequence is
saved whole, and the rows of a range are cut out on the host. To load segments, they are joined with what the
sequence holds, and all of it is loaded.

With the flag `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` llama.cpp saves and loads only the partial state of a sequence:
recurrent states and the cells of sliding windows. Loading one replaces the sequence's own. llama.cpp has no call
that removes a partial state, so `strip` loads a blank one instead: for recurrent layers that of an empty sequence,
for windows that of one token, because loading an empty window has no effect.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp

from llamaslot.backend.host import new_kv
from llamaslot.backend.llama.positions import Positions, saved_positions
from llamaslot.backend.state_format import Rows, join, rows_of_sequence
from llamaslot.base.kv_ops import Copy, IllegalCallError, Kv, NotLoadedError, NotSavedError, Restore, Take
from llamaslot.base.model import StateKind

_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


def save_sequence(context: Any, seq: int) -> Kv:
    """Return what a sequence holds; raises `MemoryError`."""
    state = new_kv(sequence_bytes(context, seq))
    n_bytes = llama_cpp.llama_state_seq_get_data(context, _pointer(state), len(state), seq)
    # Both calls return 0 if llama.cpp runs out of memory.
    if not n_bytes or n_bytes != len(state):
        raise MemoryError(f"llama.cpp could not save sequence {seq}")
    return state


def load_sequence(context: Any, seq: int, state: Kv) -> bool:
    """Replace what a sequence holds. False, with unknown content, if memory or free cells do not suffice."""
    return bool(llama_cpp.llama_state_seq_set_data(context, _pointer(state), len(state), seq) == len(state))


def sequence_bytes(context: Any, seq: int) -> int:
    """Return the bytes that saving a sequence takes."""
    return int(llama_cpp.llama_state_seq_get_size(context, seq))


def _pointer(state: Kv) -> Any:
    """Return the address of the bytes for llama.cpp's calls."""
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class PartialStates:
    """Checkpoints of one context. Operations must have been checked.

    Those of an `earlier` context of the same model are taken over.
    """

    def __init__(self, context: Any, kind: StateKind, *, earlier: PartialStates | None = None) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._kind = kind
        self.states: dict[int, Kv] = earlier.states if earlier is not None else {}
        """The checkpoints by number."""
        self._blanks: list[Kv] = earlier._blanks if earlier is not None else []
        """Blank states that `strip` loads in this order."""
        self._one: Kv | None = earlier._one if earlier is not None else None
        """The state of one token, for a model with a recurrent state."""

    def save_blanks(self, one: int, empty: int) -> None:
        """Save the blank states. Sequence `one` must hold one token, `empty` none."""
        if self._kind.has_window:
            self._blanks.append(self._saved(one))
        if self._kind.has_recurrent_state:
            self._blanks.append(self._saved(empty))
            self._one = self._saved(one)

    def n_bytes(self, seq: int) -> int:
        """Return the bytes that a checkpoint of a sequence would take now."""
        n_bytes: int = llama_cpp.llama_state_seq_get_size_ext(self._context, seq, _PARTIAL)
        return n_bytes

    def take(self, operation: Take) -> None:
        """Save the state of a sequence as a checkpoint; raises `NotSavedError` if memory does not suffice."""
        try:
            self.states[operation.checkpoint] = self._saved(operation.src)
        except MemoryError as error:
            raise NotSavedError(operation.checkpoint) from error

    def restore(self, operation: Restore, end: int) -> None:
        """Load a checkpoint into a sequence, and truncate the sequence to position `end`, where it was taken.

        Raises `NotLoadedError` if memory does not suffice; the sequence must then be emptied.
        """
        seq = operation.dst
        if not self._load(seq, self.states[operation.checkpoint]):
            raise NotLoadedError(operation.checkpoint)
        # A later recurrent state must not go back (fact 44): it would to one that was never in its place.
        is_later = self._kind.has_recurrent_state and llama_cpp.llama_memory_seq_pos_max(self._memory, seq) >= end
        if is_later or not llama_cpp.llama_memory_seq_rm(self._memory, seq, end, -1):
            raise IllegalCallError(f"{operation}: the state does not belong to position {end}")

    def settle(self, seq: int) -> None:
        """Make the state to which a sequence was rolled back the one that llama.cpp copies (fact 44).

        Raises `MemoryError` if memory does not suffice.
        """
        if not self._load(seq, self._saved(seq)):
            raise MemoryError(f"the state of sequence {seq} cannot be saved and loaded again")

    def strip(self, seq: int) -> None:
        """Remove the partial state of a sequence, so that its other cells can be truncated at any position.

        Raises `MemoryError` if memory does not suffice, or if a full window cache has no cell for the one token.
        """
        for state in self._blanks:
            if not self._load(seq, state):
                raise MemoryError(f"the state of sequence {seq} cannot be removed")

    def occupy_all(self, seqs: Sequence[int]) -> None:
        """Give each sequence a recurrent state, so that no state is free. Called after a failed step.

        llama.cpp may take a free state for clear although it is not, until it has been used again (fact 34). `seqs`
        are all sequences; the caller strips or empties them next. Does nothing for models without recurrent states.
        """
        if self._one is None:
            return
        for seq in seqs:
            if not self._load(seq, self._one):
                raise MemoryError(f"sequence {seq} cannot be given a state")

    def _load(self, seq: int, state: Kv) -> bool:
        n_bytes = llama_cpp.llama_state_seq_set_data_ext(self._context, _pointer(state), len(state), seq, _PARTIAL)
        return bool(n_bytes == len(state))

    def _saved(self, seq: int) -> Kv:
        state = new_kv(self.n_bytes(seq))
        n_bytes = llama_cpp.llama_state_seq_get_data_ext(self._context, _pointer(state), len(state), seq, _PARTIAL)
        if not n_bytes or n_bytes != len(state):
            raise MemoryError(f"llama.cpp could not save the state of sequence {seq}")
        return state


class PoolTransfer:
    """Moves KV in a unified pool. `strip` removes the partial state of a sequence. Methods raise `MemoryError`.

    Without a scratch sequence it can only copy.
    """

    def __init__(
        self, context: Any, scratch: int | None, strip: Callable[[int], None], positions: Positions
    ) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._scratch = -1 if scratch is None else scratch
        self._strip = strip
        self._positions = positions

    def save(self, src: int, wanted: range) -> Kv:
        """Return the KV of these tokens of a sequence, as a segment."""
        with self._in_scratch(src, wanted):
            return save_sequence(self._context, self._scratch)

    def size(self, src: int, wanted: range) -> int:
        """Return the bytes that `save` would return, without the memory for them."""
        with self._in_scratch(src, wanted):
            return sequence_bytes(self._context, self._scratch)

    def load(self, dst: int, start: int, parts: Sequence[tuple[Kv, range, range]]) -> None:
        """Append parts, each a segment, its tokens and the wanted ones, to a sequence of `start` tokens."""
        for state, tokens, wanted in parts:
            positions = saved_positions(state, tokens, wanted)[0] if self._positions.has_tiles else wanted
            try:
                if not load_sequence(self._context, self._scratch, state):
                    raise MemoryError(f"llama.cpp could not load {len(state)} bytes")
                self._copy(self._scratch, dst, positions)
            finally:
                llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)

    def copy(self, operation: Copy) -> None:
        """Append tokens of a sequence to another one, which then shares their cells."""
        self._copy(operation.src, operation.dst, self._positions.at(operation.src, operation.start, operation.end))

    def end_changes(self) -> None:
        """Do nothing, since nothing is kept."""

    @contextmanager
    def _in_scratch(self, src: int, tokens: range) -> Iterator[None]:
        """Copy a range, without a partial state, to the scratch sequence; empty that afterwards."""
        self._copy(src, self._scratch, self._positions.at(src, tokens.start, tokens.stop))
        try:
            self._strip(self._scratch)
            yield
        finally:
            llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)

    def _copy(self, src: int, dst: int, positions: range) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, src, dst, positions.start, positions.stop)


class StreamTransfer:
    """Moves KV in a partitioned pool. `length_of` returns the length of a sequence. Methods raise `MemoryError`."""

    def __init__(self, context: Any, length_of: Callable[[int], int]) -> None:
        self._context = context
        self._n_streams = int(llama_cpp.llama_n_seq_max(context))
        self._length_of = length_of
        self._saved: tuple[int, int, Kv] | None = None
        """The sequence saved last, its length and bytes: its segments are often saved one after another."""

    def save(self, src: int, wanted: range) -> Kv:
        """Return the KV of these tokens of a sequence, as a segment."""
        return join([self._rows(src, wanted)])

    def size(self, src: int, wanted: range) -> int:
        """Return the bytes that `save` would return."""
        return len(self.save(src, wanted))

    def load(self, dst: int, start: int, parts: Sequence[tuple[Kv, range, range]]) -> None:
        """Append parts, as in `PoolTransfer`, to a sequence of `start` tokens."""
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
        length = self._length_of(seq)
        if self._saved is None or self._saved[:2] != (seq, length):
            self._saved = seq, length, save_sequence(self._context, seq)
        state = self._saved[2]
        return rows_of_sequence(state, range(length), wanted, stream=seq, n_streams=self._n_streams)
