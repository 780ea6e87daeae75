"""Reader of llama.cpp's format of a saved sequence.

llama.cpp saves a sequence as

    magic, sequence id                                       2 x uint32
    the cache of all tokens, then that of the windows, if the model has them; for each of them:
        streams                                              uint32
        for each stream: cells                               uint32, and if there are any:
            for each cell: position, ids (1), [extra], id    in the order of cells, which is not that of positions
            transposed V, layers                             2 x uint32
            for each layer: type, bytes of a row, rows of K  int32, uint64, one row for each cell
            for each layer, unless it is MLA: the same for V
            if V is transposed instead: type, bytes of an element, width; for each of the width, all cells' elements
    the recurrent state, if the model has one: cells (0 or 1), position, no ids, and the state of all layers

The format states neither the size of a cell's entry nor whether there is V, so layouts are tried until one fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import xxhash

from llamaslot.base.kv_ops import Kv
from llamaslot.base.model import StateKind

HEADER_BYTES = 8
"""Magic and sequence id."""
LAYOUTS = tuple(product((12, 24), (True, False)))
"""Possible layouts: bytes of a cell's entry (24 with the three numbers of M-RoPE), and whether there is V."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tensor:
    """K or V of a layer."""

    header: Bytes
    rows: Bytes
    """`[cells, bytes]`."""


@dataclass(frozen=True, slots=True)
class SavedCells:
    """Cells of a sequence in one stream of a cache, as views of the saved bytes."""

    end: int
    """Offset of the data after them."""
    cells: Bytes
    """Entries of all cells, `[cells, bytes]`."""
    layers: Bytes
    """Header of the layers."""
    tensors: tuple[Tensor, ...]
    """K of all layers, then V."""

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """The position of each cell's token."""
        found: npt.NDArray[np.int32] = self.cells[:, :4].copy().view(np.int32)[:, 0]
        return found

    @property
    def is_transposed(self) -> bool:
        """True if V is transposed, as without flash attention."""
        return bool(_uint32(self.layers, 0))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's entry and rows."""
        return int(self.cells.shape[1]) + sum(int(each.rows.shape[1]) for each in self.tensors)


def read_cells(state: Kv, at: int, *, cell_bytes: int, has_v: bool) -> SavedCells:
    """Read the cells whose number is at offset `at`; raises `ValueError` for another layout."""
    n_cells = _uint32(state, at)
    cells = _take(state, at + 4, n_cells * cell_bytes).reshape(n_cells, cell_bytes)
    if (cells[:, 4:8].copy().view(np.uint32) != 1).any():
        raise ValueError("a cell does not have exactly one sequence id")
    at += 4 + cells.size
    layers = _take(state, at, 8)
    is_transposed, n_layers = _uint32(layers, 0), _uint32(layers, 4)
    if is_transposed > 1:
        raise ValueError("no header of layers")
    at += layers.size
    tensors: list[Tensor] = []
    for i in range(n_layers * (1 + has_v)):
        header = _take(state, at, 12)
        at += header.size
        if is_transposed and i >= n_layers:
            element, width = _uint32(header, 4), _uint32(header, 8)
            columns = _take(state, at, width * n_cells * element).reshape(width, n_cells, element)
            rows = columns.swapaxes(0, 1).reshape(n_cells, width * element)
        else:
            row_bytes = int(header[4:].copy().view(np.uint64)[0])
            rows = _take(state, at, n_cells * row_bytes).reshape(n_cells, row_bytes)
        tensors.append(Tensor(header, rows))
        at += rows.size
    return SavedCells(at, cells, layers, tuple(tensors))


def digests(state: Kv, kind: StateKind) -> dict[str, bytes]:
    """Return a digest of each part of a saved sequence, for a model with a partial state of this kind.

    The digests depend neither on the sequence's id nor on its cells, because rows are sorted by position. Raises
    `ValueError` for another format.
    """
    names = [] if kind is StateKind.RECURRENT else ["KV"]
    if kind.has_window:
        names.append("window")
    for cell_bytes, has_v in LAYOUTS:
        try:
            return dict(_digests(state, names, kind.has_recurrent_state, cell_bytes, has_v))
        except ValueError:
            continue
    raise ValueError("a saved sequence has another format")


def _digests(
    state: Kv, names: list[str], has_recurrent_state: bool, cell_bytes: int, has_v: bool
) -> Iterator[tuple[str, bytes]]:
    at = HEADER_BYTES
    for name in names:
        n_streams = _uint32(state, at)
        at += 4
        for _ in range(n_streams):
            if not _uint32(state, at):
                at += 4
                continue
            saved = read_cells(state, at, cell_bytes=cell_bytes, has_v=has_v)
            order = np.argsort(saved.positions)
            # Leaves out the number of ids and the id itself.
            yield f"the positions of {name}", _digest(np.delete(saved.cells[order], np.s_[4:8], axis=1)[:, :-4])
            n_layers = _uint32(saved.layers, 4)
            for i, tensor in enumerate(saved.tensors):
                part = "K" if i < n_layers else "V"
                where = f"{part} of layer {i % n_layers} of {name}"
                yield where, _digest(tensor.header, tensor.rows[order])
            at = saved.end
    rest = _take(state, at, len(state) - at)
    if has_recurrent_state:
        n_cells = _uint32(rest, 0)
        if n_cells > 1 or (n_cells and _uint32(rest, 8)):
            raise ValueError("no recurrent state of one sequence")
        yield "the recurrent state", _digest(rest)
    elif rest.size:
        raise ValueError("more than the caches")


def _digest(*parts: Bytes) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


def _uint32(data: Bytes, at: int) -> int:
    return int(_take(data, at, 4).copy().view(np.uint32)[0])


def _take(data: Bytes, at: int, n_bytes: int) -> Bytes:
    taken = data[at : at + n_bytes]
    if taken.size != n_bytes:
        raise ValueError("a saved sequence is too short")
    return taken
