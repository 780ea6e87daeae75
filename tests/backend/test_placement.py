"""The cell map against llama.cpp itself: every cell of the pool, its position and its holders.

llama.cpp tells nobody where its tokens are, but with `LLAMA_KV_CACHE_DEBUG=3` in the environment when a context is
made, `llama_kv_cache::find_slot` logs the whole pool when it looks for free cells: at each decode and each load.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from llamaslot.kvcache.cells import CellMap

from llamaslot.backend.llama import library
from llamaslot.base.kv_ops import IllegalCallError, Piece
from tests.conftest import LONG

N_CTX = 256
N_SEQS = 5
N_UBATCH = 32
"""Fewer than a batch may have, so that llama.cpp splits some."""
PROBE = N_SEQS - 1
"""The sequence by which the last state of a run is seen."""

_HEADER = re.compile(r"find_slot: stream\[0\], n = +(\d+), used = +(\d+), head = +(\d+), size = +(\d+)")

seqs = st.integers(0, N_SEQS - 2)
shares = st.floats(0, 1)


@dataclass(frozen=True)
class Pool:
    """What `find_slot` logged: per cell the position (-1: free) and the one holder (-1: none, or several)."""

    high_water: int
    n_used: int
    head: int
    positions: list[int]
    holders: list[int]


logged: list[str] = []
"""What llama.cpp logs, debug lines included."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def log(_level: int, text: bytes | None, _user: Any) -> None:
    logged.append((text or b"").decode(errors="replace"))


class Llama:
    """A context with room for every output, called without checks."""

    def __init__(self, model: Any) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_CTX, N_UBATCH
        params.n_seq_max = params.n_outputs_max = N_SEQS
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(N_CTX, 0, 1)
        self.pool: Pool | None = None
        """The pool as it was before the last decode or load."""

    def decode(self, runs: list[tuple[int, int, int]]) -> int:
        """Compute runs of (sequence, first position, tokens)."""
        places = [(seq, start + i) for seq, start, n_tokens in runs for i in range(n_tokens)]
        for i, (seq, position) in enumerate(places):
            self.batch.token[i], self.batch.pos[i] = 97, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, seq
            self.batch.logits[i] = i == len(places) - 1
        self.batch.n_tokens = len(places)
        return self._observed(lambda: llama_cpp.llama_decode(self.context, self.batch))

    def save(self, seq: int) -> Any:
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self.context, seq))()
        assert llama_cpp.llama_state_seq_get_data(self.context, state, len(state), seq) == len(state)
        return state

    def load(self, seq: int, state: Any) -> int:
        return self._observed(lambda: llama_cpp.llama_state_seq_set_data(self.context, state, len(state), seq))

    def remove(self, seq: int, start: int, end: int = -1) -> None:
        assert llama_cpp.llama_memory_seq_rm(self.memory, seq, start, end)

    def copy(self, src: int, dst: int, start: int, end: int) -> None:
        llama_cpp.llama_memory_seq_cp(self.memory, src, dst, start, end)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, False)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)

    def _observed(self, call: Callable[[], int]) -> int:
        logged.clear()
        answer = call()
        self.pool = _parsed([line for line in map(str.strip, logged) if line])
        return answer


def _parsed(lines: list[str]) -> Pool | None:
    """The first pool among the lines: a header, the grid of holders, the grid of positions."""
    for at, line in enumerate(lines):
        header = _HEADER.search(line)
        if header:
            high_water, n_used, head, size = map(int, header.groups())
            holders = [int(c) if c.isdigit() else -1 for c in lines[at + 1] if c in ".M0123456789"]
            positions = [-1 if cell == "." else int(cell) for cell in lines[at + 2].replace("*", " ").split()]
            assert len(holders) == len(positions) == size
            return Pool(high_water, n_used, head, positions, holders)
    return None


