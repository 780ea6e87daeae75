"""Saved states: sequences, and partial states alone (checkpoints), in host memory; llama.cpp saves and loads them.

With the flag `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY` llama.cpp saves and loads only the partial state of a sequence:
recurrent states and the cells of sliding windows. Loading one replaces the sequence's own. llama.cpp has no call
that removes a partial state, so `strip` loads a blank one instead: for recurrent layers that of an empty sequence,
for windows that of one token, because loading an empty window has no effect.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp

from llamaslot.backend.memory import new_kv
from llamaslot.base.kv_ops import IllegalCallError, Kv, NotLoadedError, NotSavedError, Restore, Take
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
    """Checkpoints of one context, by number. Operations must have been checked."""

    def __init__(self, context: Any, kind: StateKind) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._kind = kind
        self._states: dict[int, Kv] = {}
        self._blanks: list[Kv] = []
        """Blank states that `strip` loads in this order."""
        self._one: Kv | None = None
        """The state of one token, for a model with a recurrent state."""

    def prepare(self, one: int, empty: int) -> None:
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

    def kv_of(self, checkpoint: int) -> Kv | None:
        """Return the bytes of a checkpoint; None if there is no such checkpoint."""
        return self._states.get(checkpoint)

    def put(self, checkpoint: int, state: Kv) -> None:
        """Add a checkpoint."""
        self._states[checkpoint] = state

    def take(self, operation: Take) -> None:
        """Save the state of a sequence as a checkpoint; raises `NotSavedError` if memory does not suffice."""
        try:
            self._states[operation.checkpoint] = self._saved(operation.src)
        except MemoryError as error:
            raise NotSavedError(operation.checkpoint) from error

    def restore(self, operation: Restore, end: int) -> None:
        """Load a checkpoint that was taken at `end` tokens into a sequence, and truncate the sequence to `end`.

        Raises `NotLoadedError` if memory does not suffice; the sequence is then empty.
        """
        seq = operation.dst
        if not self._load(seq, self._states[operation.checkpoint]):
            llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            raise NotLoadedError(operation.checkpoint)
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, end, -1):
            raise IllegalCallError(f"{operation}: the state does not belong to {end} tokens")

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

    def free(self, checkpoint: int) -> None:
        """Free a checkpoint."""
        del self._states[checkpoint]

    def _load(self, seq: int, state: Kv) -> bool:
        n_bytes = llama_cpp.llama_state_seq_set_data_ext(self._context, _pointer(state), len(state), seq, _PARTIAL)
        return bool(n_bytes == len(state))

    def _saved(self, seq: int) -> Kv:
        state = new_kv(self.n_bytes(seq))
        n_bytes = llama_cpp.llama_state_seq_get_data_ext(self._context, _pointer(state), len(state), seq, _PARTIAL)
        if not n_bytes or n_bytes != len(state):
            raise MemoryError(f"llama.cpp could not save the state of sequence {seq}")
        return state
