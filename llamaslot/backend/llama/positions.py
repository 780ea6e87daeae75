"""Positions of tokens in llama.cpp, which in some models are not their places in the sequence (M-RoPE).

Everywhere else token n of a sequence is at position n. Models with M-RoPE count the tokens of an image in several
dimensions: all tokens of a tile have one position, besides a row and a column, and what follows is as many
positions later as the longer side of the tile has tokens.

    token       0 1 2 | 3 4 5 6 7 8 | 9 10      a tile of 3 x 2 tokens
    position    0 1 2 | 3 3 3 3 3 3 | 6 7
    row         0 1 2 | 3 3 3 4 4 4 | 6 7
    column      0 1 2 | 3 4 5 3 4 5 | 6 7

llama.cpp copies and removes ranges of positions, so in the pool a tile cannot be cut. A saved sequence has the rows
and columns of its cells, so it can be cut anywhere on the host, and says itself which of its tokens are of tiles
(fact 46).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from llamaslot.backend.state_format import read_entries
from llamaslot.base.kv_ops import IllegalCallError, Kv


class TileSpan(NamedTuple):
    """Tokens `[start, end)` of a sequence, which are those of a tile, or a part of them."""

    start: int
    end: int
    position: int
    """Position of each of them."""
    n_positions: int
    """Positions from there to the token after the tile."""

    @property
    def next(self) -> int:
        """Position of the token after the tile."""
        return self.position + self.n_positions


class Positions:
    """Tiles of the sequences of a context, and what follows from them: which tokens are at which positions."""

    def __init__(self, n_seqs: int, *, has_tiles: bool) -> None:
        self.has_tiles = has_tiles
        """True if sequences may have tiles that share positions."""
        self.of_seqs: list[tuple[TileSpan, ...]] = [()] * n_seqs
        """Those of each sequence, in order."""

    def of(self, seq: int, n: int) -> int:
        """Return the position of token `n`, which the sequence need not hold yet."""
        for tile in reversed(self.of_seqs[seq]):
            if tile.start < n:
                return tile.next + n - tile.end if n >= tile.end else tile.position
        return n

    def cut(self, seq: int, n: int) -> int:
        """Return the position before which the first `n` tokens are; raises `IllegalCallError` within a tile."""
        if self.whole(seq, range(n)).stop != n:
            raise IllegalCallError(f"{n} tokens of sequence {seq} end within a tile")
        return self.of(seq, n)

    def at(self, seq: int, start: int, end: int) -> range:
        """Return the positions of tokens `[start, end)`; raises `IllegalCallError` if these cut a tile."""
        return range(self.cut(seq, start), self.cut(seq, end))

    def n_tokens(self, seq: int, position: int) -> int:
        """Return how many tokens are before a position."""
        for tile in reversed(self.of_seqs[seq]):
            if tile.position < position:
                return tile.end + max(position - tile.next, 0)
        return position

    def whole(self, seq: int, tokens: range) -> range:
        """Return a range of tokens with all tokens of the tiles of which it has some."""
        start, stop = tokens.start, tokens.stop
        for tile in self.of_seqs[seq]:
            if tile.start < start < tile.end:
                start = tile.start
            if tile.start < stop < tile.end:
                stop = tile.end
        return range(start, stop)

    def within(self, seq: int, tokens: range) -> list[TileSpan]:
        """Return the tiles that begin in a range of tokens."""
        return [tile for tile in self.of_seqs[seq] if tile.start in tokens]

    def append(self, seq: int, tiles: Iterable[TileSpan]) -> None:
        """Record tiles at the end of a sequence; the first may continue a part of one."""
        known = [*self.of_seqs[seq]]
        for tile in tiles:
            last = known[-1] if known else None
            if last is not None and last.position == tile.position:
                n_positions = max(last.n_positions, tile.n_positions)
                known[-1] = last._replace(end=tile.end, n_positions=n_positions)
            else:
                known.append(tile)
        self.of_seqs[seq] = tuple(known)

    def truncate(self, seq: int, keep: int) -> None:
        """Record that a sequence holds no more than its first `keep` tokens."""
        if self.of_seqs[seq] and self.of_seqs[seq][-1].end > keep:
            self.of_seqs[seq] = tuple(tile for tile in self.of_seqs[seq] if tile.end <= keep)


def saved_positions(kv: Kv, tokens: range, wanted: range) -> tuple[range, Sequence[TileSpan]]:
    """Return the positions that `wanted` tokens have in a segment of `tokens`, and its tiles among them.

    The model must have M-RoPE. Raises `ValueError` for other bytes.
    """
    entries = read_entries(kv)
    if len(entries) != len(tokens):
        raise ValueError(f"a segment of {tokens} has {len(entries)} cells")
    entries = entries[wanted.start - tokens.start : wanted.stop - tokens.start]
    (of_tiles,) = np.nonzero(entries[:, 3] < 0)
    tiles = []
    for position in np.unique(entries[of_tiles, 0]).tolist():
        places = of_tiles[entries[of_tiles, 0] == position]
        last = int(entries[places, 1:3].max())
        start, end = wanted.start + int(places[0]), wanted.start + int(places[-1]) + 1
        tiles.append(TileSpan(start, end, position, last + 1 - position))
    return range(int(entries[0, 0]), int(entries[-1, 0]) + 1), tiles
