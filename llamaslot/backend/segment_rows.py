"""Joins parts of saved segments into one segment, by editing llama.cpp's format of a saved sequence.

A segment has the cells of its tokens (`state_format.py`), then what follows them, such as one token's window or an
empty recurrent state. So a part of it consists of the entries and rows of its cells. The result has the bytes that
llama.cpp saves for these tokens, except for the order of cells if several segments are joined, on which nothing
depends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from llamaslot.backend.memory import new_kv
from llamaslot.backend.state_format import HEADER_BYTES, LAYOUTS, Bytes, SavedCells, read_cells
from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.base.model import SegmentSize

_CELLS_AT = HEADER_BYTES + 4
"""Place of the number of cells, after the number of streams, which is 1."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A segment, and the cells to take from it."""

    kv: Kv
    saved: SavedCells
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
    sources = [_source(part, size) for part in parts]
    if len(parts) == 1 and sources[0].keep.all():
        return parts[0].kv
    result = new_kv(size.of(n_tokens))
    writer = _Writer(result)
    writer.put(sources[0].kv[:_CELLS_AT])
    writer.put(np.array([n_tokens], np.uint32).view(np.uint8))
    for each in sources:
        writer.put(each.saved.cells[each.keep])
    writer.put(_same([each.saved.layers for each in sources]))
    for tensors in zip(*(each.saved.tensors for each in sources), strict=True):
        writer.put(_same([tensor.header for tensor in tensors]))
        for tensor, each in zip(tensors, sources, strict=True):
            writer.put(tensor.rows[each.keep])
    writer.put(sources[0].kv[sources[0].saved.end :])
    if writer.at != len(result):
        raise ValueError("a segment has another layout")
    return result


def _source(part: KvPart, size: SegmentSize) -> _Source:
    """Read the cells of a segment; raises `ValueError` for another layout, or other positions."""
    saved = _cells(part.kv, len(part.positions), size)
    held = saved.positions
    if not np.array_equal(np.sort(held), np.arange(part.positions.start, part.positions.stop)):
        raise ValueError(f"a segment of {part.positions} has other positions")
    return _Source(part.kv, saved, (held >= part.wanted.start) & (held < part.wanted.stop))


def _cells(kv: Kv, n_cells: int, size: SegmentSize) -> SavedCells:
    for cell_bytes, has_v in LAYOUTS:
        try:
            saved = read_cells(kv, _CELLS_AT, cell_bytes=cell_bytes, has_v=has_v)
        except ValueError:
            continue
        fits = len(saved.cells) == n_cells and saved.bytes_per_token == size.per_token
        if fits and not saved.is_transposed:
            return saved
    raise ValueError("a segment has another layout")


def _same(headers: Sequence[Bytes]) -> Bytes:
    """Return a header that all sources have; raises `ValueError` if it differs."""
    if any(not np.array_equal(each, headers[0]) for each in headers):
        raise ValueError("segments have different layouts")
    return headers[0]


class _Writer:
    """Fills an array from its beginning."""

    def __init__(self, target: Kv) -> None:
        self._target = target
        self.at = 0

    def put(self, data: Bytes) -> None:
        """Append these bytes; raises `ValueError` if they do not fit."""
        end = self.at + data.size
        if end > len(self._target):
            raise ValueError("a segment has another layout")
        self._target[self.at : end] = data.reshape(-1)
        self.at = end