class PlacementMachine(RuleBasedStateMachine):
    """Whatever is done to sequences, at the next decode or load llama.cpp's pool is the map's."""

    llama: Llama

    def __init__(self) -> None:
        super().__init__()
        self.llama.clear()
        self.map = CellMap(N_CTX, N_SEQS)
        self.states: dict[int, tuple[Any, range]] = {}

    def teardown(self) -> None:
        if self.map.n_used < N_CTX:
            self.run([(PROBE, 1)])

    @rule(runs=st.dictionaries(seqs, st.integers(1, 24), min_size=1))
    def decode(self, runs: dict[int, int]) -> None:
        self.run(list(runs.items()))

    @rule(seq=seqs, share=shares)
    def remove(self, seq: int, share: float) -> None:
        keep = int(share * self.length(seq))
        self.llama.remove(seq, keep)
        self.map.remove(seq, keep)

    @rule(src=seqs, dst=seqs, share=shares)
    def copy(self, src: int, dst: int, share: float) -> None:
        start, end = self.length(dst), int(share * self.length(src))
        if src != dst and start < end:
            self.llama.copy(src, dst, start, end)
            self.map.copy(src, dst, start, end)

    @rule(src=seqs, dst=seqs, first=shares, last=shares)
    def share(self, src: int, dst: int, first: float, last: float) -> None:
        n = min(self.length(src), self.length(dst))
        start, end = int(first * n), int(last * n)
        if src != dst and start < end:
            self.share_range(src, dst, start, end)

    @rule(segment=st.integers(0, 5), seq=seqs, first=shares, last=shares)
    def save(self, segment: int, seq: int, first: float, last: float) -> None:
        start, end = int(first * self.length(seq)), int(last * self.length(seq))
        if segment in self.states:
            self.map.discard(segment)
            del self.states[segment]
        if start < end:
            self.llama.copy(seq, PROBE, start, end)
            self.states[segment] = self.llama.save(PROBE), range(start, end)
            self.llama.remove(PROBE, 0)
            self.map.save(segment, seq, start, end)

    @precondition(lambda self: self.states)
    @rule(dst=seqs, index=st.integers(0, 9), first=shares, last=shares)
    def load(self, dst: int, index: int, first: float, last: float) -> None:
        """A part of a segment, behind what the target keeps; all of it passes through the pool."""
        segment = sorted(self.states)[index % len(self.states)]
        state, stored = self.states[segment]
        start = stored.start + int(first * min(len(stored), self.length(dst) - stored.start))
        if start not in stored or start > self.length(dst):
            return
        end = stored.stop - int(last * (stored.stop - start - 1))
        self.llama.remove(dst, start)
        self.map.remove(dst, start)
        loaded = self.llama.load(PROBE, state) > 0
        self.compare()
        if loaded:
            self.llama.copy(PROBE, dst, start, end)
            self.llama.remove(PROBE, 0)
            self.map.load(segment, dst, start, end)
        else:
            with pytest.raises(IllegalCallError):
                self.map.load(segment, dst, start, end)

    @rule(seq=seqs, others=st.sets(seqs), first=shares, last=shares)
    def move(self, seq: int, others: set[int], first: float, last: float) -> None:
        """Repacking: pieces are saved and let go, then loaded one by one, and every holder takes the new cells."""
        pieces: list[Piece] = []
        for each in {seq} | others:
            n = self.length(each)
            start, end = int(first * n), int(last * n)
            part = self.cells(each)[start:end]
            holders = [s for s in range(PROBE) if self.cells(s)[start:end] == part]
            if part and all(set(part).isdisjoint(self.cells(s)) for s in range(PROBE) if s not in holders):
                pieces += [] if any(each in piece.holders for piece in pieces) else [Piece((*holders,), start, end)]
        states = []
        for piece in pieces:
            self.llama.copy(piece.holders[0], PROBE, piece.start, piece.end)
            states.append(self.llama.save(PROBE))
            self.llama.remove(PROBE, 0)
        for piece in pieces:
            for holder in piece.holders:
                self.llama.remove(holder, piece.start, piece.end)
        for piece, state in zip(pieces, states, strict=True):
            assert self.llama.load(PROBE, state) > 0
            for holder in piece.holders:
                self.llama.copy(PROBE, holder, piece.start, piece.end)
            self.llama.remove(PROBE, 0)
        self.map.move(pieces)

    def cells(self, seq: int) -> list[int]:
        cells: list[int] = self.map.cells(seq).tolist()
        return cells

    def run(self, runs: list[tuple[int, int]]) -> None:
        answer = self.llama.decode([(seq, self.length(seq), n_tokens) for seq, n_tokens in runs])
        self.compare()
        if answer == 0:
            self.map.decode(runs)
        else:
            assert answer == 1
            with pytest.raises(IllegalCallError):
                self.map.decode(runs)

    def share_range(self, src: int, dst: int, start: int, end: int) -> None:
        self.llama.remove(dst, start, end)
        self.llama.copy(src, dst, start, end)
        self.map.share(src, dst, start, end)

    def length(self, seq: int) -> int:
        return len(self.map.held(seq))

    def compare(self) -> None:
        positions = np.full(N_CTX, -1)
        holders = np.full(N_CTX, -1)
        n_holders = np.zeros(N_CTX, dtype=int)
        for seq in range(N_SEQS):
            cells = self.map.cells(seq)
            positions[cells] = np.asarray(self.map.held(seq))
            holders[cells] = seq
            n_holders[cells] += 1
        holders[n_holders > 1] = -1
        pool = self.llama.pool
        assert pool is not None
        assert (self.map.high_water, self.map.n_used) == (pool.high_water, pool.n_used)
        assert positions.tolist() == pool.positions
        assert holders.tolist() == pool.holders
        assert (positions[: pool.head] >= 0).all(), "a free cell below the head"


def test_llama_cpp_puts_tokens_where_the_map_does(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "3")
    library.initialise()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(tiny_model), llama_cpp.llama_model_default_params())
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    opened = Llama(model)

    class Machine(PlacementMachine):
        llama = opened

    try:
        run_state_machine_as_test(Machine, settings=settings(max_examples=2000 if LONG else 100))
    finally:
        opened.close()
        llama_cpp.llama_model_free(model)
        library.initialise()
