"""Page-locked memory: blocks never overlap, come back when they are not used any more, and keep the bound.

Chunks are ordinary memory here; ggml's calls are made with its buffer type for the CPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from llama_cpp._ggml import libggml

from llamaslot.backend import page_locked
from llamaslot.backend.host import new_kv
from llamaslot.backend.llama import library
from llamaslot.backend.page_locked import PageLockedMemory
from llamaslot.base.kv_ops import Kv

PAGE = 4096
CHUNK = 8 * PAGE
BOUND = 3 * CHUNK


class Chunks:
    """Chunks of this process, of which there are `n_left`."""

    def __init__(self, n_left: int = 100) -> None:
        self.n_left = n_left
        self.held: list[object] = []

    def __call__(self, n_bytes: int) -> int | None:
        if not self.n_left:
            return None
        self.n_left -= 1
        chunk = ctypes.create_string_buffer(n_bytes)
        self.held.append(chunk)
        return ctypes.addressof(chunk)


def taken(memory: PageLockedMemory, n_bytes: int) -> Kv | None:
    """A block, after a chunk was added for it if there was no room."""
    found = memory.take(n_bytes)
    if found is None:
        memory.wait()
        found = memory.take(n_bytes)
    return found


@given(st.lists(st.tuples(st.integers(1, CHUNK + 1), st.booleans(), st.integers(0, 50)), max_size=60))
def test_blocks_keep_their_bytes_until_nothing_refers_to_them(steps: list[tuple[int, bool, int]]) -> None:
    memory = PageLockedMemory(Chunks(), BOUND, CHUNK)
    kept: list[tuple[int, Kv]] = []
    for i, (n_bytes, keeps_a_view, victim) in enumerate(steps):
        block = taken(memory, n_bytes)
        if block is not None:
            assert (len(block), block.flags.writeable) == (n_bytes, True)
            block[:] = i
            kept.append((i, block[n_bytes // 2 :] if keeps_a_view else block))
        elif kept:
            del kept[victim % len(kept)]
        del block
        assert all((each == number).all() for number, each in kept)
        assert memory.n_bytes <= BOUND
        assert sum(each.nbytes for _, each in kept) <= memory.n_bytes
    kept.clear()
    whole = [taken(memory, CHUNK) for _ in range(BOUND // CHUNK)]
    assert all(each is not None for each in whole), "gaps were not joined"
    assert taken(memory, 1) is None


def test_threads_never_get_the_same_block() -> None:
    memory = PageLockedMemory(Chunks(), BOUND, CHUNK)
    faults: list[int] = []

    def work(number: int) -> None:
        chance = np.random.default_rng(number)
        kept: list[Kv] = []
        for _ in range(500):
            block = memory.take(int(chance.integers(1, CHUNK // 2)))
            if block is not None:
                block[:] = number
                kept.append(block)
            if block is None or len(kept) > 3:
                kept = kept[1:]
            faults.extend(number for each in kept if not (each == number).all())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    memory.wait()
    assert not faults
    assert 0 < memory.n_bytes <= BOUND


def test_after_a_chunk_that_cannot_be_had_none_is_tried() -> None:
    chunks = Chunks(n_left=1)
    memory = PageLockedMemory(chunks, BOUND, CHUNK)
    kept = taken(memory, CHUNK)
    assert kept is not None
    assert taken(memory, PAGE) is None
    chunks.n_left = 1
    assert taken(memory, PAGE) is None
    assert (chunks.n_left, memory.n_bytes) == (1, CHUNK)
    del kept
    assert memory.take(PAGE) is not None, "what there is stays in use"


def cpu_buffers() -> int:
    """ggml's buffer type for the CPU."""
    libggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    return int(libggml.ggml_backend_cpu_buffer_type())


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageLockedMemory]:
    """Memory of ggml's, which is used for all states."""
    monkeypatch.setattr(page_locked, "MIN_BYTES", 1)
    made = PageLockedMemory(library.buffer_allocator(cpu_buffers()), 2**24, 2**22)
    monkeypatch.setattr(page_locked, "_memory", [made])
    made.add_first()
    made.wait()
    yield made
    made.wait()


def test_ggml_allocates_the_chunks(memory: PageLockedMemory) -> None:
    kv = new_kv(10_000)
    kv[:] = 7
    assert (memory.n_bytes, page_locked.n_bytes()) == (2**22, 2**22)
    again = memory.take(2**22 - 3 * PAGE)
    assert again is not None
    assert again.ctypes.data - kv.ctypes.data == 3 * PAGE
    assert new_kv(2**21) is not None, "ordinary memory"


def test_memory_that_ggml_returns_instead_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libggml, "ggml_backend_buffer_get_type", lambda _: 0, raising=False)
    assert library.buffer_allocator(cpu_buffers())(PAGE) is None


@pytest.mark.cpu_only
def test_a_cpu_has_none() -> None:
    library.initialise()
    assert library.page_locked_allocator() is None


def test_little_ram_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked, "_memory", [])
    page_locked.use(Chunks(), 2**20)
    page_locked.use(None, 2**40)
    assert page_locked.take(2**21) is None
    assert page_locked.n_bytes() == 0


def test_states_of_a_process_go_to_page_locked_memory_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked, "_memory", [])
    monkeypatch.setattr(page_locked, "_CHUNK_BYTES", 2**21)
    chunks = Chunks()
    # A quarter of 16 MiB are two chunks.
    page_locked.use(chunks, 2**24)
    page_locked.wait()
    states = []
    for _ in range(6):
        states.append(new_kv(2**20))
        page_locked.wait()
    locked = [ctypes.addressof(chunk) for chunk in chunks.held]  # type: ignore[arg-type]
    n_in_locked = sum(any(at <= each.ctypes.data < at + 2**21 for at in locked) for each in states)
    assert page_locked.n_bytes() == 2 * 2**21
    assert n_in_locked == 4, "one is in ordinary memory, because the second chunk was not there yet"
