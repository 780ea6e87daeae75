"""Joins parts of saved segments into one segment, by editing llama.cpp's state format.

llama.cpp saves a sequence as

    magic, sequence id, streams, cells                       4 x uint32
    for each cell: position, ids (1), [extra], id            in the order of cells, which is not that of positions
    transposed V (0), layers                                 2 x uint32
    for each layer: type, bytes of a row, rows of K          int32, uint64, one row for each cell
    for each layer with V: the same for V
    the rest, such as one token's window or an empty recurrent state

so a part of it consists of the entries and rows of its cells. The result has the bytes that llama.cpp saves for
these tokens, except for the order of cells if several segments are joined, on which nothing depends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from llamaslot.backend.memory import new_kv
from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.base.model import SegmentSize

_HEADER_BYTES = 16
_LAYERS_BYTES = 8
_ROWS_HEADER_BYTES = 12
"""Type and row size before the rows of a layer."""
_CELL_BYTES = (12, 24)
"""Bytes of a cell's entry: without and with the three numbers that M-RoPE adds."""

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Source:
    """A segment, and the cells to take from it."""

    kv: Kv
    cells: _Bytes
    """The entries of all cells, `[cells, bytes]`."""
    keep: npt.NDArray[np.bool_]
    """Mask of the cells to take."""


def join_parts(parts: Sequence[KvPart], size: SegmentSize) -> Kv:
    """Return the KV of the wanted positions of these parts, each of which begins where the last one ends.

    Raises `ValueError` for bytes that are not such segments, or lack any of these positions, `MemoryError` if there
    is no memory.
    """
    n_tokens = sum(len(part.wanted) for part in parts)
    for part in parts:
        is_within = part.positions.start <= part.wanted.start < part.wanted.stop <= part.positions.stop
        if not is_within or len(part.kv) != size.of(len(part.positions)):
            raise ValueError(f"{len(part.kv)} bytes are no segment of {part.positions} with {part.wanted}")
    if any(a.wanted.stop != b.wanted.start for a, b in pairwise(parts)):
        raise ValueError("a segment has a gap")
    if not size.per_token:
        return parts[0].kv
    sources = [_source(part) for part in parts]
    if len(parts) == 1 and sources[0].keep.all():
        return parts[0].kv
    result = new_kv(size.of(n_tokens))
    writer = _Writer(result)
    header = sources[0].kv[:_HEADER_BYTES].copy()
    header[12:].view(np.uint32)[0] = n_tokens
    writer.put(header)
    for each in sources:
        writer.put(each.cells[each.keep])
    ats = [_HEADER_BYTES + each.cells.size for each in sources]
    _put_same(writer, sources, ats, _LAYERS_BYTES)
    n_left = size.per_token - sources[0].cells.shape[1]
    while n_left > 0:
        at = ats[0]
        row_bytes = int(sources[0].kv[at + 4 : at + _ROWS_HEADER_BYTES].copy().view(np.uint64)[0])
        if not 0 < row_bytes <= n_left:
            raise ValueError("a segment has rows of another size")
        _put_same(writer, sources, ats, _ROWS_HEADER_BYTES)
        for i, each in enumerate(sources):
            rows = each.kv[ats[i] : ats[i] + len(each.cells) * row_bytes]
            writer.put(rows.reshape(len(each.cells), row_bytes)[each.keep])
            ats[i] += rows.size
        n_left -= row_bytes
    writer.put(sources[0].kv[ats[0] :])
    if writer.at != len(result):
        raise ValueError("a segment has another layout")
    return result


def _source(part: KvPart) -> _Source:
    """Read the entries of the cells; raises `ValueError` for another layout, or other positions."""
    kv, n_cells = part.kv, len(part.positions)
    cells = _cells(kv, n_cells)
    held = cells[:, :4].copy().view(np.int32)[:, 0]
    if not np.array_equal(np.sort(held), np.arange(part.positions.start, part.positions.stop)):
        raise ValueError(f"a segment of {part.positions} has other positions")
    return _Source(kv, cells, (held >= part.wanted.start) & (held < part.wanted.stop))


def _cells(kv: Kv, n_cells: int) -> _Bytes:
    if int(kv[12:16].copy().view(np.uint32)[0]) == n_cells:
        for n_bytes in _CELL_BYTES:
            entries = kv[_HEADER_BYTES : _HEADER_BYTES + n_cells * n_bytes]
            is_transposed = kv[_HEADER_BYTES + entries.size :][:4].copy()
            if entries.size != n_cells * n_bytes or len(is_transposed) < 4:
                break
            cells = entries.reshape(n_cells, n_bytes)
            n_ids = cells[:, 4:8].copy().view(np.uint32)[:, 0]
            if (n_ids == 1).all() and not is_transposed.view(np.uint32)[0]:
                return cells
    raise ValueError("a segment has another layout")


def _put_same(writer: _Writer, sources: Sequence[_Source], ats: list[int], n_bytes: int) -> None:
    """Copy a header that all sources have; raises `ValueError` if it differs."""
    header = sources[0].kv[ats[0] : ats[0] + n_bytes]
    for i, each in enumerate(sources):
        if not np.array_equal(each.kv[ats[i] : ats[i] + n_bytes], header):
            raise ValueError("segments have different layouts")
        ats[i] += n_bytes
    writer.put(header)


class _Writer:
    """Fills an array from its beginning."""

    def __init__(self, target: Kv) -> None:
        self._target = target
        self.at = 0

    def put(self, data: _Bytes) -> None:
        """Append these bytes; raises `ValueError` if they do not fit."""
        end = self.at + data.size
        if end > len(self._target):
            raise ValueError("a segment has another layout")
        self._target[self.at : end] = data.reshape(-1)
        self.at = end
