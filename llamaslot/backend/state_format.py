"""llama.cpp's format of a saved sequence: its reader, and joining parts of segments and streams by editing it.

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

A segment has the cells of its tokens, then data that belongs to no token, such as one token's window or an empty
recurrent state. So a part of a segment consists of the entries and rows of its cells. Joined parts have the bytes
that llama.cpp would save for these tokens, except for the order of cells if several segments are joined, on which
nothing depends.

A context with streams saves a sequence with the number of its streams, and the number of cells in each: 0 for all
streams but the sequence's own. Segments have one stream, whichever context saved them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import xxhash

from llamaslot.backend.host import new_kv
from llamaslot.base.kv_ops import Kv, KvPart
from llamaslot.base.model import SegmentSize, StateKind

HEADER_BYTES = 8
"""Magic and sequence id."""
TILES_CELL_BYTES = 24
"""Bytes of a cell's entry with the three numbers of M-RoPE: column and row of a token of a tile, and the id of a
token of a text. Else the first two are the position, and the third is negative.
"""
LAYOUTS = tuple(product((12, TILES_CELL_BYTES), (True, False)))
"""Possible layouts: bytes of a cell's entry, and whether there is V."""

Bytes = npt.NDArray[np.uint8]
_CELLS_AT = HEADER_BYTES + 4
"""Offset of the first stream's number of cells."""
_COUNT_BYTES = 4
"""Bytes of a number of streams or cells."""


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
    def order(self) -> npt.NDArray[np.intp]:
        """Indices of the cells in the order of their tokens."""
        return _order(_numbers(self.cells))

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


def read_entries(state: Kv) -> npt.NDArray[np.int32]:
    """Return position, column, row and id of each token of a segment of a model with M-RoPE, `[tokens, 4]`.

    Raises `ValueError` for bytes that are too short.
    """
    n_cells = _uint32(state, _CELLS_AT)
    cells = _take(state, _CELLS_AT + _COUNT_BYTES, n_cells * TILES_CELL_BYTES).reshape(n_cells, TILES_CELL_BYTES)
    numbers = _numbers(cells)
    return numbers[_order(numbers)][:, [0, 2, 3, 4]]


def _numbers(cells: Bytes) -> npt.NDArray[np.int32]:
    """Return the numbers of each cell's entry."""
    return np.ascontiguousarray(cells).view(np.int32)


def _order(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
    """Return the indices of cells by position, and within a tile, which has one, by row and column."""
    if numbers.shape[1] * numbers.itemsize < TILES_CELL_BYTES:
        return np.argsort(numbers[:, 0])
    return np.lexsort((numbers[:, 2], numbers[:, 3], numbers[:, 0]))


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
            order = saved.order
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


@dataclass(frozen=True, slots=True)
class Rows:
    """Cells of some tokens in saved bytes, as views."""

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


def rows_of_sequence(state: Kv, tokens: range, wanted: range, *, stream: int = 0, n_streams: int = 1) -> Rows:
    """Return the `wanted` rows of a saved sequence that holds these tokens in one stream, and no partial state.

    Raises `ValueError` for other bytes.
    """
    end = len(state) - (n_streams - 1 - stream) * _COUNT_BYTES
    at = _CELLS_AT + stream * _COUNT_BYTES
    return _rows(state, at, tokens, wanted, lambda saved: saved.end == end, tail=state[:0])


def join_parts(parts: Sequence[KvPart], size: SegmentSize) -> Kv:
    """Return the KV of the wanted tokens of these parts, each of which begins where the one before ends.

    Raises `ValueError` if the bytes are not such segments, or lack a token, and `MemoryError`.
    """
    for part in parts:
        is_within = part.tokens.start <= part.wanted.start < part.wanted.stop <= part.tokens.stop
        if not is_within or len(part.kv) != size.of(len(part.tokens)):
            raise ValueError(f"{len(part.kv)} bytes are not a segment of {part.tokens} with {part.wanted}")
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
    at = 0
    for piece in _pieces(rows, n_tokens, n_streams, rest):
        # An assignment of another size raises `ValueError`.
        result[at : at + piece.size] = piece.reshape(-1)
        at += piece.size
    if at != n_bytes:
        raise ValueError("a segment has another layout")
    return result


def _pieces(rows: Sequence[Rows], n_tokens: int, n_streams: int, rest: Bytes) -> Iterator[Bytes]:
    """Yield the bytes of joined rows, piece by piece, so that no more than one is copied at a time."""
    yield rows[0].head
    yield np.array([n_streams, n_tokens], np.uint32).view(np.uint8)
    for each in rows:
        yield each.cells
    yield _same([each.saved.layers for each in rows])
    n_layers = len(rows[0].saved.tensors) // 2
    for i, tensors in enumerate(zip(*(each.saved.tensors for each in rows), strict=True)):
        header = _same([tensor.header for tensor in tensors])
        yield header
        chosen = [tensor.rows[each.keep] for tensor, each in zip(tensors, rows, strict=True)]
        if rows[0].saved.is_transposed and i >= n_layers:
            element = int(header[4:8].copy().view(np.uint32)[0])
            chosen = [np.concatenate(chosen).reshape(n_tokens, -1, element).swapaxes(0, 1)]
        yield from chosen
    yield rest
    yield rows[0].tail


def _rows_of(part: KvPart, size: SegmentSize) -> Rows:
    def fits(saved: SavedCells) -> bool:
        return saved.bytes_per_token == size.per_token and not saved.is_transposed

    rows = _rows(part.kv, _CELLS_AT, part.tokens, part.wanted, fits, tail=part.kv[:0])
    return replace(rows, tail=part.kv[rows.saved.end :])


def _rows(
    state: Kv, at: int, tokens: range, wanted: range, fits: Callable[[SavedCells], bool], *, tail: Bytes
) -> Rows:
    """Read the cells whose number is at offset `at`; raises `ValueError` for another layout or other positions."""
    for cell_bytes, has_v in LAYOUTS:
        try:
            saved = read_cells(state, at, cell_bytes=cell_bytes, has_v=has_v)
        except ValueError:
            continue
        if len(saved.cells) == len(tokens) and fits(saved):
            break
    else:
        raise ValueError("a segment has another layout")
    if not _are_consecutive(saved, tokens.start):
        raise ValueError(f"a segment of {tokens} has other positions")
    of_cells = np.empty(len(tokens), dtype=np.int64)
    of_cells[saved.order] = np.arange(tokens.start, tokens.stop)
    keep = (of_cells >= wanted.start) & (of_cells < wanted.stop)
    first, n_kept = int(keep.argmax()), int(np.count_nonzero(keep))
    is_together = bool(keep[first : first + n_kept].all())
    return Rows(state[:HEADER_BYTES], saved, slice(first, first + n_kept) if is_together else keep, tail)


def _are_consecutive(saved: SavedCells, start: int) -> bool:
    """Return True if cells can be those of tokens from `start` on: after a tile, positions are lower."""
    numbers = _numbers(saved.cells)[saved.order]
    steps = np.diff(numbers[:, 0])
    if saved.cells.shape[1] < TILES_CELL_BYTES:
        return int(numbers[0, 0]) == start and bool((steps == 1).all())
    of_tile = numbers[:, 4] < 0
    return int(numbers[0, 0]) <= start and bool(((steps == 1) | (of_tile[:-1] & (steps >= 0))).all())


def _same(headers: Sequence[Bytes]) -> Bytes:
    """Return the header, which must be the same in all sources; raises `ValueError` if not."""
    if any(not np.array_equal(each, headers[0]) for each in headers):
        raise ValueError("segments have different layouts")
    return headers[0]
