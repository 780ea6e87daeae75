"""Rows of saved sequences: parts of segments and of whole streams, joined by editing llama.cpp's format.

A segment has the cells of its tokens (`state_format.py`), then data that belongs to no token, such as one token's
window or an empty recurrent state. So a part of a segment consists of the entries and rows of its cells. The result
has the bytes that llama.cpp would save for these tokens, except for the order of cells if several segments are
joined, on which nothing depends.

A context with streams saves a sequence with the number of its streams, and the number of cells in each: 0 for all
streams but the sequence's own. Segments have one stream, whichever context saved them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from llamaslot.backend.memory import new_kv
from llamaslot.backend.state_format import HEADER_BYTES, LAYOUTS, Bytes, SavedCells, read_cells
from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.base.model import SegmentSize

_CELLS_AT = HEADER_BYTES + 4
"""Offset of the first stream's number of cells."""
_COUNT_BYTES = 4
"""Bytes of a number of streams or cells."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Cells of some positions in saved bytes, as views."""

    head: Bytes
    """Magic and sequence id."""
    saved: SavedCells
    keep: npt.NDArray[np.bool_] | slice
    """The cells to take; a slice, which is faster, if they are contiguous."""
    tail: Bytes
    """Data after the cells that belongs to no token."""

    @property
    def cells(self) -> Bytes:
        """Entries of the cells."""
        return self.saved.cells[self.keep]


def rows_of_sequence(state: Kv, positions: range, wanted: range, *, stream: int = 0, n_streams: int = 1) -> Rows:
    """Return the `wanted` rows of a saved sequence that holds `positions` in one stream, and no partial state.

    Raises `ValueError` for other bytes.
    """
    end = len(state) - (n_streams - 1 - stream) * _COUNT_BYTES
    at = _CELLS_AT + stream * _COUNT_BYTES
    return _rows(state, at, positions, wanted, lambda saved: saved.end == end, tail=state[:0])


def join_parts(parts: Sequence[KvPart], size: SegmentSize) -> Kv:
    """Return the KV of the wanted positions of these parts, each of which begins where the one before ends.

    Raises `ValueError` if the bytes are not such segments, or lack a position, and `MemoryError`.
    """
    for part in parts:
        is_within = part.positions.start <= part.wanted.start < part.wanted.stop <= part.positions.stop
        if not is_within or len(part.kv) != size.of(len(part.positions)):
            raise ValueError(f"{len(part.kv)} bytes are not a segment of {part.positions} with {part.wanted}")
    if any(a.wanted.stop != b.wanted.start for a, b in pairwise(parts)):
        raise ValueError("a segment has a gap")
    if not size.per_token:
        return parts[0].kv
    rows = [_rows_of(part, size) for part in parts]
    if len(parts) == 1 and len(rows[0].cells) == len(rows[0].saved.cells):
        return parts[0].kv
    return join(rows)


def join(rows: Sequence[Rows], *, n_streams: int = 1) -> Kv:
    """Return these rows as saved bytes of a context of `n_streams`; raises the same errors as `join_parts`.

    The cells are in the first stream: llama.cpp loads them into the sequence's own stream anyway.
    """
    n_tokens = sum(len(each.cells) for each in rows)
    first = rows[0].saved
    rest = np.zeros((n_streams - 1) * _COUNT_BYTES, np.uint8)
    n_bytes = _CELLS_AT + _COUNT_BYTES + n_tokens * first.bytes_per_token + first.layers.size
    n_bytes += sum(tensor.header.size for tensor in first.tensors) + rest.size + rows[0].tail.size
    result = new_kv(n_bytes)
    writer = _Writer(result)
    writer.put(rows[0].head)
    writer.put(np.array([n_streams, n_tokens], np.uint32).view(np.uint8))
    for each in rows:
        writer.put(each.cells)
    writer.put(_same([each.saved.layers for each in rows]))
    for i, tensors in enumerate(zip(*(each.saved.tensors for each in rows), strict=True)):
        header = _same([tensor.header for tensor in tensors])
        writer.put(header)
        chosen = [tensor.rows[each.keep] for tensor, each in zip(tensors, rows, strict=True)]
        if first.is_transposed and i >= len(first.tensors) // 2:
            element = int(header[4:8].copy().view(np.uint32)[0])
            chosen = [np.concatenate(chosen).reshape(n_tokens, -1, element).swapaxes(0, 1)]
        for each in chosen:
            writer.put(each)
    writer.put(rest)
    writer.put(rows[0].tail)
    if writer.at != len(result):
        raise ValueError("a segment has another layout")
    return result


def _rows_of(part: KvPart, size: SegmentSize) -> Rows:
    def fits(saved: SavedCells) -> bool:
        return saved.bytes_per_token == size.per_token and not saved.is_transposed

    rows = _rows(part.kv, _CELLS_AT, part.positions, part.wanted, fits, tail=part.kv[:0])
    return replace(rows, tail=part.kv[rows.saved.end :])


def _rows(
    state: Kv, at: int, positions: range, wanted: range, fits: Callable[[SavedCells], bool], *, tail: Bytes
) -> Rows:
    """Read the cells whose number is at offset `at`; raises `ValueError` for another layout or other positions."""
    for cell_bytes, has_v in LAYOUTS:
        try:
            saved = read_cells(state, at, cell_bytes=cell_bytes, has_v=has_v)
        except ValueError:
            continue
        if len(saved.cells) == len(positions) and fits(saved):
            break
    else:
        raise ValueError("a segment has another layout")
    held = saved.positions
    if not np.array_equal(np.sort(held), np.arange(positions.start, positions.stop)):
        raise ValueError(f"a segment of {positions} has other positions")
    keep = (held >= wanted.start) & (held < wanted.stop)
    first, n_kept = int(keep.argmax()), int(np.count_nonzero(keep))
    is_together = bool(keep[first : first + n_kept].all())
    return Rows(state[:HEADER_BYTES], saved, slice(first, first + n_kept) if is_together else keep, tail)


def _same(headers: Sequence[Bytes]) -> Bytes:
    """Return the header, which must be the same in all sources; raises `ValueError` if not."""
    if any(not np.array_equal(each, headers[0]) for each in headers):
        raise ValueError("segments have different layouts")
    return headers[0]


class _Writer:
    """Fills an array from its start."""

    def __init__(self, target: Kv) -> None:
        self._target = target
        self.at = 0

    def put(self, data: Bytes) -> None:
        """Append bytes; raises `ValueError` if they do not fit."""
        end = self.at + data.size
        if end > len(self._target):
            raise ValueError("a segment has another layout")
        self._target[self.at : end] = data.reshape(-1)
        self.at = end
