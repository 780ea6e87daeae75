"""`llama_batch`: the tokens or the tile that llama.cpp computes at once, in arrays that it reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from llamaslot.base.backend import Run
from llamaslot.base.tokens import Tokens

if TYPE_CHECKING:
    import numpy.typing as npt

    from llamaslot.backend.llama.projector import EncodedTile


class Batch:
    """A `llama_batch` over numpy arrays that live as long as it does."""

    def __init__(self, size: int) -> None:
        self._tokens = np.zeros(size, dtype=np.int32)
        self._kept: tuple[npt.NDArray[Any], ...] = ()
        """Arrays that llama.cpp reads for the last batch, if it was of a tile."""
        self._starts: dict[int, tuple[int, int]] = {}
        """First token of each sequence in the batch, and its position."""
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

    def fill(
        self,
        runs: Sequence[Run],
        starts: Sequence[int],
        *,
        has_outputs: bool = False,
        tile: EncodedTile | None = None,
    ) -> tuple[dict[int, tuple[int, list[int]]], dict[int, tuple[int, Tokens]]]:
        """Write the runs one after another, each from its position in `starts` on.

        With `has_outputs` every token has an output. A `tile` stands in place of the tokens, whose ids llama.cpp
        must not see.

        Returns, by sequence id, the first row of logits to sample from and the draft, and the first row and
        tokens to be scored.
        """
        rows, targets = {}, {}
        at = 0
        self._starts = {}
        for run, start in zip(runs, starts, strict=True):
            n = len(run.tokens)
            self._starts.setdefault(run.seq, (run.start, start))
            self._tokens[at : at + n] = run.tokens
            self._positions[at : at + n] = np.arange(start, start + n) if n > 1 else start
            self._seqs[at : at + n] = run.seq
            self._output[at : at + n] = has_outputs
            if run.targets is not None and len(run.targets):
                self._output[at : at + len(run.targets)] = 1
                targets[run.seq] = at, run.targets
            at += n
            if run.n_outputs:
                first = at - run.n_outputs
                self._output[first:at] = 1
                rows[run.seq] = first, run.draft.tolist()
        self.struct.n_tokens = at
        self._use_tile(tile, starts[0])
        return rows, targets

    def _use_tile(self, tile: EncodedTile | None, start: int) -> None:
        """Compute a tile from a position on instead of tokens, or tokens again without one."""
        positions = self._positions
        if tile is not None and tile.places is not None:
            # The fourth number of each token is always 0.
            from_start = np.array([[start]] * 3 + [[0]], dtype=np.int32)
            positions = np.ascontiguousarray(tile.places + from_start)
        self._kept = (tile.embeddings, positions) if tile is not None else ()
        self.struct.token = _as(self._tokens, ctypes.c_int32) if tile is None else None
        self.struct.embd = _as(tile.embeddings, ctypes.c_float) if tile is not None else None
        self.struct.pos = _as(positions, ctypes.c_int32)

    def sent(self) -> dict[int, tuple[int, int]]:
        """Return the first and the number of tokens by sequence id, from the arrays of the batch.

        llama.cpp gets these, except for a tile with M-RoPE, which has other positions (`_use_tile`).
        """
        n = self.struct.n_tokens
        sent: dict[int, tuple[int, int]] = {}
        for seq, position in zip(self._seqs[:n].tolist(), self._positions[:n].tolist(), strict=True):
            token, start = self._starts[seq]
            first, n_tokens = sent.get(seq, (token + position - start, 0))
            sent[seq] = first, n_tokens + 1
        return sent


def _as(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
