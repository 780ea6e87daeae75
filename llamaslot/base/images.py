"""Images in prompts: what a model makes of one, and the ids that stand for its tokens.

llama.cpp cuts an image into *tiles* and puts delimiters between them, which are tokens of the vocabulary. The
projector (`--mmproj`) computes an embedding for each token of a tile. In a prompt these tokens have negative ids,
which are a digest of the image's pixels, the projector and the tile's place. So prompts with the same image begin
alike, and all that compares, stores or looks up token ids need not know of images. Only what computes a tile
needs its image.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from llamaslot.base.tokens import Tokens

Delimiters = tuple[int, ...]
"""Token ids between the tiles of an image."""


class ImageSize(msgspec.Struct, frozen=True, order=True):
    """Pixels of an image."""

    width: int
    height: int


class ImageLayout(msgspec.Struct, frozen=True):
    """Tokens that a model makes of any image of one size, in their order."""

    runs: tuple[Delimiters | int, ...]
    """Delimiters, and the number of tokens of each tile."""
    refusal: str = ""
    """Reason why no prompt may have an image of this size; then there are no runs."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the whole image."""
        return sum(run if isinstance(run, int) else len(run) for run in self.runs)


class Tile(msgspec.Struct, frozen=True):
    """A tile of an image, at positions `[start, end)` of a prompt."""

    start: int
    end: int
    number: int
    """Its place among the tiles of its image."""


class PromptImage(msgspec.Struct, frozen=True):
    """An image of a prompt."""

    data: bytes
    """Its file, as the client sent it."""
    digest: bytes
    """Digest of its pixels and of the projector."""
    tiles: tuple[Tile, ...] = ()


def before_image(tokens: Tokens, n: int) -> int:
    """Return `n`, or the place where images begin if the first `n` of these tokens may end within one.

    That is not known if no more tokens follow.
    """
    if not 0 < n <= len(tokens) or tokens[n - 1] >= 0 or (n < len(tokens) and tokens[n] >= 0):
        return n
    while n and tokens[n - 1] < 0:
        n -= 1
    return n


def tile_ids(digest: bytes, number: int, n_tokens: int) -> Tokens:
    """Return the ids of a tile's tokens, negative int32; those of different tiles differ."""
    import numpy as np  # noqa: PLC0415 - the server's parent process does without

    words = hashlib.shake_128(digest + number.to_bytes(4, "little")).digest(4 * n_tokens)
    return (np.frombuffer(words, dtype="<u4") | np.uint32(1 << 31)).astype(np.uint32).view(np.int32)
