"""llama.cpp's calls that save whole sequences to host memory and load them."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from llamaslot.backend.memory import new_kv
from llamaslot.base.kv_ops import Kv


def save(context: Any, seq: int) -> Kv:
    """Return what a sequence holds; raises `MemoryError`."""
    state = new_kv(size_of(context, seq))
    n_bytes = llama_cpp.llama_state_seq_get_data(context, pointer(state), len(state), seq)
    # Both calls return 0 if llama.cpp runs out of memory.
    if not n_bytes or n_bytes != len(state):
        raise MemoryError(f"llama.cpp could not save sequence {seq}")
    return state


def load(context: Any, seq: int, state: Kv) -> bool:
    """Replace what a sequence holds. False, with unknown content, if memory or free cells do not suffice."""
    return bool(llama_cpp.llama_state_seq_set_data(context, pointer(state), len(state), seq) == len(state))


def size_of(context: Any, seq: int) -> int:
    """Return the bytes that saving a sequence takes."""
    return int(llama_cpp.llama_state_seq_get_size(context, seq))


def pointer(state: Kv) -> Any:
    """Return the address of the bytes for llama.cpp's calls."""
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
