"""`llama_batch`: the tokens of a step, in llama.cpp's struct."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.tokens import Tokens


class Batch:
    """A `llama_batch` over numpy arrays that live as long as it does."""

    def __init__(self, size: int) -> None:
        self._tokens = np.zeros(size, dtype=np.int32)
        self._positions = np.zeros(size, dtype=np.int32)
        self._n_seq_id = np.ones(size, dtype=np.int32)
        self._seqs = np.zeros(size, dtype=np.int32)
        addresses = self._seqs.ctypes.data + self._seqs.itemsize * np.arange(size, dtype=np.uintp)
        self._seq_pointers = addresses.astype(np.uintp)
        self._output = np.zeros(size, dtype=np.int8)
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=_as(self._tokens, ctypes.c_int32),
            embd=None,
            pos=_as(self._positions, ctypes.c_int32),
            n_seq_id=_as(self._n_seq_id, ctypes.c_int32),
            seq_id=_as(self._seq_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_as(self._output, ctypes.c_int8),
        )

    def fill(self, runs: Sequence[Run]) -> tuple[dict[int, tuple[int, list[int]]], dict[int, tuple[int, Tokens]]]:
        """Write the runs one after another.

        Returns, by sequence id, the first row of logits to sample from and the draft, and the first row and
        tokens to be scored.
        """
        rows, targets = {}, {}
        at = 0
        for run in runs:
            n = len(run.tokens)
            self._tokens[at : at + n] = run.tokens
            self._positions[at : at + n] = np.arange(run.start, run.start + n) if n > 1 else run.start
            self._seqs[at : at + n] = run.seq
            self._output[at : at + n] = 0
            if run.targets is not None and len(run.targets):
                self._output[at : at + len(run.targets)] = 1
                targets[run.seq] = at, run.targets
            at += n
            if run.n_outputs:
                first = at - run.n_outputs
                self._output[first:at] = 1
                rows[run.seq] = first, self._tokens[first + 1 : at].tolist()
        self.struct.n_tokens = at
        return rows, targets

    def sent(self) -> dict[int, tuple[int, int]]:
        """Return the first position and the number of tokens by sequence id, from the arrays given to llama.cpp."""
        n = self.struct.n_tokens
        sent: dict[int, tuple[int, int]] = {}
        for seq, position in zip(self._seqs[:n].tolist(), self._positions[:n].tolist(), strict=True):
            first, n_tokens = sent.get(seq, (position, 0))
            sent[seq] = first, n_tokens + 1
        return sent


def _as(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
