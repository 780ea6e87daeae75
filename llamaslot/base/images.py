"""Images in prompts: what a model makes of one, and the ids that stand for its tokens.

llama.cpp cuts an image into *tiles* and puts delimiters between them, which are tokens of the vocabulary. The
projector (`--mmproj`) computes an embedding for each token of a tile. In a prompt these tokens have negative ids,
which are a digest of the image's pixels, the projector and the tile's place. So prompts with the same image begin
alike, and all that compares, stores or looks up token ids need not know of images. Only what computes a tile
needs its image, and what must not end within a tile asks `before_tile`.

Some tokens of text have such ids too (`cache_ids.py`). By these alone, as the cache sees them, they are a tile;
llama.cpp gets the tokens.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from llamaslot.base.tokens import Tokens

_FIRST = -(2**30)
"""Least id of the first token of a tile. Those of the others are lower, so that ids say where tiles begin."""
Delimiters = tuple[int, ...]
"""Token ids between the tiles of an image."""


class ImageSize(msgspec.Struct, frozen=True):
    """Size of an image, in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        """Return the size as messages show it."""
        return f"{self.width} x {self.height}"


class ImageLayout(msgspec.Struct, frozen=True):
    """Tokens that a model makes of any image of one size, in their order."""

    pieces: tuple[Delimiters | int, ...]
    """Delimiters, and the number of tokens of each tile."""
    refusal: str = ""
    """Reason why no prompt may have an image of this size; then there are no pieces."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the whole image."""
        return sum(piece if isinstance(piece, int) else len(piece) for piece in self.pieces)


class PromptImage(msgspec.Struct, frozen=True):
    """An image of a prompt."""

    data: bytes
    """Its file, as the client sent it."""
    digest: bytes
    """Digest of its pixels and of the projector."""
    tiles: tuple[tuple[int, int], ...]
    """Positions `[start, end)` of each of its tiles in the prompt."""


class Tile(NamedTuple):
    """A tile of a prompt's image."""

    image: PromptImage
    number: int
    """Its place among the tiles of the image."""

    @property
    def start(self) -> int:
        """Position of its first token in the prompt."""
        return self.image.tiles[self.number][0]

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.image.tiles[self.number][1]


def before_tile(tokens: Tokens, n: int) -> int:
    """Return `n`, or the position where the tile begins within which the first `n` of these tokens may end.

    They may if the last one is of a tile and no token is known to follow.
    """
    if not 0 < n <= len(tokens) or tokens[n - 1] >= 0 or (n < len(tokens) and tokens[n] >= _FIRST):
        return n
    while n > 1 and tokens[n - 1] < _FIRST:
        n -= 1
    return n - 1


def between_tiles(tokens: Tokens, n: int) -> int:
    """Return `n`, or if it is within a tile the place after it, or before it if no more tokens follow."""
    import numpy as np  # noqa: PLC0415

    if n >= len(tokens) or tokens[n] >= _FIRST:
        return n
    rest = np.flatnonzero(tokens[n:] >= _FIRST)
    return n + int(rest[0]) if len(rest) else before_tile(tokens, n)


def tile_ids(digest: bytes, number: int, n_tokens: int) -> Tokens:
    """Return the ids of a tile's tokens, negative int32; those of different tiles differ."""
    import numpy as np  # noqa: PLC0415 - the server's parent process does without

    words = hashlib.shake_128(digest + number.to_bytes(4, "little")).digest(4 * n_tokens)
    # The two highest bits are 11 in the first id, and 10 in the others.
    ids = np.frombuffer(words, dtype="<u4") >> 2 | np.uint32(1 << 31)
    ids[0] |= 1 << 30
    return ids.astype(np.uint32).view(np.int32)
